"""Reads an n-gram model over a recogniser's units from an ARPA file, into sorted tables.

The format is that of SRILM's ngram-format(5): log10 probabilities and backoff weights, a section an
order. The "words" of the file must be units of units.txt, so that the model scores each token as
the search adds it, and no text has to be put together meanwhile.
"""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oasr_backend.errors import ConfigError

FloatTable = npt.NDArray[np.float64]
IntTable = npt.NDArray[np.int64]
Ngram = tuple[int, ...]

_SECTION = re.compile(r"\\(\d+)-grams:")
_BEGIN, _END, _UNKNOWN = "<s>", "</s>", ("<unk>", "<UNK>")
#: For units that the file says nothing of, <unk> included: log10.
_FLOOR = -10.0


@dataclass(frozen=True)
class NgramModel:
    """Histories are states; 0 is the empty one. Logarithms are natural.

    `key_A` is sorted and holds state * vocab_size + unit of every n-gram longer than one unit.
    """

    vocab_size: int
    order: int
    initial_state: int
    key_A: IntTable
    log_prob_A: FloatTable
    next_A: IntTable
    unigram_V: FloatTable
    unigram_next_V: IntTable
    backoff_S: FloatTable
    shorter_S: IntTable  # the history without its oldest unit


@dataclass(frozen=True)
class _Entry:
    log_prob: float
    backoff: float


def load_arpa(path: str | Path, symbols: Sequence[str]) -> NgramModel:
    """`symbols[i]` is the symbol of unit i. Reads .gz files too.

    Raises ConfigError for a file that cannot be read, is no ARPA file or speaks of other units.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            ngrams = dict(_entries(file, _numbers(symbols), path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"lm_path {path} cannot be read ({error}); give an ARPA file over the model's units"
        ) from error
    if not ngrams:
        raise ConfigError(f"lm_path {path} holds no n-grams; give an ARPA text file (or .gz of it)")
    return _tables(ngrams, len(symbols))


def _numbers(symbols: Sequence[str]) -> dict[str, int]:
    """Units by symbol; the beginning of a text is a unit behind the last, unknown ones too."""
    numbers = {symbol: unit for unit, symbol in enumerate(symbols)}
    numbers |= {_BEGIN: len(symbols), _END: len(symbols) + 1}
    for symbol in _UNKNOWN:
        numbers.setdefault(symbol, len(symbols) + 2)
    return numbers


def _entries(
    file: Iterable[str], numbers: Mapping[str, int], path: Path
) -> Iterator[tuple[Ngram, _Entry]]:
    order = 0
    for number, line in enumerate(file, start=1):
        # Only these separate: a unit may be another Unicode space.
        fields = re.split(r"[ \t]+", line.strip(" \t\r\n"))
        section = _SECTION.fullmatch(fields[0])
        if section is not None:
            order = int(section[1])
        elif fields[0].startswith("\\") and len(fields) == 1:
            order = 0
        elif order and fields != [""]:
            yield _entry(fields, order, numbers, f"{path} line {number}")


def _entry(
    fields: Sequence[str], order: int, numbers: Mapping[str, int], place: str
) -> tuple[Ngram, _Entry]:
    try:
        log_prob = float(fields[0])
        backoff = float(fields[1 + order]) if len(fields) == 2 + order else 0.0
    except ValueError:
        log_prob = math.nan
    if math.isnan(log_prob) or len(fields) not in (1 + order, 2 + order):
        raise ConfigError(f"{place} is no {order}-gram of an ARPA file: {' '.join(fields)!r}")
    strangers = [symbol for symbol in fields[1 : 1 + order] if symbol not in numbers]
    if strangers:
        raise ConfigError(
            f"{place}: {strangers[0]!r} is no unit of this model; train the n-gram model on text "
            "that is split into the units of units.txt, not on words"
        )
    ngram = tuple(numbers[symbol] for symbol in fields[1 : 1 + order])
    return ngram, _Entry(log_prob * math.log(10), backoff * math.log(10))


def _tables(ngrams: Mapping[Ngram, _Entry], num_units: int) -> NgramModel:
    """All n-grams but the longest are histories, whether or not anything follows them there."""
    order, vocab_size = max(map(len, ngrams)), num_units + 3
    states: dict[Ngram, int] = {(): 0}
    for ngram in ngrams:
        if len(ngram) < order:
            states[ngram] = len(states)
    longer = sorted(
        (
            states[ngram[:-1]] * vocab_size + ngram[-1],
            ngrams[ngram].log_prob,
            _behind(ngram, states),
        )
        for ngram in ngrams
        if len(ngram) > 1 and ngram[:-1] in states
    )
    begin = (num_units,)
    return NgramModel(
        vocab_size=vocab_size,
        order=order,
        initial_state=states.get(begin, 0),
        key_A=np.array([key for key, _, _ in longer], dtype=np.int64),
        log_prob_A=np.array([log_prob for _, log_prob, _ in longer], dtype=np.float64),
        next_A=np.array([state for _, _, state in longer], dtype=np.int64),
        unigram_V=_unigrams(ngrams, num_units),
        unigram_next_V=np.array([_behind((unit,), states) for unit in range(num_units)]),
        backoff_S=np.array([0.0, *(ngrams[ngram].backoff for ngram in states if ngram)]),
        shorter_S=np.array([_behind(ngram[1:], states) if ngram else 0 for ngram in states]),
    )


def _behind(ngram: Ngram, states: Mapping[Ngram, int]) -> int:
    """The longest history that the n-gram ends with."""
    while ngram not in states:
        ngram = ngram[1:]
    return states[ngram]


def _unigrams(ngrams: Mapping[Ngram, _Entry], num_units: int) -> FloatTable:
    unknown = ngrams.get((num_units + 2,), _Entry(_FLOOR * math.log(10), 0.0))
    return np.array([ngrams.get((unit,), unknown).log_prob for unit in range(num_units)])
