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
from oasr_backend.features import WindowFrames, WindowGeometry
from oasr_backend.features.samples import FLOAT32
from oasr_backend.models import ChunkSettings, EncoderSpec
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
    """CTC log-probabilities (T', V) of log-mel features (T, F), chunk by chunk, no tail padding.

    Raises InvalidRequestError for a checkpoint without a CTC head.
    """
    config = ServingConfig.of(chunk_size=chunk_size, num_left_chunks=num_left_chunks, dtype=dtype)
    (decoded,) = decode_features(checkpoint_dir, [feats], config, device=device)
    if decoded.log_probs_TV is None:
        raise InvalidRequestError(
            f"{checkpoint_dir} has no CTC head, so that there are no log-probabilities; ask "
            "stream_tokens for what its other searches find"
        )
    return decoded.log_probs_TV


def stream_tokens(
    checkpoint_dir: str | Path,
    feats: FloatArray,
    *,
    chunk_size: int | None = None,
    num_left_chunks: int | None = None,
    lookahead: int | None = None,
    decoder: str,
    beam_size: int = 4,
    language: str | None = None,
    official_end: bool = True,
    delays: Sequence[int] = (0,),
    device: str = "cpu",
    dtype: str = "float32",
) -> list[tuple[list[int], list[int], float]]:
    """Token ids, the encoder frames at which they appear, and the score, for each copy of a stream.

    `feats` (T, F) are the family's own features; copy i enters after `delays[i]` steps. With
    `official_end` the stream ends as the checkpoint's toolkit ends it, else behind the last encoder
    frame that real features give. None for `chunk_size` or `num_left_chunks`: the server's default.

    Raises InvalidRequestError for `lookahead` or `language`, which no family here has.
    """
    for name, value in (("lookahead", lookahead), ("language", language)):
        if value is not None:
            raise InvalidRequestError(
                f"{name}={value!r}, but {checkpoint_dir} has no choice of it; leave it out"
            )
    stated = {"chunk_size": chunk_size, "num_left_chunks": num_left_chunks}
    config = ServingConfig.of(
        decoder=decoder,
        beam_size=beam_size,
        dtype=dtype,
        **{name: value for name, value in stated.items() if value is not None},
    )
    found = decode_features(
        checkpoint_dir,
        [feats] * len(delays),
        config,
        delays=delays,
        official_end=official_end,
        device=device,
    )
    best = [decoded.hypothesis for decoded in found]
    return [(list(one.tokens), list(one.times), one.score) for one in best]


@dataclass(frozen=True)
class DecodedFeatures:
    """One stream's log-probabilities (T', V), where there is a CTC head, and its hypotheses."""

    log_probs_TV: FloatArray | None
    hypothesis: Hypothesis


def decode_features(
    checkpoint_dir: str | Path,
    feats: Sequence[FloatArray],
    config: ServingConfig,
    *,
    delays: Sequence[int] = (),
    official_end: bool = False,
    device: str = "cpu",
) -> list[DecodedFeatures]:
    """Streams of features (T, F) before normalisation, that share their steps.

    Stream i enters after `delays[i]` steps, so rows of one step stand at different offsets.

    Raises InvalidRequestError for features of another width, or too few for one encoder frame.
    """
    opened = open_checkpoint(checkpoint_dir)
    spec = opened.info.encoder.under(
        ChunkSettings(config.cache.chunk_size, config.cache.num_left_chunks)
    )
    for feats_TF in feats:
        _check_features(feats_TF, opened.info, spec)
    engine = assemble(opened.load(), _roomy(config, feats), device=torch.device(device))
    session = _FeatureSession(engine, feats, official_end=official_end)
    waits = list(delays) or [0] * len(feats)
    step = 0
    while any(stream.num_ready for stream in session.streams):
        waiting = zip(session.streams, waits, strict=True)
        session.step([one for one, wait in waiting if one.num_ready and wait <= step])
        step += 1
    return session.decoded()


def _check_features(feats_TF: FloatArray, info: CheckpointInfo, spec: EncoderSpec) -> None:
    num_bins, least = info.frames.num_bins, spec.right_context_frames + 1
    if feats_TF.ndim == 2 and feats_TF.shape[1] == num_bins and len(feats_TF) >= least:
        return
    raise InvalidRequestError(
        f"features of shape {feats_TF.shape}, but the checkpoint reads (T, {num_bins}) with T of "
        f"{least} or more; give one row of {num_bins} log-mel values for each frame"
    )


class _FeatureStream:
    """Cuts features into the windows that `AudioBuffer` would cut of their audio.

    With `official_end` the stream ends as its toolkit ends it, where that pads features; else
    behind the last encoder frame that real ones give.
    """

    def __init__(
        self, slot: int, feats_TF: FloatArray, geometry: WindowGeometry, *, official_end: bool
    ) -> None:
        self.slot = slot
        self.log_probs_TV: list[FloatArray] = []
        self._feats_TF, self._geometry = feats_TF, geometry
        self._is_padded = official_end and geometry.tail_frames is not None
        self._num_popped = 0

    @property
    def num_ready(self) -> int:
        """Windows that are left."""
        num_frames = len(self._feats_TF)
        num_windows = self._geometry.num_windows_of(num_frames, pads_tail=self._is_padded)
        return num_windows - self._num_popped

    def pop_window(self, into_WF: FloatArray) -> WindowFrames:
        """Writes the next window, zero past the last frame."""
        start = self._num_popped * self._geometry.stride_frames
        window_WF = self._feats_TF[start : start + self._geometry.window_frames]
        into_WF[: len(window_WF)], into_WF[len(window_WF) :] = window_WF, 0.0
        self._num_popped += 1
        num_valid = self._geometry.window_frames if self._is_padded else len(window_WF)
        return WindowFrames(num_valid, len(window_WF))


class _FeatureSession:
    """Steps feature streams through an engine's store, model and decoder."""

    def __init__(self, engine: Engine, feats: Sequence[FloatArray], *, official_end: bool) -> None:
        parts = engine.parts
        self._store, self._geometry = parts.store, parts.geometry
        self._runner = EncoderRunner(
            parts.model,
            parts.store,
            window_shape=(
                len(feats), parts.geometry.window_frames, parts.geometry.frames.num_bins,
            ),
        )  # fmt: skip
        options = parts.admission.defaults
        self.streams = [
            _FeatureStream(
                parts.store.open(options), array, parts.geometry, official_end=official_end
            )
            for array in feats
        ]

    def step(self, streams: Sequence[_FeatureStream]) -> None:
        if not streams:
            return
        windows = self._runner.next_staging()[FLOAT32][: len(streams)]
        popped = [one.pop_window(row) for one, row in zip(streams, windows, strict=True)]
        rows = StepRows(
            np.array([stream.slot for stream in streams]),
            np.array([self._geometry.num_encoder_frames(one.num_valid) for one in popped]),
            np.array([one.num_real for one in popped]),
        )
        self._store.prepare(rows.slots_B)
        output = self._runner.forward(StepBatch(rows, windows))
        logits_BTV = output.heads.get("ctc")
        if logits_BTV is not None:
            log_probs_BTV = logits_BTV.float().log_softmax(dim=-1).cpu().numpy()
            for row, stream in enumerate(streams):
                stream.log_probs_TV.append(log_probs_BTV[row, : rows.num_frames_B[row]])
        self._store.commit(rows, output)()

    def decoded(self) -> list[DecodedFeatures]:
        found = self._store.decoders.best([stream.slot for stream in self.streams])
        return [
            DecodedFeatures(
                np.concatenate(stream.log_probs_TV) if stream.log_probs_TV else None, hypothesis
            )
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
