"""The reader takes ARPA files as toolkits write them, and refuses a broken one with its line."""

from __future__ import annotations

import gzip
import itertools
import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from oasr_backend.decoders.bias.arpa import load_arpa
from oasr_backend.errors import ConfigError
from oasr_backend.types import Hypothesis
from tests.ngrams import SYMBOLS, arpa, scorer_of, walk, write

#: As toolkits write it: a header of their own, several spaces, CRLF, a mark of the byte order,
#: an empty order, -99 for the begin of a text, backoff weights of the longest, text behind the end.
ODD_FILE = (
    "made by a toolkit\r\n\r\n \\data\\ \r\nngram 1=     5\r\nngram  2 = 2\r\nngram 3=0\r\n\r\n"
    "\\1-grams:\r\n-99\t<s>  -0.25\r\n-1.5   </s>\r\n-1 <UNK>\r\n\r\n-0.5\t\u2581A\t0.125\r\n"
    "-0.75  B\r\n\r\n\\2-grams:\r\n-0.25\t<s> \u2581A\t0\r\n-1e-1\t\u2581A\t</s>\r\n\r\n"
    "\\3-grams:\r\n\\end\\\r\nbye\r\n"
)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_what_toolkits_write_is_read(tmp_path: Path, mark: str) -> None:
    text = ODD_FILE if not mark else mark + ODD_FILE[ODD_FILE.index("\\data") :]
    scorer = scorer_of(write(tmp_path, text))
    assert walk(scorer, [1]) == pytest.approx(-0.25 * math.log(10))
    assert walk(scorer, [1, 2]) == pytest.approx((-0.25 + 0.125 - 0.75) * math.log(10))
    assert walk(scorer, [3]) == pytest.approx((-0.25 - 1) * math.log(10))
    ((ended,),) = scorer.ended([[Hypothesis((1,), 0.0)]])
    assert ended.score == pytest.approx(-0.1 * math.log(10))


HEAD = "\\data\\\nngram 1=3\nngram 2=2\n\n"
ONES = "\\1-grams:\n-1\t\u2581A\t-0.5\n-2\tB\n-2\tC\n\n"
TWOS = "\\2-grams:\n-1\t\u2581A B\n-1\tB C\n\n"
GOOD = HEAD + ONES + TWOS + "\\end\\\n"


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mmap lm http://kheafield.com/code format version 5", ["no n-grams", "\\data\\", "ARPA"]),
        (ONES, ["no n-grams", "no \\data\\ line"]),
        ("iARPA\n\n" + GOOD, ["line 1", "iARPA", "compile-lm --text=yes"]),
        (changed("-2\tB", "x\tB"), ["line 7", "no 1-gram"]),
        (changed("-2\tB", "-2"), ["line 7", "no 1-gram"]),
        (changed("-1\tB C", "-1\tB C B B"), ["line 12", "no 2-gram"]),
        (changed("-2\tB", "-2\tHELLO"), ["line 7", "'HELLO'", "units.txt", "not on words"]),
        (changed("ngram 1=3", "ngram 1=4"), ["line 10", "3 1-grams", "2-grams:", "counts 4"]),
        (changed("ngram 1=3", "ngram 1=2"), ["line 10", "3 1-grams", "counts 2"]),
        (changed("ngram 2=2", "ngram 2=3"), ["line 14", "2 2-grams", "counts 3", "end"]),
        (changed("ngram 2=2\n", ""), ["line 9", "1-grams end with '\\\\2-grams:'", "\\end\\"]),
        (changed("ngram 2=2", "ngram 3=2"), ["line 3", "'ngram 3=2'", "its 2-grams"]),
        (changed("ngram 2=2", "ngram two=2"), ["line 3", "'ngram two=2'", "its 2-grams"]),
        (changed("ngram 1=3\nngram 2=2\n", ""), ["line 3", "counts no n-grams"]),
        (changed(TWOS, ""), ["line 10", "0 2-grams end with '\\\\end\\\\'", "counts 2"]),
        (changed(ONES, ""), ["line 5", "0 1-grams end with '\\\\2-grams:'", "counts 3"]),
        (changed("\\end\\\n", ""), ["line 13", "2-grams end with the file", "\\end\\"]),
        (changed("-2\tB", "0.5\tB"), ["line 7", "positive", "probability (0.5)", "1-gram '0.5 B'"]),
        (changed("-2\tB", "nan\tB"), ["line 7", "log10 probability nan", "-99"]),
        (changed("-2\tB", "-inf\tB"), ["line 7", "log10 probability -inf", "-99"]),
        (changed("-0.5", "nan"), ["line 6", "backoff weight nan", "finite"]),
        (changed("-0.5", "inf"), ["line 6", "backoff weight inf", "finite"]),
        (changed("-1\tB C", "-1\tD C"), ["line 12", "'D' of a 2-gram is no unit"]),
        (changed("-1\tB C", "-1\t\u2581D C"), ["line 12", "'\u2581D C'", "its beginning"]),
        (changed("-1\tB C", "-1\tB \u2581D"), ["line 12", "'B \u2581D'", "is no 1-gram"]),
        (changed("-1\tB C", "-1\t\u2581A B"), ["line 12", "'\u2581A B'", "there twice"]),
        (changed("-2\tC", "-2\tB"), ["line 8", "the 1-gram 'B'", "there twice"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_file_that_is_not_whole_or_does_not_fit_is_refused_with_its_line(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_arpa(path, SYMBOLS)
    for word in [f"lm_path {path}", *words]:
        assert word in str(caught.value)


def test_a_trigram_without_its_beginning_is_refused(tmp_path: Path) -> None:
    """A search that walks from history to history would never reach this n-gram."""
    entries = {(unit,): (-1.0, 0.0) for unit in SYMBOLS[1:]}
    entries |= {("B", "C"): (-0.5, 0.0), ("C", "B", "C"): (-0.1, 0.0)}
    with pytest.raises(ConfigError, match=r"the 3-gram 'C B C' .*beginning, a 2-gram"):
        load_arpa(write(tmp_path, arpa(entries)), SYMBOLS)
    del entries["B", "C"]
    with pytest.raises(ConfigError, match=r"the 3-gram 'C B C' .*beginning, a 2-gram"):
        load_arpa(write(tmp_path, arpa(entries)), SYMBOLS)


def test_a_file_that_was_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    """Up to the line feed behind its end; of a packed one also within its checksum."""
    plain = tmp_path / "lm.arpa"
    for size in range(1, len(GOOD.encode()) - 1):
        plain.write_bytes(GOOD.encode()[:size])
        with pytest.raises(ConfigError, match=r"lm\.arpa"):
            load_arpa(plain, SYMBOLS)
    whole, packed = gzip.compress(GOOD.encode()), tmp_path / "lm.arpa.gz"
    for size in range(1, len(whole)):
        packed.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"lm\.arpa\.gz"):
            load_arpa(packed, SYMBOLS)
    packed.write_bytes(whole)
    assert load_arpa(packed, SYMBOLS).order == 2


def test_a_cut_packed_file_says_how_far_it_went(tmp_path: Path) -> None:
    symbols, chance = [f"u{i}" for i in range(100)], np.random.default_rng(0)
    entries = {(symbol,): (-1.0, 0.0) for symbol in symbols}
    for pair in itertools.product(symbols, repeat=2):
        entries[pair] = (-float(chance.uniform(0, 5)), 0.0)
    whole, path = gzip.compress(arpa(entries).encode()), tmp_path / "lm.arpa.gz"
    path.write_bytes(whole[: len(whole) * 9 // 10])
    with pytest.raises(ConfigError) as caught:
        load_arpa(path, symbols)
    pattern = r"line \d{4}: \d{4} 2-grams end with the file .*counts 10000"
    assert re.search(pattern, str(caught.value))


def test_a_packed_file_is_known_by_its_content(tmp_path: Path) -> None:
    text, path = arpa({("B",): (-0.5, 0.0)}), tmp_path / "lm.arpa.gz"
    for content in (text.encode(), gzip.compress(text.encode())):
        path.write_bytes(content)
        assert walk(scorer_of(path), [2]) == pytest.approx(-0.5 * math.log(10))


def test_reading_takes_little_memory_an_ngram(tmp_path: Path) -> None:
    """In bytes at the peak, the tables for good counted; objects would take half a kilobyte."""
    symbols = ["<blank>", *(f"u{i}" for i in range(200))]
    entries = {(symbol,): (-1.0, -0.5) for symbol in symbols[1:]}
    entries |= dict.fromkeys(itertools.product(symbols[1:], repeat=2), (-1.5, -0.25))
    path = write(tmp_path, arpa(entries))
    tracemalloc.start()
    model = load_arpa(path, symbols)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    kept = sum(value.nbytes for value in vars(model).values() if isinstance(value, np.ndarray))
    assert kept < 20 * len(entries)
    assert peak_bytes < 120 * len(entries)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.arpa"):
        load_arpa(tmp_path / "nowhere.arpa", SYMBOLS)
