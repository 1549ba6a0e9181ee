"""An engine in milliseconds, a clock that tests move, and faults in the real model.

The golden checkpoint has random weights: its text means nothing, but differs from audio to audio.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.errors import OasrError
from oasr_backend.options import ParameterValue, StreamOptions, read_parameters
from oasr_backend.streaming import batching
from oasr_backend.streaming.assemble import assemble
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk, ChunkResult, Samples, StreamId
from tests.conftest import GOLDEN_DIR

WINDOW_SAMPLES = 400 + 66 * 160
STRIDE_SAMPLES = 64 * 160
#: Where the parts of the model are that a fault may strike.
PARTS = {"filterbank": "frontend.filterbank", "ctc": "heads.ctc"}
#: A window's first sample that a test's fault knows its victim by.
MARK = 1.5


class ManualClock:
    """A clock in seconds that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def golden_engine(clock: Callable[[], float] | None = None, **settings: Any) -> Engine:
    settings = {"max_streams": 8, **settings}
    checkpoint = open_checkpoint(GOLDEN_DIR / "wenet_small").load()
    return assemble(
        checkpoint,
        ServingConfig.of(**settings),
        device=torch.device("cpu"),
        clock=clock or ManualClock(),
    )


@functools.cache
def _quiet_engine(**settings: Any) -> Engine:
    return golden_engine(**settings)


def noise(seed: int, *, seconds: float = 2.0) -> Samples:
    """Loud and quiet pieces, so that two seeds hardly give one text."""
    chance = np.random.default_rng(seed)
    samples_S = chance.standard_normal(round(seconds * 16000)) * 10 ** chance.uniform(-2.5, -1.0)
    return np.clip(samples_S, -1.0, 1.0).astype(np.float32)


def engine_that_runs_ahead(
    monkeypatch: pytest.MonkeyPatch, *, least_split_width: int, **settings: Any
) -> Engine:
    """A golden engine that goes about its parts as on a GPU, and splits steps of that width."""
    monkeypatch.setattr(batching, "LEAST_SPLIT_WIDTH", least_split_width)
    engine = golden_engine(**settings)
    engine.parts.runner.runs_ahead = True
    return engine


def marked(samples_S: Samples, *, window: int = 0) -> Samples:
    marked_S = samples_S.copy()
    marked_S[window * STRIDE_SAMPLES] = MARK
    return marked_S


def chunk(
    stream_id: StreamId,
    samples_S: Samples | None = None,
    *,
    flags: str = "",
    parameters: Mapping[str, ParameterValue] | None = None,
    defaults: StreamOptions = StreamOptions(),  # noqa: B008 - it is immutable
    **more: Any,
) -> AudioChunk:
    """`flags` holds "S" for START and "E" for END; `parameters` are read as on the wire."""
    try:
        asked = read_parameters(parameters or {}, is_first="S" in flags, defaults=defaults)
    except OasrError as error:
        return chunk(stream_id, flags=flags, fault=error, **more)
    return AudioChunk(
        stream_id=stream_id,
        samples_S=np.zeros(0, np.float32) if samples_S is None else samples_S,
        is_first="S" in flags,
        is_last="E" in flags,
        options=asked.options,
        chunk_seq=asked.chunk_seq,
        **more,
    )


def ask(engine: Engine, *chunks: AudioChunk) -> list[ChunkResult]:
    """Calls `process`, checks the caches, and checks that every request has an answer."""
    results = engine.process(chunks)
    assert len(results) == len(chunks)
    engine.check_integrity()
    return results


def ask_one(engine: Engine, stream_id: StreamId, *args: Any, **more: Any) -> ChunkResult:
    return ask(engine, chunk(stream_id, *args, defaults=engine.config.defaults, **more))[0]


def text_alone(samples_S: Samples, **settings: Any) -> str:
    """The final text of one utterance in an engine that serves no other stream."""
    result = ask_one(_quiet_engine(**settings), "alone", samples_S, flags="SE")
    assert result.error is None
    return result.text


def error_of(result: ChunkResult, *words: str) -> str:
    """The error's message, which must hold `words`."""
    assert result.error is not None, f"no error but the text {result.text!r}"
    message = str(result.error)
    for word in words:
        assert word in message
    return message


def assert_all_is_free(engine: Engine) -> None:
    engine.check_integrity()
    assert len(engine.streams) == 0
    assert engine.store.kv.pool.num_free_blocks == engine.store.kv.pool.num_blocks


@contextmanager
def fault_at(
    engine: Engine, part: str, fault: Callable[[torch.Tensor], Exception | None]
) -> Iterator[None]:
    """Lets a part of the real model raise what `fault` makes of its input.

    "filterbank" sees (B, S) samples at the step's beginning, "ctc" (B, T, D) at its end.
    """

    def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        error = fault(inputs[0])
        if error is not None:
            raise error

    handle = engine.parts.model.get_submodule(PARTS[part]).register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def on_mark(error: Exception, mark: float = MARK) -> Callable[[torch.Tensor], Exception | None]:
    """`error` for every step that holds a marked window."""
    return lambda samples_BS: error if bool((samples_BS[:, 0] == mark).any()) else None
