"""Reads an n-gram model over a recogniser's units from an ARPA file, and trusts nothing in it.

The format is that of SRILM's ngram-format(5): log10 probabilities and backoff weights, a section an
order. The "words" of the file must be units of units.txt, so that the model scores each token as
the search adds it, and no text has to be put together for that.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

import numpy as np

from oasr_backend.decoders.bias.ngram_tables import NgramError, NgramModel, Section, build_tables
from oasr_backend.errors import ConfigError

_BEGIN, _END, _UNKNOWN = "<s>", "</s>", ("<unk>", "<UNK>")
_COUNT = re.compile(rb"(\d+)=(\d+)")
_PACKED, _BYTE_ORDER_MARK, _BACKSLASH = b"\x1f\x8b", b"\xef\xbb\xbf", ord("\\")
_AS_WRITTEN = "copy the file again, or write it anew"


def load_arpa(path: str | Path, symbols: Sequence[str]) -> NgramModel:
    """`symbols[i]` is the symbol of unit i. The file may be packed by gzip.

    Raises ConfigError for a file that cannot be read, is not whole, is no ARPA file, or speaks of
    other units; it names the line.
    """
    path = Path(path)
    words = _words(symbols)
    try:
        with _opened(path) as file:
            sections = _Reader(path, file, words).sections()
    except OSError as error:
        raise ConfigError(
            f"lm_path {path} cannot be read ({error}); give an ARPA file over the model's units"
        ) from error
    try:
        return build_tables(
            sections,
            num_units=len(symbols),
            begin=words[_BEGIN.encode()],
            end=words[_END.encode()],
            unknown=words[_UNKNOWN[0].encode()],
        )
    except NgramError as error:
        ngram = b" ".join(_symbols_of(error.words, words)).decode(errors="replace")
        raise ConfigError(
            f"lm_path {path} line {error.line}: the {len(error.words)}-gram {ngram!r} {error}; "
            f"{_AS_WRITTEN}"
        ) from error


def _opened(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        is_packed = file.read(2) == _PACKED
    return cast("BinaryIO", gzip.open(path)) if is_packed else path.open("rb")


def _words(symbols: Sequence[str]) -> dict[bytes, int]:
    """Units by symbol. What bounds a text comes behind the last, as does <unk> if it is no unit."""
    numbers = {symbol: unit for unit, symbol in enumerate(symbols)}
    numbers |= {_BEGIN: len(symbols), _END: len(symbols) + 1}
    known = [numbers[symbol] for symbol in _UNKNOWN if symbol in numbers]
    numbers = dict.fromkeys(_UNKNOWN, (known or [len(symbols) + 2])[0]) | numbers
    return {symbol.encode(): number for symbol, number in numbers.items()}


def _symbols_of(words: Sequence[int], numbers: Mapping[bytes, int]) -> list[bytes]:
    symbols = {number: symbol for symbol, number in numbers.items()}
    return [symbols[word] for word in words]


class _Reader:
    """One pass over the lines of a file; `number` is the line that it is at."""

    def __init__(self, path: Path, file: BinaryIO, words: Mapping[bytes, int]) -> None:
        self._path = path
        self._words = words
        self._damage: Exception | None = None
        self.number = 0
        self._lines = self._fields(file)

    def sections(self) -> list[Section]:
        """One for each order that `\\data\\` counts, checked against the counts."""
        self._seek_counts()
        counts, marker = self._counts()
        found = []
        for order, count in enumerate(counts, start=1):
            section = _Lines(order)
            if marker == b"\\%d-grams:" % order:
                marker = self._read_into(section)
            if len(section.numbers) != count:
                self._refuse(
                    f"{len(section.numbers)} {order}-grams end with {self._name(marker)}, but "
                    f"\\data\\ counts {count}; {_AS_WRITTEN}"
                )
            found.append(section.as_arrays())
        self._finish(marker, num_orders=len(counts))
        return found

    def _fields(self, file: BinaryIO) -> Iterator[list[bytes]]:
        """Of lines that hold any. Only ASCII spaces part them: a unit may be a Unicode space."""
        try:
            for self.number, line in enumerate(file, start=1):
                if fields := line.split():
                    yield fields
        except (EOFError, zlib.error) as error:
            self._damage = error

    def _seek_counts(self) -> None:
        """Reads to behind `\\data\\`; toolkits write what they like before it."""
        for fields in self._lines:
            if fields == [b"iARPA"]:
                self._refuse(
                    "iARPA holds no log-probs but what IRSTLM makes them from; convert the file by "
                    "its compile-lm --text=yes"
                )
            if fields[0].removeprefix(_BYTE_ORDER_MARK) == b"\\data\\":
                return
        raise ConfigError(
            f"lm_path {self._path} holds no n-grams: it has no \\data\\ line; give an ARPA text "
            "file (or .gz of it)"
        )

    def _counts(self) -> tuple[list[int], bytes | None]:
        """The counts of `\\data\\` by order, and the marker behind them."""
        counts: list[int] = []
        for fields in self._lines:
            if fields[0][0] == _BACKSLASH:
                break
            match = _COUNT.fullmatch(b"".join(fields[1:])) if fields[0] == b"ngram" else None
            if match is None or int(match[1]) != len(counts) + 1:
                self._refuse(
                    f"{_shown(fields)} where \\data\\ counts its {len(counts) + 1}-grams; write "
                    "'ngram ORDER=COUNT' for every order from 1"
                )
            counts.append(int(match[2]))
        else:
            fields = []
        if not any(counts):
            self._refuse("\\data\\ counts no n-grams; give an ARPA text file with some")
        return counts, fields[0] if fields else None

    def _read_into(self, section: _Lines) -> bytes | None:
        """Reads one section; returns the marker that ends it, None at the file's end."""
        try:
            for fields in self._lines:
                if fields[0][0] == _BACKSLASH:
                    return fields[0]
                section.add(fields, self._words, self.number)
        except _BadNumberError as error:
            place = f"in the {section.order}-gram {_shown(fields)}"
            self._refuse(f"{error} {place}; an ARPA file writes {error.remedy}")
        except KeyError as error:
            symbol = error.args[0].decode(errors="replace")
            self._refuse(
                f"{symbol!r} of a {section.order}-gram is no unit of this model; train the n-gram "
                "model on text that is split into the units of units.txt, not on words"
            )
        except ValueError:
            self._refuse(f"{_shown(fields)} is no {section.order}-gram of an ARPA file")
        return None

    def _finish(self, marker: bytes | None, *, num_orders: int) -> None:
        """What follows `\\end\\` is not read, but unpacked: a packed file is checked to its end."""
        if marker != b"\\end\\":
            self._refuse(
                f"the {num_orders}-grams end with {self._name(marker)}, not with \\end\\; "
                f"{_AS_WRITTEN}"
            )
        for _ in self._lines:
            pass
        if self._damage is not None:
            self._refuse(f"the packed file is damaged behind this ({self._damage}); {_AS_WRITTEN}")

    def _name(self, marker: bytes | None) -> str:
        if marker is not None:
            return repr(marker.decode(errors="replace"))
        return f"the file ({self._damage})" if self._damage else "the file"

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"lm_path {self._path} line {self.number}: {what}")


class _BadNumberError(Exception):
    """A number that is no logarithm of a probability; `remedy` says what is."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class _Lines:
    """The n-grams of one order as they are read: flat, since objects take ten times as much."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.numbers = array("I")
        self._words = array("i")
        self._log_probs = array("d")
        self._backoffs = array("d")

    def add(self, fields: Sequence[bytes], words: Mapping[bytes, int], number: int) -> None:
        """Raises ValueError, KeyError naming a symbol, or _BadNumberError."""
        order = self.order
        log_prob = float(fields[0])
        backoff = float(fields[1 + order]) if len(fields) == 2 + order else 0.0
        if not 1 + order <= len(fields) <= 2 + order:
            raise ValueError(fields)
        if not (-math.inf < log_prob <= 0.0 and -math.inf < backoff < math.inf):
            raise _bad_number(log_prob, backoff)
        self._words.extend([words[symbol] for symbol in fields[1 : 1 + order]])
        self._log_probs.append(log_prob)
        self._backoffs.append(backoff)
        self.numbers.append(number)

    def as_arrays(self) -> Section:
        """Natural logarithms; the arrays share the memory of what was read."""
        return Section(
            word_AN=np.frombuffer(self._words, dtype=np.int32).reshape(-1, self.order),
            log_prob_A=np.multiply(self._log_probs, math.log(10), dtype=np.float32),
            backoff_A=np.multiply(self._backoffs, math.log(10), dtype=np.float32),
            line_A=np.frombuffer(self.numbers, dtype=np.uint32),
        )


def _bad_number(log_prob: float, backoff: float) -> _BadNumberError:
    if math.isfinite(log_prob) and log_prob > 0:
        return _BadNumberError(
            f"a positive log10 probability ({log_prob:g})", "log10 probabilities of at most 0"
        )
    name = "backoff weight" if math.isfinite(log_prob) else "log10 probability"
    value = backoff if math.isfinite(log_prob) else log_prob
    return _BadNumberError(f"{name} {value:g}", "finite numbers, -99 for a probability of 0")


def _shown(fields: Sequence[bytes]) -> str:
    return repr(b" ".join(fields)[:80].decode(errors="replace"))
