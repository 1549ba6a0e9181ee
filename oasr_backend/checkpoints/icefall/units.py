"""The vocabulary of an icefall directory: `tokens.txt`, and which of its tokens is the blank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from oasr_backend.checkpoints.icefall.arguments import Arguments
from oasr_backend.checkpoints.icefall.files import IcefallFiles
from oasr_backend.errors import CheckpointError
from oasr_backend.text.tokenizer import UnitTokenizer, load_tokenizer

_BLANK = "<blk>"
#: Symbols that tell words of one spelling apart in a lexicon; no output stands for them.
_DISAMBIGUATION = re.compile(r"#\d+")
#: Of byte-level BPE: each byte is a letter, of these where it is no printable ASCII.
_OF_BYTES = re.compile("▁*[\u0100-\u02af]+▁*")
_BYTE_LEVEL = "bbpe"


@dataclass(frozen=True)
class Units:
    """`path` is the file of tokens."""

    path: Path
    tokenizer: UnitTokenizer
    blank_id: int


def read_units(files: IcefallFiles, arguments: Arguments) -> Units:
    """Raises CheckpointError for tokens that cannot be read or served, and for no blank."""
    tokenizer = load_tokenizer(files.tokens, files.pieces, left_out=_DISAMBIGUATION)
    _check_bytes(files, tokenizer, arguments)
    return Units(files.tokens, tokenizer, _find_blank(files.tokens, tokenizer, arguments))


def check_vocabulary(units: Units, num_outputs: int, name: str) -> None:
    """Raises CheckpointError unless there is an output for each token; `name` is the tensor's."""
    num_tokens = units.tokenizer.vocab_size
    if num_tokens != num_outputs:
        raise CheckpointError(
            f"{units.path} names {num_tokens} tokens, not counting #0, #1 and so on, but {name} "
            f"has {num_outputs} outputs; take both files from one training"
        )


def _check_bytes(files: IcefallFiles, tokenizer: UnitTokenizer, arguments: Arguments) -> None:
    signs = [str(said.value) for name in ("bpe_model", "lang_dir") if (said := arguments.get(name))]
    flag = arguments.flag("use_bbpe")
    is_told = any(_BYTE_LEVEL in sign.lower() for sign in signs) or bool(flag and flag.value)
    beside = sorted(files.tokens.parent.glob(f"*{_BYTE_LEVEL}*.model"))
    symbols = [
        symbol
        for symbol in tokenizer.pieces(range(tokenizer.vocab_size))
        if not symbol.startswith("<")
    ]
    num_of_bytes = sum(_OF_BYTES.fullmatch(symbol) is not None for symbol in symbols)
    if is_told or beside or 2 * num_of_bytes > len(symbols):
        raise CheckpointError(
            f"{files.tokens} is a table of byte-level BPE (bbpe), whose pieces stand for bytes, "
            "and this backend serves BPE and characters; give a model trained on those"
        )


def _find_blank(path: Path, tokenizer: UnitTokenizer, arguments: Arguments) -> int:
    """`blank_id` where it is given, and the id of `<blk>`; both must agree."""
    symbols = tokenizer.pieces(range(tokenizer.vocab_size))
    named = [number for number, symbol in enumerate(symbols) if symbol == _BLANK]
    if len(named) > 1:
        raise CheckpointError(
            f"{path} names {_BLANK} twice, with the ids {named[0]} and {named[1]}; it is one token"
        )
    said = arguments.number("blank_id")
    if said is None:
        if not named:
            raise CheckpointError(
                f"{path} has no token {_BLANK}; write blank_id, the blank's id, into "
                f"{arguments.path}"
            )
        return named[0]
    if named and named[0] != said.value:
        raise CheckpointError(
            f"{said.source}: blank_id={said.value}, but {_BLANK} has id {named[0]} in {path}; take "
            "both from one training, or correct one"
        )
    blank_id: int = said.value
    if blank_id not in range(tokenizer.vocab_size):
        raise CheckpointError(
            f"{said.source}: blank_id={blank_id} is none of the ids 0 .. "
            f"{tokenizer.vocab_size - 1} of {path}; say which token is the blank"
        )
    return blank_id
