"""The serving path as a function, to hold other checkpoints against other implementations.

Both calls run the engine's own batching, paged caches and decoder; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oasr_backend.checkpoints import load_wenet
from oasr_backend.config import ServingConfig
from oasr_backend.features import WindowGeometry
from oasr_backend.features.samples import FLOAT32
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.batching import StepBatch
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.runner import EncoderRunner
from oasr_backend.types import AudioChunk, Hypothesis

FloatArray = npt.NDArray[np.float32]


def stream_log_probs(
    checkpoint_dir: str | Path,
    feats: FloatArray,
    *,
    chunk_size: int,
    num_left_chunks: int,
    device: str = "cpu",
    dtype: str = "float32",
) -> FloatArray:
    """CTC log-probabilities (T', V) of log-mel features (T, F), chunk by chunk, no tail padding."""
    config = ServingConfig(chunk_size=chunk_size, num_left_chunks=num_left_chunks, dtype=dtype)
    (decoded,) = decode_features(checkpoint_dir, [feats], config, device=device)
    return decoded.log_probs_TV


@dataclass(frozen=True)
class DecodedFeatures:
    """One stream's log-probabilities (T', V) and its best hypothesis."""

    log_probs_TV: FloatArray
    hypothesis: Hypothesis


def decode_features(
    checkpoint_dir: str | Path,
    feats: Sequence[FloatArray],
    config: ServingConfig,
    *,
    delays: Sequence[int] = (),
    device: str = "cpu",
) -> list[DecodedFeatures]:
    """Streams of log-mel features (T, F) that share their steps.

    Stream i enters after `delays[i]` steps, so rows of one step stand at different offsets.
    """
    engine = Engine(load_wenet(checkpoint_dir), _roomy(config, feats), device=torch.device(device))
    session = _FeatureSession(engine, feats)
    waits = list(delays) or [0] * len(feats)
    step = 0
    while unfinished := [stream for stream in session.streams if stream.num_ready]:
        session.step([stream for stream in unfinished if waits[stream.generation] <= step])
        step += 1
    return session.decoded()


class _FeatureStream:
    """Cuts features into the windows that `AudioBuffer` would cut of their audio."""

    def __init__(self, generation: int, feats_TF: FloatArray, geometry: WindowGeometry) -> None:
        self.generation = generation
        self.log_probs_TV: list[FloatArray] = []
        self._feats_TF, self._geometry = feats_TF, geometry
        self._start = 0

    @property
    def num_ready(self) -> int:
        return self._geometry.num_encoder_frames(len(self._feats_TF) - self._start)

    def pop_window(self, into_WF: FloatArray) -> int:
        """Writes the next window, zero past the last frame; returns its encoder frames."""
        window_WF = self._feats_TF[self._start : self._start + self._geometry.window_frames]
        into_WF[: len(window_WF)], into_WF[len(window_WF) :] = window_WF, 0.0
        self._start += self._geometry.stride_frames
        return self._geometry.num_encoder_frames(len(window_WF))


class _FeatureSession:
    """Steps feature streams through an engine's caches, model and decoder."""

    def __init__(self, engine: Engine, feats: Sequence[FloatArray]) -> None:
        geometry, mel_bins = engine.geometry, engine.model.spec.num_mel_bins
        self._caches = engine.caches
        self._runner = EncoderRunner(
            engine.model,
            engine.caches,
            window_shape=(len(feats), geometry.window_frames, mel_bins),
        )
        self.streams = [_FeatureStream(index, array, geometry) for index, array in enumerate(feats)]
        for stream in self.streams:
            engine.caches.open(stream.generation, StreamOptions.from_config(engine.config))

    def step(self, streams: Sequence[_FeatureStream]) -> None:
        if not streams:
            return
        rows = self._runner.next_staging()[FLOAT32][: len(streams)]
        num_frames = tuple(
            stream.pop_window(row) for stream, row in zip(streams, rows, strict=True)
        )
        batch = StepBatch(tuple(stream.generation for stream in streams), rows, num_frames)
        self._caches.prepare(batch.generations)
        output = self._runner.forward(batch)
        log_probs_BTV = output.logits_BTV.float().log_softmax(dim=-1)
        self._caches.commit(batch.generations, num_frames, output)()
        for row, stream in enumerate(streams):
            stream.log_probs_TV.append(log_probs_BTV[row, : num_frames[row]].cpu().numpy())

    def decoded(self) -> list[DecodedFeatures]:
        found = self._caches.hypotheses([stream.generation for stream in self.streams])
        return [
            DecodedFeatures(np.concatenate(stream.log_probs_TV), hypothesis)
            for stream, hypothesis in zip(self.streams, found, strict=True)
        ]


def _roomy(config: ServingConfig, feats: Sequence[FloatArray]) -> ServingConfig:
    """As many streams as there are features, and no ceiling on unlimited history."""
    num_streams = len(feats)
    config = replace(config, max_streams=num_streams, max_step_streams=num_streams)
    if config.num_left_chunks >= 0:
        return config
    most_chunks = max(len(array) for array in feats) // config.chunk_size + 2
    return replace(config, max_num_blocks=num_streams * most_chunks)


def stream_transcript(
    checkpoint_dir: str | Path,
    wav_path: str | Path,
    *,
    chunk_size: int,
    num_left_chunks: int,
    piece_ms: int = 100,
    tail_padding: bool = True,
    device: str = "cpu",
    dtype: str = "float32",
) -> dict[str, Any]:
    """The RESULT document of a mono audio file that is fed in pieces of `piece_ms`."""
    config = ServingConfig(
        chunk_size=chunk_size,
        num_left_chunks=num_left_chunks,
        tail_padding=tail_padding,
        max_streams=1,
        dtype=dtype,
    )
    engine = Engine.load(checkpoint_dir, config, device=device)
    return transcribe_file(engine, wav_path, piece_ms=piece_ms)


def transcribe_file(engine: Engine, wav_path: str | Path, *, piece_ms: int = 100) -> dict[str, Any]:
    """Feeds one mono file through an engine; returns the RESULT document of its END."""
    import soundfile  # Features alone need no audio library.

    samples_S, sample_rate = soundfile.read(wav_path, dtype="float32")
    piece = max(1, sample_rate * piece_ms // 1000)
    starts = range(0, max(1, samples_S.size), piece)
    for start in starts:
        (result,) = engine.process([
            AudioChunk(
                stream_id=str(wav_path),
                samples_S=samples_S[start : start + piece],
                is_first=start == 0,
                is_last=start == starts[-1],
                parameters={"sample_rate": sample_rate} if start == 0 else {},
                wants_result=True,
            )
        ])  # fmt: skip
        if result.error is not None:
            raise result.error
    return dict(result.document or {})
