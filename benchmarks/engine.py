"""Runs the engine in process, in a closed loop: all streams send a chunk and wait for its answer.

A round covers what a request covers: buffering, features, encoder, decoder, text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from benchmarks.report import Figure, Report
from benchmarks.workload import (
    CHUNK_S,
    CHUNKS_PER_UTTERANCE,
    FloatArray,
    Options,
    Utterance,
    utterances,
)
from oasr_backend.config import ServingConfig
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk

STREAM_COUNTS = {"cpu": (1, 8, 32, 128), "cuda": (1, 32, 128, 512, 2048)}
_MEASURE_S = 4.0
# Longer than an utterance: every slot has then ended one and begun another.
WARM_UP_ROUNDS = CHUNKS_PER_UTTERANCE + 2


class Answer(Protocol):
    """What comes back for one chunk."""

    @property
    def text(self) -> str: ...

    @property
    def error(self) -> Exception | None: ...


class Recogniser(Protocol):
    """The engine, or another recogniser behind the same call."""

    def process(self, chunks: Sequence[AudioChunk]) -> Sequence[Answer]:
        """The answers in the order of the chunks, one chunk of a stream at most."""
        ...

    def close(self) -> None:
        """Frees all streams."""
        ...


@dataclass
class _Slot:
    """One place for a live stream: the utterance that plays, and its position."""

    utterance: int
    position: int
    number: int = 0


class ClosedLoop:
    """Keeps `num_streams` streams live; they begin at different times, as callers do."""

    def __init__(
        self,
        engine: Recogniser,
        audio: Sequence[Utterance],
        num_streams: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._audio = audio
        self._num_streams = num_streams
        self._slots = [
            _Slot(index % len(audio), index * CHUNKS_PER_UTTERANCE // num_streams)
            for index in range(num_streams)
        ]
        self._is_first_round = True

    def round(self) -> float:
        """One chunk of every stream; returns its seconds. Raises the error of any stream."""
        chunks = [self._next_chunk(index, slot) for index, slot in enumerate(self._slots)]
        self._is_first_round = False
        started_s = self._clock()
        results = self._engine.process(chunks)
        elapsed_s = self._clock() - started_s
        for result in results:
            if result.error is not None:
                raise result.error
        return elapsed_s

    def measure(self, seconds: float, *, warm_up_rounds: int = WARM_UP_ROUNDS) -> FloatArray:
        """Rounds for about `seconds` after some that do not count; the time of each."""
        for _ in range(warm_up_rounds):
            self.round()
        times_s: list[float] = []
        while sum(times_s) < seconds or len(times_s) < 3:
            times_s.append(self.round())
        return np.array(times_s, dtype=np.float32)

    def _next_chunk(self, index: int, slot: _Slot) -> AudioChunk:
        chunk = AudioChunk(
            stream_id=f"{index}-{slot.number}",
            samples_S=self._audio[slot.utterance][slot.position],
            is_first=slot.position == 0 or self._is_first_round,
            is_last=slot.position == CHUNKS_PER_UTTERANCE - 1,
        )
        slot.position += 1
        if chunk.is_last:
            slot.utterance = (slot.utterance + self._num_streams) % len(self._audio)
            slot.number, slot.position = slot.number + 1, 0
        return chunk


def chosen_engine(options: Options, *, num_streams: int) -> Engine:
    """The model of the options, the demo's by default, with room for `num_streams`."""
    torch.set_num_threads(options.num_threads)
    config = ServingConfig.of(max_streams=num_streams, **options.settings)
    return load_engine(options.model.directory(), config, device=options.device)


def audio_rate(times_s: FloatArray, num_streams: int) -> float:
    """Audio seconds per second of rounds that took `times_s`."""
    return float(num_streams * CHUNK_S * times_s.size / times_s.sum())


def measure_rate(
    engine: Engine, audio: Sequence[Utterance], *, num_streams: int, options: Options
) -> float:
    """Audio seconds per second of a fresh closed loop; the engine is left without streams."""
    seconds, warm_up_rounds = measuring_time(options)
    loop = ClosedLoop(engine, audio, num_streams)
    times_s = loop.measure(seconds, warm_up_rounds=warm_up_rounds)
    engine.close()
    return audio_rate(times_s, num_streams)


def measuring_time(options: Options) -> tuple[float, int]:
    """Seconds of measuring and rounds of warming up."""
    return (0.2, 2) if options.quick else (_MEASURE_S, WARM_UP_ROUNDS)


def run(options: Options) -> Report:
    counts = STREAM_COUNTS["cpu" if options.device == "cpu" else "cuda"]
    counts = counts[:3] if options.quick else counts
    audio = utterances(quick=options.quick)
    engine = chosen_engine(options, num_streams=max(counts))
    seconds, warm_up = measuring_time(options)
    times: dict[int, list[FloatArray]] = {count: [] for count in counts}
    for _ in range(options.num_repeats):
        for count in counts:
            loop = ClosedLoop(engine, audio, count)
            times[count].append(loop.measure(seconds, warm_up_rounds=warm_up))
            engine.close()
    figures = [figure for count in counts for figure in _figures(count, times[count])]
    return Report("engine", _configuration(options, engine), figures)


def _figures(count: int, repeats: Sequence[FloatArray]) -> list[Figure]:
    def step_ms(percentile: float) -> list[float]:
        return [float(np.percentile(times_s, percentile)) * 1e3 for times_s in repeats]

    name = f"{count} stream" + ("s" if count > 1 else "")
    rates = [audio_rate(times_s, count) for times_s in repeats]
    return [
        Figure(f"{name}: throughput", "audio s/s", rates),
        Figure(f"{name}: round p50", "ms", step_ms(50)),
        Figure(f"{name}: round p95", "ms", step_ms(95)),
    ]


def _configuration(options: Options, engine: Engine) -> dict[str, object]:
    config = engine.config
    return {
        "checkpoint": options.model.name,
        "device": options.device,
        "threads": options.num_threads,
        "dtype": config.model.dtype,
        "decoder": config.defaults.decoder or "the checkpoint's first",
        "chunk_s": CHUNK_S,
        "chunk_size": config.cache.chunk_size,
        "num_left_chunks": config.cache.num_left_chunks,
        "max_step_streams": config.step.max_step_streams,
        "chunks_per_utterance": CHUNKS_PER_UTTERANCE,
    }
