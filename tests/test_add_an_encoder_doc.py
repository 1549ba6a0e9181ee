"""The real engine serves the encoder of docs/add_an_encoder.md."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from oasr_backend.cache import BlockPool, SlotStates
from oasr_backend.config import ServingConfig
from oasr_backend.streaming.assemble import assemble
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import Samples
from tests.conftest import ROOT
from tests.doc_blocks import python_blocks, run_document
from tests.engine_helpers import ask, ask_one, chunk, noise

DOCUMENT = ROOT / "docs" / "add_an_encoder.md"


def toy_engine(**settings: Any) -> Engine:
    document = run_document(DOCUMENT.name)
    config = ServingConfig.of(**{"max_streams": 4, **settings})
    return assemble(document["toy_checkpoint"](), config, device=torch.device("cpu"))


@functools.cache
def shared_engine() -> Engine:
    return toy_engine()


def text_of(engine: Engine, samples_S: Samples, *, piece: int) -> str:
    """One stream alone, `piece` samples a request."""
    starts = range(0, samples_S.size, piece)
    for start in starts:
        flags = ("S" if start == 0 else "") + ("E" if start == starts[-1] else "")
        result = ask_one(engine, "alone", samples_S[start : start + piece], flags=flags)
        assert result.error is None
    return result.text


def whole_text(samples_S: Samples) -> str:
    return text_of(shared_engine(), samples_S, piece=samples_S.size)


def test_the_toy_encoder_is_as_short_as_the_document_says() -> None:
    encoder, _ = python_blocks(DOCUMENT)
    body = encoder[encoder.index("class ToyEncoder") :].strip().splitlines()
    assert len([line for line in body if line.strip()]) <= 42


def test_different_audio_gives_different_text() -> None:
    texts = {whole_text(noise(seed, seconds=3.0)) for seed in range(4)}
    assert len(texts) == 4
    assert min(map(len, texts)) > 3


@pytest.mark.parametrize("piece", [1_000, 5_120, 7_777])
def test_any_cut_of_the_audio_gives_the_same_text(piece: int) -> None:
    samples_S = noise(1, seconds=4.3)
    assert text_of(shared_engine(), samples_S, piece=piece) == whole_text(samples_S)


def test_a_stream_in_a_batch_gives_the_text_that_it_gives_alone() -> None:
    """Streams of unequal length that begin at different times."""
    engine = shared_engine()
    audio = [noise(seed, seconds=seconds) for seed, seconds in ((2, 2.0), (3, 3.7), (4, 5.1))]
    ask(engine, chunk(0, audio[0][:9_000], flags="S"))
    ask(engine, chunk(0, audio[0][9_000:20_000]), chunk(1, audio[1][:20_000], flags="S"))
    results = ask(
        engine,
        chunk(0, audio[0][20_000:], flags="E"),
        chunk(1, audio[1][20_000:], flags="E"),
        chunk(2, audio[2], flags="SE"),
    )
    assert [result.text for result in results] == [whole_text(samples_S) for samples_S in audio]


def test_a_short_last_chunk_is_heard_and_ends_cleanly() -> None:
    """Without silence behind the end, the last window is only partly real."""
    engine = toy_engine(tail_padding=False)
    samples_S = noise(5, seconds=2.0)
    texts = [text_of(engine, samples_S[:size], piece=size) for size in (31_000, 31_640, 32_000)]
    assert texts[2].startswith(texts[0][:-1])
    assert engine.store.kv.pool.num_free_blocks == engine.store.kv.pool.num_blocks


def test_values_of_freed_streams_reach_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def poison_blocks(pool: BlockPool, block_ids: list[int]) -> None:
        for block_id in block_ids:
            for part in pool.get_kv_block_view(0, block_id):
                part.fill_(math.nan)

    def poison_slot(states: SlotStates, slot: int) -> None:
        for name in states.specs:
            states.fill_slot(name, slot, math.nan)

    monkeypatch.setattr(BlockPool, "_before_reuse", poison_blocks)
    monkeypatch.setattr(SlotStates, "_before_reuse", poison_slot)
    engine = toy_engine(max_streams=1)
    for seed in range(3):
        samples_S = noise(seed, seconds=5.0)
        assert text_of(engine, samples_S, piece=samples_S.size) == whole_text(samples_S)


def test_positions_stay_in_the_table_and_blocks_are_constant_for_a_minute() -> None:
    engine = toy_engine(position_limit_frames=100)
    pool = engine.store.kv.pool
    held = []
    for index in range(60):
        result = ask_one(engine, "long", noise(index, seconds=1.0), flags="S" if not index else "")
        assert result.error is None
        held.append(pool.num_blocks - pool.num_free_blocks)
        (stream,) = engine.streams
        (position,) = engine.store.kv.position_offsets(np.array([stream.slot]))
        assert position <= 100
    assert set(held[10:]) == {4}
    assert np.isfinite(engine.store.states.buffer_of("conv").numpy()).all()
