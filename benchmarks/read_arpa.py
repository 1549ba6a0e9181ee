"""Measures the reading of an n-gram model: time, and memory at its peak and for good.

    python -m benchmarks.read_arpa [ARPA --units UNITS] [--ngrams 1000000]

Without a file it writes one: 5000 units, a third of the n-grams pairs, most of the others triples.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.report import Figure, Report
from oasr_backend.decoders.bias.arpa import load_arpa
from oasr_backend.text.tokenizer import load_tokenizer

_NUM_UNITS = 5000
_SYMBOLS = ["<blank>", "<unk>", *(f"\u2581unit{unit}" for unit in range(2, _NUM_UNITS))]


def write_arpa(path: Path, num_ngrams: int, symbols: Sequence[str]) -> None:
    """A trigram model in which every n-gram's beginning is an n-gram too."""
    chance = np.random.default_rng(0)
    words = list(symbols[1:])
    pairs = _distinct(chance, num_ngrams // 3, len(words), len(words))
    triples = _distinct(chance, num_ngrams - len(words) - len(pairs), len(pairs), len(words))
    beginnings = [f"{words[a]} {words[b]}" for a, b in pairs]
    with path.open("w", encoding="utf-8") as file:
        counts = (len(words), len(pairs), len(triples))
        file.write("\\data\\\n")
        file.writelines(f"ngram {n}={count}\n" for n, count in enumerate(counts, start=1))
        file.writelines(_section(1, words, chance, backoff=True))
        file.writelines(_section(2, beginnings, chance, backoff=True))
        triple_texts = [f"{beginnings[a]} {words[b]}" for a, b in triples]
        file.writelines(_section(3, triple_texts, chance, backoff=False))
        file.write("\n\\end\\\n")


def _distinct(
    chance: np.random.Generator, count: int, num_firsts: int, num_seconds: int
) -> list[tuple[int, int]]:
    """At most `count` different pairs, in order."""
    found = np.unique(chance.integers(0, num_firsts * num_seconds, count))
    return list(zip((found // num_seconds).tolist(), (found % num_seconds).tolist(), strict=True))


def _section(
    order: int, texts: Sequence[str], chance: np.random.Generator, *, backoff: bool
) -> Iterator[str]:
    yield f"\n\\{order}-grams:\n"
    numbers = chance.uniform(-4, 0, (len(texts), 2)).round(6).tolist()
    for text, (log_prob, weight) in zip(texts, numbers, strict=True):
        yield f"{log_prob}\t{text}\t{weight}\n" if backoff else f"{log_prob}\t{text}\n"


def _read(path: Path, symbols: Sequence[str]) -> tuple[float, float, float]:
    """(seconds, MiB at the peak, MiB for good) of reading the file."""
    before_mib, begin_s = _memory_mib("VmRSS"), time.process_time()
    model = load_arpa(path, symbols)
    seconds = time.process_time() - begin_s
    kept = [values for values in vars(model).values() if isinstance(values, np.ndarray)]
    kept_mib = sum(values.nbytes for values in kept) / 2**20
    return seconds, _memory_mib("VmHWM") - before_mib, kept_mib


def _memory_mib(name: str) -> float:
    """The peak of this process. `getrusage` would tell the peak of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{name}:")[2].split()[0]) / 2**10


def measure(path: Path, symbols: Sequence[str], *, repeats: int) -> Report:
    """Each reading has a fresh process, so that the peak is its own."""
    readings = []
    for _ in range(repeats):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            readings.append(pool.submit(_read, path, symbols).result())
    columns = list(zip(*readings, strict=True))
    units = {"reading, of the processor": "s", "peak above the start": "MiB", "tables": "MiB"}
    figures = [
        Figure(name, unit, column)
        for (name, unit), column in zip(units.items(), columns, strict=True)
    ]
    size_mib = round(path.stat().st_size / 2**20, 1)
    return Report("read_arpa", {"file_mib": size_mib, "repeats": repeats}, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arpa", type=Path, nargs="?")
    parser.add_argument("--units", type=Path, help="units.txt of the model the file is for")
    parser.add_argument("--ngrams", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, symbols = arguments.arpa, _SYMBOLS
        if path is None:
            path = Path(folder) / "written.arpa"
            write_arpa(path, arguments.ngrams, symbols)
        else:
            tokenizer = load_tokenizer(arguments.units)
            symbols = tokenizer.pieces(range(tokenizer.vocab_size))
        report = measure(path, symbols, repeats=arguments.repeats)
    report.show(Console())
    report.write()


if __name__ == "__main__":
    main()
