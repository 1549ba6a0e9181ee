"""StreamContext: one handle, every part or none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from oasr_backend.cache import (
    AttentionCacheManager,
    BlockPool,
    CacheConfig,
    CnnCacheManager,
    SlotStateCache,
    StreamContext,
    StreamStateSpec,
)
from oasr_backend.errors import StreamNotPreparedError, StreamStateError, UnknownStreamError
from oasr_backend.types import StreamId

CONFIG = CacheConfig(
    num_layers=2, n_kv_head=1, head_dim=2, hidden_dim=3, kernel_size=3, chunk_size=4,
    block_size_frames=4, num_left_chunks=1, max_num_blocks=8, max_batch_size=4,
    dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip


@dataclass
class Decoders:
    """What a decoder manager owes a context, with a record of what was asked."""

    open_ids: set[StreamId] = field(default_factory=set)

    def get_decoder(self, stream_id: StreamId) -> str:
        return f"decoder of {stream_id}"

    def free_stream(self, stream_id: StreamId) -> None:
        self.open_ids.remove(stream_id)


@dataclass
class Parts:
    attention: AttentionCacheManager
    convolution: CnnCacheManager
    states: SlotStateCache
    decoders: Decoders

    def open(self, stream_id: StreamId) -> StreamContext[str]:
        for manager in (self.attention, self.convolution, self.states):
            manager.allocate_stream(stream_id)
        self.decoders.open_ids.add(stream_id)
        return StreamContext(
            stream_id, self.attention, self.convolution, self.decoders, states=self.states
        )


@pytest.fixture
def parts() -> Parts:
    specs = (StreamStateSpec("heard", (1,)), StreamStateSpec("prompt", (1,), persistent=True))
    return Parts(
        AttentionCacheManager(BlockPool(CONFIG), CONFIG),
        CnnCacheManager(CONFIG),
        SlotStateCache(specs, 4, CONFIG.device),
        Decoders(),
    )


def test_the_handle_reaches_every_part(parts: Parts) -> None:
    context = parts.open("a")
    context.prepare_chunk()
    assert len(context.get_att_caches()) == 2
    assert context.get_cnn_cache().shape == (2, 1, 2, 3)
    assert context.get_paged_state_views()[0].shape == (1, 512)
    assert context.get_decoder() == "decoder of a"
    context.commit_chunk_paged(4, torch.ones(2, 1, 2, 3))
    assert context.get_cnn_cache().all()
    assert parts.attention.cached_frames(["a"]) == 4


def test_a_paged_commit_may_come_without_a_convolution_cache(parts: Parts) -> None:
    context = parts.open("a")
    context.prepare_chunk()
    context.commit_chunk_paged(4)
    assert parts.attention.cached_frames(["a"]) == 4


def test_a_refused_commit_changes_neither_cache(parts: Parts) -> None:
    context = parts.open("a")
    good, bad = torch.ones(2, 1, 2, 3), torch.ones(2, 1, 3, 3)
    with pytest.raises(StreamNotPreparedError):
        context.commit_chunk_paged(4, good)
    context.prepare_chunk()
    with pytest.raises(StreamStateError):
        context.commit_chunk_paged(5, good)
    with pytest.raises(StreamStateError):
        context.commit_chunk_paged(4, bad)
    with pytest.raises(StreamStateError):
        context.commit_chunk(torch.zeros(2, 1, 4, 4), bad)
    with pytest.raises(StreamStateError):
        context.commit_chunk(torch.zeros(2, 1, 5, 4), good)
    assert parts.attention.cached_frames(["a"]) == 0
    assert not context.get_cnn_cache().any()


def test_reset_rewinds_what_was_heard_and_keeps_the_request(parts: Parts) -> None:
    context = parts.open("a")
    slot = parts.states.slot_of("a")
    parts.states.fill_slot("heard", slot, 1)
    parts.states.fill_slot("prompt", slot, 2)
    context.prepare_chunk()
    context.commit_chunk_paged(3, torch.ones(2, 1, 2, 3))
    context.reset()
    parts.attention.check_integrity()
    assert context.get_att_cache().shape == (0, 0, 0, 0)
    assert not context.get_cnn_cache().any()
    assert not parts.states.get_state("heard", "a").any()
    assert parts.states.get_state("prompt", "a").item() == 2
    context.prepare_chunk()


def test_freeing_releases_every_part_and_twice_is_harmless(parts: Parts) -> None:
    context = parts.open("a")
    context.free()
    again = parts.open("a")
    context.free()
    again.prepare_chunk()
    again.free()
    assert not parts.decoders.open_ids
    assert parts.attention.pool.num_free_blocks == 8


def test_a_failing_part_does_not_keep_the_others(parts: Parts) -> None:
    context = parts.open("a")
    parts.convolution.free_stream("a")
    with pytest.raises(UnknownStreamError, match="convolution"):
        context.free()
    assert not parts.decoders.open_ids
    parts.attention.check_integrity()
    parts.open("a").free()


def test_a_freed_handle_never_touches_the_ids_next_stream(parts: Parts) -> None:
    context = parts.open("a")
    context.free()
    parts.open("a")
    calls: list[Any] = [
        context.prepare_chunk, context.get_att_caches, context.get_att_cache,
        context.get_cnn_cache, context.get_paged_state_views, context.get_decoder, context.reset,
        lambda: context.commit_chunk_paged(4),
        lambda: context.commit_chunk(torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 2, 3)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UnknownStreamError, match="freed"):
            call()


def test_a_context_without_a_decoder_says_so(parts: Parts) -> None:
    parts.attention.allocate_stream("a")
    parts.convolution.allocate_stream("a")
    context: StreamContext[str] = StreamContext("a", parts.attention, parts.convolution)
    with pytest.raises(UnknownStreamError, match="without a decoder"):
        context.get_decoder()
    context.free()
