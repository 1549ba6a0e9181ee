"""The recordings of the demo test set with the text that a lone stream must get."""

from __future__ import annotations

import json
from dataclasses import dataclass

from benchmarks.chaos.server import MODEL_DIR
from benchmarks.load.utterances import SAMPLE_RATE, Pcm, read_pcm


@dataclass(frozen=True, eq=False)
class Clip:
    name: str
    samples_S: Pcm
    text: str

    def chunks(self, chunk_ms: float) -> list[Pcm]:
        step = max(1, round(chunk_ms * SAMPLE_RATE / 1000))
        return [self.samples_S[i : i + step] for i in range(0, self.samples_S.size, step)]


def read_clips() -> list[Clip]:
    """`text` is WeNet's own streaming output with the configuration that the model ships with.

    WeNet writes a second space for a mark before a marked unit; the product has one.
    """
    folder = MODEL_DIR / "demo_en" / "testset"
    entries = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return [
        Clip(
            entry["wav"],
            read_pcm(folder / entry["wav"]),
            " ".join(entry["wenet_chunk16_left4"].split()),
        )
        for entry in entries
    ]
