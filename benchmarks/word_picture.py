"""Draws a recording of the demo test set with the words and times that RESULT gives for it.

python -m benchmarks.word_picture [WAV] [--output docs/word_times.svg]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

from benchmarks.report import ROOT
from benchmarks.workload import DEMO_DIRECTORY
from oasr_backend.config import ServingConfig
from oasr_backend.parity import transcribe_file
from oasr_backend.streaming.assemble import load_engine

PIXELS_PER_S = 260
_MIDDLE, _HEIGHT, _WORDS_TOP, _AXIS = 70, 60, 150, 205
FloatArray = npt.NDArray[np.float32]


def envelope(samples_S: FloatArray, width: int) -> list[tuple[float, float]]:
    """(lowest, highest) of the samples behind each pixel, as shares of the loudest."""
    parts = np.array_split(samples_S / max(1e-6, float(np.abs(samples_S).max())), width)
    return [(float(part.min()), float(part.max())) for part in parts]


def waveform(samples_S: FloatArray, width: int) -> str:
    lines = [
        f"M{x + 0.5:g},{_MIDDLE - high * _HEIGHT:.1f}V{_MIDDLE - low * _HEIGHT:.1f}"
        for x, (low, high) in enumerate(envelope(samples_S, width))
    ]
    return f'<path d="{"".join(lines)}" stroke="#4a6fa5" fill="none"/>'


def word_boxes(words: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A darker box is a more confident word. Neighbours stand in two rows by turns."""
    for index, word in enumerate(words):
        x, end = word["start_s"] * PIXELS_PER_S, word["end_s"] * PIXELS_PER_S
        y = _WORDS_TOP + 24 * (index % 2)
        yield (
            f'<rect x="{x:.1f}" y="10" width="{end - x:.1f}" height="{y - 8}" fill="#e07a3f" '
            f'fill-opacity="{0.1 + 0.25 * word["confidence"]:.2f}"/>'
            f'<text x="{x:.1f}" y="{y + 16}">{escape(word["word"])}</text>'
        )


def axis(seconds: float) -> Iterator[str]:
    for half in range(int(seconds * 2) + 1):
        x = half / 2 * PIXELS_PER_S
        yield f'<path d="M{x:g},{_AXIS - 6}v6" stroke="#555"/>'
        yield f'<text x="{x + 3:g}" y="{_AXIS + 12}" fill="#555">{half / 2:g} s</text>'


def picture(samples_S: FloatArray, document: Mapping[str, Any]) -> str:
    width = round(document["audio_s"] * PIXELS_PER_S)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_AXIS + 20}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        *word_boxes(document["words"]),
        waveform(samples_S, width),
        *axis(document["audio_s"]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = DEMO_DIRECTORY / "testset" / "kokoro_LJ050-0011_bf_emma.wav"
    parser.add_argument("wav", type=Path, nargs="?", default=default)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "word_times.svg")
    arguments = parser.parse_args()
    engine = load_engine(DEMO_DIRECTORY, ServingConfig.of(word_times=True), device="cpu")
    document = transcribe_file(engine, arguments.wav)
    samples_S = soundfile.read(arguments.wav, dtype="float32")[0]
    arguments.output.write_text(picture(samples_S, document), encoding="utf-8")


if __name__ == "__main__":
    main()
