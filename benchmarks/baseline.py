"""Compares the engine at 32 streams with the plain way: one stream after the other, dense caches.

Both hear the same utterances in the same chunks with the same filterbank and the same number of
threads, in turns, so that other work of the machine slows both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from benchmarks.dense_conformer import DenseConformer, DenseState
from benchmarks.engine import Recogniser, chosen_engine, measure_rate, measuring_time
from benchmarks.report import Figure, Report
from benchmarks.workload import (
    CHUNK_S,
    DEMO_DIRECTORY,
    FloatArray,
    Options,
    Utterance,
    utterances,
)
from oasr_backend.features import LogMelFilterbank
from oasr_backend.streaming.engine import Engine
from oasr_backend.text.tokenizer import Tokenizer, load_tokenizer
from oasr_backend.types import AudioChunk

NUM_STREAMS = 32
TARGET_RATIO = 3.0
_CHUNK_FRAMES, _LEFT_CHUNKS, _SUBSAMPLING = 16, 4, 4
_SHIFT, _OVERLAP = 160, 240
_STRIDE_SAMPLES = _CHUNK_FRAMES * _SUBSAMPLING * _SHIFT
# Three feature frames more than a stride, and the rest of the last frame.
_WINDOW_SAMPLES = _STRIDE_SAMPLES + 2 * _SHIFT + _SHIFT + _OVERLAP


class PlainRecogniser:
    """One stream with greedy CTC, written as one writes it first."""

    def __init__(self, directory: Path = DEMO_DIRECTORY, *, device: str = "cpu") -> None:
        self._device = device
        self._filterbank = LogMelFilterbank().to(device)
        self._tokenizer: Tokenizer = load_tokenizer(
            directory / "units.txt", directory / "bpe.model"
        )
        left_frames = _LEFT_CHUNKS * _CHUNK_FRAMES
        self._model = DenseConformer(directory, num_left_frames=left_frames, device=device)
        self.start()

    def start(self) -> None:
        """Begins another stream."""
        self._state = DenseState()
        self._samples_S = np.empty(0, dtype=np.float32)
        self._tokens: list[int] = []
        self._previous = 0

    def accept(self, samples_S: FloatArray, *, is_last: bool = False) -> str:
        """The text so far. At the end a window of silence follows, as in the served engine."""
        silence_S = np.zeros(_WINDOW_SAMPLES if is_last else 0, dtype=np.float32)
        self._samples_S = np.concatenate((self._samples_S, samples_S, silence_S))
        while self._samples_S.size >= _WINDOW_SAMPLES:
            self._decode(self._samples_S[:_WINDOW_SAMPLES])
            self._samples_S = self._samples_S[_STRIDE_SAMPLES:]
        return self._tokenizer.decode(self._tokens)

    def transcribe(self, chunks: Utterance) -> str:
        """The final text of one utterance, chunk after chunk."""
        self.start()
        text = ""
        for index, samples_S in enumerate(chunks):
            text = self.accept(samples_S, is_last=index == len(chunks) - 1)
        return text

    def _decode(self, window_S: FloatArray) -> None:
        samples_BS = torch.from_numpy(window_S.copy()).unsqueeze(0).to(self._device)
        features_WF = self._filterbank(samples_BS).squeeze(0)
        log_probs_TV = self._model.log_probs(features_WF, self._state)
        for token in log_probs_TV.argmax(-1).tolist():
            if token not in (0, self._previous):
                self._tokens.append(token)
            self._previous = token


def engine_text(engine: Recogniser, chunks: Utterance) -> str:
    """The final text that a recogniser gives for one utterance."""
    text = ""
    for index, samples_S in enumerate(chunks):
        chunk = AudioChunk(
            stream_id="compare",
            samples_S=samples_S,
            is_first=index == 0,
            is_last=index == len(chunks) - 1,
        )
        (result,) = engine.process([chunk])
        if result.error is not None:
            raise result.error
        text = result.text
    return text


def run(options: Options) -> Report:
    """Raises AssertionError when the two give different texts: they must do the same work."""
    audio = utterances(quick=options.quick)
    engine, plain = chosen_engine(options, num_streams=NUM_STREAMS), _load_plain(options)
    num_compared = _compare_texts(engine, plain, audio[: 2 if options.quick else 8])
    seconds, _ = measuring_time(options)
    queue = cycle(audio)
    engine_rates, plain_rates = [], []
    for _ in range(options.num_repeats):
        engine_rates.append(measure_rate(engine, audio, num_streams=NUM_STREAMS, options=options))
        plain_rates.append(_measure_plain(plain, queue, seconds))
    ratios = [ours / plain for ours, plain in zip(engine_rates, plain_rates, strict=True)]
    configuration = {
        "device": options.device,
        "threads": options.num_threads,
        "streams": NUM_STREAMS,
        "chunk_s": CHUNK_S,
        "num_left_chunks": _LEFT_CHUNKS,
        "utterances_with_equal_text": num_compared,
    }
    return Report("baseline", configuration, [
        Figure(f"engine, {NUM_STREAMS} streams", "audio s/s", engine_rates),
        Figure("plain, one stream at a time", "audio s/s", plain_rates),
        Figure("engine / plain", "x", ratios, target=TARGET_RATIO),
    ])  # fmt: skip


def _load_plain(options: Options) -> PlainRecogniser:
    plain = PlainRecogniser(device=options.device)
    plain.transcribe([np.zeros(_WINDOW_SAMPLES, dtype=np.float32)] * 6)
    return plain


def _compare_texts(engine: Engine, plain: PlainRecogniser, audio: Sequence[Utterance]) -> int:
    for chunks in audio:
        ours, theirs = engine_text(engine, chunks), plain.transcribe(chunks)
        if not ours or ours != theirs:
            raise AssertionError(f"the engine hears {ours!r}, the baseline {theirs!r}")
    return len(audio)


def _measure_plain(plain: PlainRecogniser, queue: cycle[Utterance], seconds: float) -> float:
    """Audio seconds per second over whole utterances."""
    audio_s, started_s = 0.0, time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        chunks = next(queue)
        plain.transcribe(chunks)
        audio_s += len(chunks) * CHUNK_S
    return audio_s / (time.perf_counter() - started_s)
