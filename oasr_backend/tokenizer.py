"""Token ids to text and back, for the units of WeNet checkpoints.

`units.txt` has one `symbol id` per line. A symbol may start with U+2581, which marks the start of a
word; symbols without any such mark (Chinese characters) are joined without spaces.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from oasr_backend.errors import CheckpointError, StreamStateError
from oasr_backend.piece_model import PieceModel

WORD_START = "\u2581"

_HIDDEN = frozenset({"<blank>", "<eps>", "<pad>", "<s>", "</s>", "<sos>", "<eos>", "<sos/eos>"})
_SPACES = frozenset({"<space>", "<SPACE>"})
_UNKNOWN = frozenset({"<unk>", "<UNK>"})
_LINE = re.compile(r"(.+?)[ \t]+(\d+)[ \t\r]*")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Han, kana, bopomofo: scripts that are written without spaces.
_RANGES = (
    "\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3100-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_UNSPACED = re.compile(f"[{_RANGES}]")
_RUN_OF_ONE_KIND = re.compile(f"[{_RANGES}]+|[^{_RANGES}]+")


class Word(NamedTuple):
    """A word and the range of token positions it was made of, both ends included."""

    text: str
    first_token: int
    last_token: int


class Tokenizer(Protocol):
    """What the engine needs of a vocabulary. Ids are those of the acoustic model's outputs."""

    @property
    def vocab_size(self) -> int: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the whole sequence, not of an increment."""

    def joined(self, ids: Sequence[int]) -> str:
        """`decode` before its outer spaces are taken off, so that settled parts can be added up."""

    def num_settled(self, ids: Sequence[int]) -> int:
        """How many first ids have a text of their own, whatever comes after `ids`."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One symbol per id, with its marks."""

    def starts_word(self, token_id: int) -> bool:
        """Whether the unit can only be the first of a word, or words have no marks."""

    def words(self, ids: Sequence[int]) -> list[Word]:
        """The words of `decode(ids)` in order, for time stamps."""

    def symbol_of(self, token_id: int) -> str: ...

    def encode(self, text: str) -> list[int] | None:
        """Ids whose text is `text` up to case and spacing, or None if the units cannot spell it."""


class _Span(NamedTuple):
    """Text of one token, or of the byte tokens that make one character together."""

    text: str
    first: int
    last: int


class UnitTokenizer:
    """Joins the units themselves, so that text, words and time stamps follow one rule.

    Start, end and blank symbols are silent; `<unk>` is shown, as WeNet does.
    """

    def __init__(self, symbols: Sequence[str], *, bpe_model_path: str | Path | None = None) -> None:
        """`symbols[i]` is the symbol of id i. The SentencePiece model only helps `encode`."""
        self._symbols = tuple(symbols)
        self._surfaces = tuple(map(_surface, symbols))
        self._bytes = tuple(map(_byte_of, symbols))
        self._ids = {
            surface: token_id
            for token_id, surface in enumerate(self._surfaces)
            if surface and surface not in _UNKNOWN and self._bytes[token_id] is None
        }
        self._byte_ids = {
            value: token_id for token_id, value in enumerate(self._bytes) if value is not None
        }
        self._longest = max(map(len, self._ids), default=0)
        self._has_word_starts = any(WORD_START in surface for surface in self._ids)
        self._pieces = PieceModel(bpe_model_path) if bpe_model_path is not None else None

    @property
    def vocab_size(self) -> int:
        return len(self._symbols)

    def symbol_of(self, token_id: int) -> str:
        """Raises StreamStateError, as do all that take ids, for one outside the vocabulary."""
        return self.pieces((token_id,))[0]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        self._check(ids)
        return [self._symbols[token_id] for token_id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self.joined(ids).strip()

    def joined(self, ids: Sequence[int]) -> str:
        if self._byte_ids:
            joined = "".join(span.text for span in self._spans(ids))
        else:
            self._check(ids)
            joined = "".join([self._surfaces[token_id] for token_id in ids])
        return joined.replace(WORD_START, " ")

    def num_settled(self, ids: Sequence[int]) -> int:
        """Bytes at the end may be the first of a character that is not complete."""
        settled = len(ids)
        while settled and self._bytes[ids[settled - 1]] is not None:
            settled -= 1
        return settled

    def starts_word(self, token_id: int) -> bool:
        surface = self._surfaces[token_id]
        is_marked = surface.startswith(WORD_START) or _UNSPACED.match(surface) is not None
        return is_marked or not self._has_word_starts

    def words(self, ids: Sequence[int]) -> list[Word]:
        """Splits at spaces and around each unit of a script that is written without them."""
        words: list[Word] = []
        must_start = True
        for span in self._spans(ids):
            is_unspaced = _UNSPACED.search(span.text) is not None
            must_start = must_start or is_unspaced
            for index, text in enumerate(_split(span.text)):
                must_start = must_start or index > 0
                if not text:
                    continue
                if must_start:
                    words.append(Word(text, span.first, span.last))
                else:
                    words[-1] = Word(words[-1].text + text, words[-1].first_token, span.last)
                must_start = is_unspaced
        return words

    def encode(self, text: str) -> list[int] | None:
        """Tries the text as it is, then in upper and in lower case; fewer byte pieces go first.

        So bytes spell only what no case has units for. SentencePiece's own segmentation is
        preferred, since the model was trained on it; else the fewest units that spell the text.
        """
        best: list[int] | None = None
        for candidate in dict.fromkeys((text, text.upper(), text.lower())):
            ids = self._spelt(candidate.split())
            if ids is not None and (best is None or self._num_bytes(ids) < self._num_bytes(best)):
                best = ids
        return best

    def _spelt(self, words: list[str]) -> list[int] | None:
        pieces = self._encode_pieces(words)
        if pieces and not self._num_bytes(pieces):
            return pieces
        units = self._encode_units(words)
        return units if units is not None else pieces or None

    def _num_bytes(self, ids: Sequence[int]) -> int:
        byte_ids = set(self._byte_ids.values())
        return sum(token_id in byte_ids for token_id in ids)

    def _encode_pieces(self, words: list[str]) -> list[int] | None:
        if self._pieces is None:
            return None
        ids = [self._id_of(piece) for piece in self._pieces.split(" ".join(words))]
        known = [token_id for token_id in ids if token_id is not None]
        return known if len(known) == len(ids) else None

    def _id_of(self, piece: str) -> int | None:
        value = _byte_of(piece)
        return self._ids.get(piece) if value is None else self._byte_ids.get(value)

    def _encode_units(self, words: list[str]) -> list[int] | None:
        """The shortest spelling; of equally short ones that with the longest units first."""
        target = self._target(words)
        # best[i]: fewest units for target[i:], and the first of them.
        best: list[tuple[int, int] | None] = [None] * len(target) + [(0, 0)]
        for begin in reversed(range(len(target))):
            for end in range(begin + 1, min(begin + self._longest, len(target)) + 1):
                rest = best[end]
                here = best[begin]
                if rest is None or target[begin:end] not in self._ids:
                    continue
                if here is None or rest[0] + 1 <= here[0]:
                    best[begin] = (rest[0] + 1, end)
        return self._follow(target, best)

    def _follow(self, target: str, best: Sequence[tuple[int, int] | None]) -> list[int] | None:
        ids: list[int] = []
        begin = 0
        while begin < len(target):
            step = best[begin]
            if step is None:
                return None
            ids.append(self._ids[target[begin : step[1]]])
            begin = step[1]
        return ids

    def _target(self, words: list[str]) -> str:
        """The marked text to spell; units of unspaced scripts carry no mark."""
        if not self._has_word_starts:
            return "".join(words)
        runs = [run for word in words for run in _RUN_OF_ONE_KIND.findall(word)]
        return "".join(run if _UNSPACED.match(run) else WORD_START + run for run in runs)

    def _spans(self, ids: Sequence[int]) -> Iterator[_Span]:
        """Texts in order; silent tokens give none, bytes of one character give one together."""
        self._check(ids)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        first = 0
        for index, token_id in enumerate(ids):
            value = self._bytes[token_id]
            pending = bool(decoder.getstate()[0])
            if value is None:
                if pending:
                    yield _Span(decoder.decode(b"", final=True), first, index - 1)
                    decoder.reset()
                if self._surfaces[token_id]:
                    yield _Span(self._surfaces[token_id], index, index)
                continue
            first = first if pending else index
            text = decoder.decode(bytes((value,)))
            if text:
                yield _Span(text, first, index)
        if decoder.getstate()[0]:
            yield _Span(decoder.decode(b"", final=True), first, len(ids) - 1)

    def _check(self, ids: Sequence[int]) -> None:
        for token_id in (min(ids), max(ids)) if ids else ():
            if not 0 <= token_id < len(self._symbols):
                raise StreamStateError(
                    f"token id {token_id} is outside 0..{len(self._symbols) - 1}; "
                    "use the units.txt of this model"
                )


def load_tokenizer(
    units_path: str | Path, bpe_model_path: str | Path | None = None
) -> UnitTokenizer:
    """Reads `units.txt`; ids must be 0..V-1, in any order. Raises CheckpointError.

    Text is the same with and without the SentencePiece model; `encode` segments better with it.
    """
    try:
        text = Path(units_path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"units file {units_path} cannot be read ({error}); give UTF-8 lines 'symbol id'"
        ) from error
    # Only line feeds end a line: a symbol may be a Unicode line separator.
    lines = [line for line in text.split("\n") if line.strip("\r")]
    return UnitTokenizer(_read_symbols(lines, units_path), bpe_model_path=bpe_model_path)


def _read_symbols(lines: Sequence[str], units_path: str | Path) -> list[str]:
    symbols: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(
                f"{units_path} line {number} is {line!r}; every line must be 'symbol id'"
            )
        token_id = int(match[2])
        if token_id in symbols:
            raise CheckpointError(
                f"{units_path} line {number} gives id {token_id} again; ids must be unique"
            )
        symbols[token_id] = match[1]
    if not symbols or max(symbols) != len(symbols) - 1:
        raise CheckpointError(
            f"{units_path} has {len(symbols)} ids up to {max(symbols, default=None)}; "
            "ids must be 0, 1, 2 and so on without a gap"
        )
    return [symbols[token_id] for token_id in range(len(symbols))]


def _surface(symbol: str) -> str:
    """What a symbol adds to the text; empty for silent ones."""
    if symbol in _HIDDEN:
        return ""
    return WORD_START if symbol in _SPACES else symbol


def _byte_of(symbol: str) -> int | None:
    """The value of a SentencePiece byte-fallback piece such as `<0xE4>`."""
    match = _BYTE.fullmatch(symbol)
    return int(match[1], 16) if match else None


def _split(text: str) -> list[str]:
    return text.replace(" ", WORD_START).split(WORD_START)
