"""Writes the --input-data file of perf_analyzer from recordings: one sequence a file.

    python -m benchmarks.perf_input FILE... -o out.json [--pcm16] [--chunk-ms 640]

Every step names its shape, since the model takes chunks of any length. perf_analyzer sets START
and END itself and plays the sequences over and over, the next one whenever one ends.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import SAMPLE_RATE, FloatArray, read_audio

Step = dict[str, Any]


def cut(samples_S: FloatArray, *, chunk_ms: int) -> list[FloatArray]:
    """Chunks of `chunk_ms`; the last one may be shorter."""
    if chunk_ms < 1:
        raise ValueError(f"chunk_ms={chunk_ms} is below 1; a request carries some audio")
    size = SAMPLE_RATE * chunk_ms // 1000
    return [samples_S[start : start + size] for start in range(0, samples_S.size, size)]


def step(samples_S: FloatArray, *, pcm16: bool = False) -> Step:
    """One request: samples as little-endian bytes in base 64, with their number as the shape."""
    if pcm16:
        scaled_S = np.clip(np.rint(samples_S * 32768.0), -32768, 32767)
        return {"PCM16": _tensor(scaled_S.astype("<i2").tobytes(), samples_S.size)}
    return {"WAV": _tensor(samples_S.astype("<f4").tobytes(), samples_S.size)}


def _tensor(content: bytes, num_samples: int) -> dict[str, Any]:
    text = base64.b64encode(content).decode("ascii")
    return {"content": {"b64": text}, "shape": [num_samples]}


def write_input(
    path: Path, sequences: Sequence[Sequence[FloatArray]], *, pcm16: bool = False
) -> None:
    """`sequences` hold the chunks of one stream each."""
    if not sequences or not all(len(chunks) for chunks in sequences):
        raise ValueError("a sequence without a chunk; give recordings that hold samples")
    data = [[step(samples_S, pcm16=pcm16) for samples_S in chunks] for chunks in sequences]
    path.write_text(json.dumps({"data": data}), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perf_input", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--pcm16", action="store_true", help="send PCM16 instead of WAV")
    parser.add_argument("--chunk-ms", type=int, default=640)
    chosen = parser.parse_args(arguments)
    sequences = [cut(read_audio(path), chunk_ms=chosen.chunk_ms) for path in chosen.files]
    write_input(chosen.output, sequences, pcm16=chosen.pcm16)


if __name__ == "__main__":
    main()
