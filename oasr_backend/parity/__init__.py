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

from oasr_backend.checkpoints import CheckpointInfo, open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.errors import InvalidRequestError
from oasr_backend.features import WindowGeometry
from oasr_backend.features.samples import FLOAT32
from oasr_backend.streaming.assemble import assemble, load_engine
from oasr_backend.streaming.batching import StepBatch
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.runner import EncoderRunner
from oasr_backend.streaming.store import StepRows
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
    config = ServingConfig.of(chunk_size=chunk_size, num_left_chunks=num_left_chunks, dtype=dtype)
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

    Raises InvalidRequestError for features of another width, or too few for one encoder frame.
    """
    opened = open_checkpoint(checkpoint_dir)
    for feats_TF in feats:
        _check_features(feats_TF, opened.info)
    engine = assemble(opened.load(), _roomy(config, feats), device=torch.device(device))
    session = _FeatureSession(engine, feats)
    waits = list(delays) or [0] * len(feats)
    step = 0
    while any(stream.num_ready for stream in session.streams):
        waiting = zip(session.streams, waits, strict=True)
        session.step([one for one, wait in waiting if one.num_ready and wait <= step])
        step += 1
    return session.decoded()


def _check_features(feats_TF: FloatArray, info: CheckpointInfo) -> None:
    num_bins, least = info.frames.num_bins, info.encoder.right_context_frames + 1
    if feats_TF.ndim == 2 and feats_TF.shape[1] == num_bins and len(feats_TF) >= least:
        return
    raise InvalidRequestError(
        f"features of shape {feats_TF.shape}, but the checkpoint reads (T, {num_bins}) with T of "
        f"{least} or more; give one row of {num_bins} log-mel values for each frame"
    )


class _FeatureStream:
    """Cuts features into the windows that `AudioBuffer` would cut of their audio."""

    def __init__(self, slot: int, feats_TF: FloatArray, geometry: WindowGeometry) -> None:
        self.slot = slot
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
    """Steps feature streams through an engine's store, model and decoder."""

    def __init__(self, engine: Engine, feats: Sequence[FloatArray]) -> None:
        parts = engine.parts
        self._store, frames = parts.store, parts.geometry.frames
        self._runner = EncoderRunner(
            parts.model,
            parts.store,
            window_shape=(len(feats), parts.geometry.window_frames, frames.num_bins),
        )
        options = parts.admission.defaults
        self.streams = [
            _FeatureStream(parts.store.open(options), array, parts.geometry) for array in feats
        ]

    def step(self, streams: Sequence[_FeatureStream]) -> None:
        if not streams:
            return
        windows = self._runner.next_staging()[FLOAT32][: len(streams)]
        rows = StepRows(
            np.array([stream.slot for stream in streams]),
            np.array([one.pop_window(row) for one, row in zip(streams, windows, strict=True)]),
        )
        self._store.prepare(rows.slots_B)
        output = self._runner.forward(StepBatch(rows, windows))
        log_probs_BTV = output.heads["ctc"].float().log_softmax(dim=-1)
        self._store.commit(rows, output)()
        for row, stream in enumerate(streams):
            num_frames = int(rows.num_frames_B[row])
            stream.log_probs_TV.append(log_probs_BTV[row, :num_frames].cpu().numpy())

    def decoded(self) -> list[DecodedFeatures]:
        found = self._store.decoders.best([stream.slot for stream in self.streams])
        return [
            DecodedFeatures(np.concatenate(stream.log_probs_TV), hypothesis)
            for stream, hypothesis in zip(self.streams, found, strict=True)
        ]


def _roomy(config: ServingConfig, feats: Sequence[FloatArray]) -> ServingConfig:
    """As many streams as there are features, and no ceiling on unlimited history."""
    num_streams = len(feats)
    config = config.changed(max_streams=num_streams, max_step_streams=num_streams)
    if config.cache.num_left_chunks >= 0:
        return config
    most_chunks = max(len(array) for array in feats) // config.cache.chunk_size + 2
    return config.changed(max_num_blocks=num_streams * most_chunks)


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
    config = ServingConfig.of(
        chunk_size=chunk_size,
        num_left_chunks=num_left_chunks,
        tail_padding=tail_padding,
        max_streams=1,
        dtype=dtype,
    )
    engine = load_engine(checkpoint_dir, config, device=device)
    return transcribe_file(engine, wav_path, piece_ms=piece_ms)


def transcribe_file(engine: Engine, wav_path: str | Path, *, piece_ms: int = 100) -> dict[str, Any]:
    """Feeds one mono file through an engine; returns the RESULT document of its END.

    Raises InvalidRequestError for a file of several channels.
    """
    import soundfile  # Features alone need no audio library.

    samples_S, sample_rate = soundfile.read(wav_path, dtype="float32")
    if samples_S.ndim != 1:
        raise InvalidRequestError(
            f"{wav_path} holds samples of shape {samples_S.shape}, but a stream takes (S,), one "
            "mono signal; mix the channels down"
        )
    options = replace(engine.config.defaults, sample_rate=sample_rate)
    piece = max(1, sample_rate * piece_ms // 1000)
    starts = range(0, max(1, samples_S.size), piece)
    for start in starts:
        (result,) = engine.process([
            AudioChunk(
                stream_id=str(wav_path),
                samples_S=samples_S[start : start + piece],
                is_first=start == 0,
                is_last=start == starts[-1],
                options=options if start == 0 else None,
                wants_result=True,
            )
        ])  # fmt: skip
        if result.error is not None:
            raise result.error
    return dict(result.document or {})
