"""Lets streams join and leave at random; each text must be that of a CPU engine alone.

    python -m tests.churn [--device cuda] [--joins 1000] [--dtype float16]

On a GPU the churn runs through the captured graphs; the exit status is 1 if any text differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import soundfile

from oasr_backend.config import ServingConfig
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk, ChunkResult, Samples
from tests.conftest import DEMO_DIR, read_clips


@dataclass
class Guest:
    """One stream's visit: its recording, how much of it comes, and whether END comes."""

    number: int
    recording: int
    pieces: list[Samples]
    says_end: bool
    num_sent: int = 0


@dataclass
class Churn:
    """Feeds `engine` with random visits of `recordings`; `texts` are theirs when decoded alone."""

    engine: Engine
    recordings: Sequence[Samples]
    texts: Sequence[str]
    seed: int
    most_guests: int
    guests: list[Guest] = field(default_factory=list)
    num_joined: int = 0
    num_finished: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = np.random.default_rng(self.seed)

    def run(self, num_joins: int) -> None:
        """Returns when `num_joins` visits have begun and all are over."""
        while self.guests or self.num_joined < num_joins:
            while self.num_joined < num_joins and len(self.guests) < self._wanted():
                self._join()
            self._round()
        self.engine.check_integrity()

    def _wanted(self) -> int:
        return int(self._chance.integers(1, self.most_guests + 1))

    def _join(self) -> None:
        recording = int(self._chance.integers(len(self.recordings)))
        samples_S = self.recordings[recording]
        cuts = np.sort(self._chance.integers(0, samples_S.size, self._chance.integers(0, 6)))
        guest = Guest(
            number=self.num_joined,
            recording=recording,
            pieces=list(np.split(samples_S, cuts)),
            says_end=bool(self._chance.random() < 0.8),
        )
        self.guests.append(guest)
        self.num_joined += 1

    def _round(self) -> None:
        """A random part of the guests sends its next piece, all in one list."""
        speaking = [guest for guest in self.guests if self._chance.random() < 0.7]
        results = self.engine.process([self._next_piece(guest) for guest in speaking])
        for guest, result in zip(speaking, results, strict=True):
            self._take(guest, result)

    def _next_piece(self, guest: Guest) -> AudioChunk:
        guest.num_sent += 1
        return AudioChunk(
            stream_id=f"guest-{guest.number}",
            samples_S=guest.pieces[guest.num_sent - 1],
            is_first=guest.num_sent == 1,
            is_last=guest.says_end and guest.num_sent == len(guest.pieces),
        )

    def _take(self, guest: Guest, result: ChunkResult) -> None:
        if result.error is not None:
            raise result.error
        if guest.num_sent < len(guest.pieces):
            return
        self.guests.remove(guest)
        if not guest.says_end:
            # The guest sends no END; its id comes back only to free what it held.
            self.engine.process([AudioChunk(f"guest-{guest.number}", _SILENCE, is_last=True)])
            return
        self.num_finished += 1
        if result.text != self.texts[guest.recording]:
            self.wrong.append((result.text, self.texts[guest.recording]))


_SILENCE: Samples = np.zeros(0, dtype=np.float32)


def texts_alone(engine: Engine, recordings: Sequence[Samples]) -> list[str]:
    """The text of each recording, sent alone and in one piece."""
    whole = [AudioChunk(1, samples, is_first=True, is_last=True) for samples in recordings]
    return [engine.process([chunk])[0].text for chunk in whole]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.churn", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--joins", type=int, default=1000)
    parser.add_argument("--guests", type=int, default=64, help="streams at once, at most")
    parser.add_argument("--clips", type=int, default=70, help="recordings to choose from")
    chosen = parser.parse_args(arguments)
    clips = read_clips(DEMO_DIR / "testset") + read_clips(DEMO_DIR / "eval")
    recordings = [soundfile.read(clip.path, dtype="float32")[0] for clip in clips[: chosen.clips]]
    reference = load_engine(DEMO_DIR, ServingConfig(), device="cpu")
    config = ServingConfig.of(max_streams=chosen.guests, dtype=chosen.dtype)
    engine = load_engine(DEMO_DIR, config, device=chosen.device)
    texts = texts_alone(reference, recordings)
    churn = Churn(engine, recordings, texts, seed=1, most_guests=chosen.guests)
    churn.run(chosen.joins)
    print(
        f"{churn.num_joined} streams joined {chosen.device}, {churn.num_finished} said END, "
        f"{len(churn.wrong)} texts differ from the CPU engine's"
    )
    for found, expected in churn.wrong[:5]:
        print(f"  expected {expected!r}\n  found    {found!r}")
    return int(bool(churn.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
