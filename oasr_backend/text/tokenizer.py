"""Token ids to text and back, for the units of WeNet's and icefall's checkpoints.

`units.txt`, or `tokens.txt`, has one `symbol id` per line. A symbol may start with U+2581, which
marks the start of a word. `unit_text` says what units become as text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from oasr_backend.errors import CheckpointError
from oasr_backend.text.piece_model import PieceModel
from oasr_backend.text.scripts import UNSPACED
from oasr_backend.text.unit_text import (
    START,
    WORD_START,
    Joint,
    UnitText,
    Word,
    byte_of,
    marks_spaced_word,
    surface_of,
)

_LINE = re.compile(r"(.+?)[ \t]+(\d+)[ \t\r]*")
_UNSPACED = re.compile(f"[{UNSPACED}]")
_RUN_OF_ONE_KIND = re.compile(f"[{UNSPACED}]+|[^{UNSPACED}]+")


class Tokenizer(Protocol):
    """What the engine needs of a vocabulary. Ids are those of the acoustic model's outputs."""

    @property
    def vocab_size(self) -> int: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the whole sequence, not of an increment."""

    def joined(self, ids: Sequence[int], after: Joint = START) -> tuple[str, Joint]:
        """What `ids` add to a text that ended at `after`, and where it ends now."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One symbol per id, with its marks."""

    def starts_word(self, token_id: int) -> bool:
        """Whether the unit can only be the first of a word, or words have no marks."""

    def may_part(self, before: int, after: int) -> bool:
        """Whether a segment may end between the two units."""

    def awaits_next(self, token_id: int) -> bool:
        """Whether a unit may follow that makes one character or cluster with this one."""

    def words(self, ids: Sequence[int]) -> list[Word]:
        """The words of `decode(ids)` in order, for time stamps."""

    def symbol_of(self, token_id: int) -> str: ...

    def encode(self, text: str) -> list[int] | None:
        """Ids whose text is `text` up to case and spacing, or None if the units cannot spell it."""


class UnitTokenizer:
    """Joins the units themselves, so that text, words and time stamps follow one rule.

    Control units such as `<blank>` and `<unk>` are silent.
    """

    def __init__(
        self,
        symbols: Sequence[str],
        *,
        bpe_model_path: str | Path | None = None,
        silent: Collection[str] = (),
        connect_symbol: str = "",
        keeps_spaces: bool = False,
    ) -> None:
        """`symbols[i]` is the symbol of id i. The SentencePiece model only helps `encode`.

        `silent` symbols add nothing to a text, and `connect_symbol` ("" or " ") goes between units.
        `keeps_spaces` says that a text may have several spaces in a row.
        """
        self._symbols = tuple(symbols)
        self._text = UnitText(
            symbols, silent=silent, connect_symbol=connect_symbol, keeps_spaces=keeps_spaces
        )
        surfaces = {
            surface_of(symbol): token_id
            for token_id, symbol in enumerate(symbols)
            if symbol not in silent
        }
        self._ids = {surface: token_id for surface, token_id in surfaces.items() if surface}
        self._byte_ids = {
            value: token_id
            for token_id, symbol in enumerate(symbols)
            if (value := byte_of(symbol)) is not None
        }
        self._spellings = _unmarked_unspaced(self._ids) | self._ids
        self._longest = max(map(len, self._ids), default=0)
        self._marks_words = any(map(marks_spaced_word, self._ids))
        self._pieces = PieceModel(bpe_model_path) if bpe_model_path is not None else None

    @property
    def vocab_size(self) -> int:
        return len(self._symbols)

    def symbol_of(self, token_id: int) -> str:
        """Raises StreamStateError, as do all that take ids, for one outside the vocabulary."""
        return self.pieces((token_id,))[0]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        self._text.check(ids)
        return [self._symbols[token_id] for token_id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._text.joined(ids)[0]

    def joined(self, ids: Sequence[int], after: Joint = START) -> tuple[str, Joint]:
        return self._text.joined(ids, after)

    def words(self, ids: Sequence[int]) -> list[Word]:
        return self._text.words(ids)

    def starts_word(self, token_id: int) -> bool:
        return self._text.starts_word(token_id)

    def may_part(self, before: int, after: int) -> bool:
        return self._text.may_part(before, after)

    def awaits_next(self, token_id: int) -> bool:
        return self._text.awaits_next(token_id)

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
        value = byte_of(piece)
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
                if rest is None or target[begin:end] not in self._spellings:
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
            ids.append(self._spellings[target[begin : step[1]]])
            begin = step[1]
        return ids

    def _target(self, words: list[str]) -> str:
        """The marked text to spell; units of unspaced scripts carry no mark."""
        if not self._marks_words:
            return "".join(words)
        runs = [run for word in words for run in _RUN_OF_ONE_KIND.findall(word)]
        return "".join(run if _UNSPACED.match(run) else WORD_START + run for run in runs)


def load_tokenizer(
    units_path: str | Path,
    bpe_model_path: str | Path | None = None,
    *,
    silent: Collection[str] = (),
    connect_symbol: str = "",
    keeps_spaces: bool = False,
    left_out: re.Pattern[str] | None = None,
) -> UnitTokenizer:
    """Reads `units.txt`; ids must be 0..V-1, in any order. Raises CheckpointError.

    Text is the same with and without the SentencePiece model; `encode` segments better with it.
    `silent`, `connect_symbol` and `keeps_spaces` are those of `UnitTokenizer`. Symbols that match
    `left_out` whole are no units; the ids of the others must be gapless.
    """
    try:
        text = Path(units_path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{units_path} cannot be read ({error}); give UTF-8 lines 'symbol id'"
        ) from error
    # Only line feeds end a line: a symbol may be a Unicode line separator.
    lines = [line for line in text.split("\n") if line.strip("\r")]
    return UnitTokenizer(
        _read_symbols(lines, units_path, left_out),
        bpe_model_path=bpe_model_path,
        silent=silent,
        connect_symbol=connect_symbol,
        keeps_spaces=keeps_spaces,
    )


def _read_symbols(
    lines: Sequence[str], units_path: str | Path, left_out: re.Pattern[str] | None
) -> list[str]:
    symbols: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(
                f"{units_path} line {number} is {line!r}; every line must be 'symbol id'"
            )
        if left_out is not None and left_out.fullmatch(match[1]):
            continue
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


def _unmarked_unspaced(ids: Mapping[str, int]) -> dict[str, int]:
    """Marked units of unspaced scripts by what they spell: a phrase is written without marks."""
    bare = {surface.lstrip(WORD_START): token_id for surface, token_id in ids.items()}
    return {surface: token_id for surface, token_id in bare.items() if _UNSPACED.match(surface)}
