"""The usage that the design document shows (sections 7.1, 7.2, 7.3 and 11), as written there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from oasr_backend.cache import (
    AttentionCacheManager,
    BlockPool,
    CacheConfig,
    CnnCacheManager,
    CtcStateCacheManager,
    PagedKVCache,
    StreamContext,
    StreamHandle,
)
from oasr_backend.decoders import GpuDecoderConfig
from tests.reference.stand_in_model import StandInModel
from tests.rounding import FLOAT64_NETWORK

Context = StreamContext[StreamHandle]
VOCAB = 7


@dataclass
class Parts:
    cfg: CacheConfig
    pool: BlockPool
    att_mgr: AttentionCacheManager
    cnn_mgr: CnnCacheManager
    ctc_mgr: CtcStateCacheManager
    model: StandInModel

    def open(self, sid: int) -> Context:
        self.att_mgr.allocate_stream(sid)
        self.cnn_mgr.allocate_stream(sid)
        self.ctc_mgr.allocate_stream(sid, batch=1, vocab_size=VOCAB)
        return StreamContext(sid, self.att_mgr, self.cnn_mgr, self.ctc_mgr)


@dataclass
class Request:
    stream_id: int
    stream_context: Context


def make_parts(**changes: Any) -> Parts:
    fields: dict[str, Any] = {
        "num_layers": 2, "n_kv_head": 2, "head_dim": 4, "hidden_dim": 8, "kernel_size": 5,
        "chunk_size": 4, "num_left_chunks": 2, "block_size_frames": 4, "max_num_blocks": 24,
        "max_blocks_per_seq": 8, "max_batch_size": 4, "dtype": torch.float64,
        "device": torch.device("cpu"),
    }  # fmt: skip
    cfg = CacheConfig(**{**fields, **changes})
    pool = BlockPool(cfg)
    return Parts(
        cfg, pool, AttentionCacheManager(pool, cfg), CnnCacheManager(cfg),
        CtcStateCacheManager(GpuDecoderConfig(beam_size=4)), StandInModel(cfg, vocab_size=VOCAB),
    )  # fmt: skip


def make_chunks(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 4, 8, generator=generator, dtype=torch.float64) for _ in range(count)]


def run_paged(parts: Parts, sid: int, audio_chunks: list[Tensor]) -> tuple[list[Tensor], Any]:
    att_mgr, model, offset, outputs = parts.att_mgr, parts.model, 0, []
    ctx = parts.open(sid)
    for chunk in audio_chunks:
        ctx.prepare_chunk()
        att_caches = ctx.get_att_caches()
        cnn_cache = ctx.get_cnn_cache()
        log_probs, new_cnn = model.forward_chunk_paged(
            chunk, offset, att_caches, cnn_cache, cache_t1=att_mgr.cached_frames([sid])
        )
        ctx.commit_chunk_paged(log_probs.size(1), new_cnn)
        att_mgr.check_integrity()
        ctx.get_decoder().decode_chunk(log_probs)
        offset += log_probs.size(1)
        outputs.append(log_probs)
    result = ctx.get_decoder().finalize_stream()
    ctx.free()
    return outputs, result


def run_dense(parts: Parts, sid: int, audio_chunks: list[Tensor]) -> tuple[list[Tensor], Any]:
    model, offset, outputs = parts.model, 0, []
    chunk_size, required_cache_size = parts.cfg.chunk_size, parts.cfg.max_cache_frames
    ctx = parts.open(sid)
    for chunk in audio_chunks:
        att_cache = ctx.get_att_cache()
        cnn_cache = ctx.get_cnn_cache()
        log_probs, new_att, new_cnn = model.forward_chunk(
            chunk, offset, required_cache_size, att_cache, cnn_cache
        )
        new_kv_chunk = new_att[:, :, -chunk_size:, :]
        ctx.commit_chunk(new_kv_chunk, new_cnn)
        parts.att_mgr.check_integrity()
        ctx.get_decoder().decode_chunk(log_probs)
        offset += log_probs.size(1)
        outputs.append(log_probs)
    result = ctx.get_decoder().finalize_stream()
    ctx.free()
    return outputs, result


def run_batched(parts: Parts, streams: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
    pool, cfg, att_mgr, model, offset = parts.pool, parts.cfg, parts.att_mgr, parts.model, 0
    group = [Request(sid, parts.open(sid)) for sid in streams]
    outputs: dict[int, list[Tensor]] = {sid: [] for sid in streams}
    for chunks in zip(*streams.values(), strict=True):
        xs_stacked = torch.cat(chunks)
        cnn_stacked = torch.cat([req.stream_context.get_cnn_cache() for req in group], dim=1)
        att_mgr.prepare_chunks_batched([req.stream_id for req in group])

        block_tables, cache_seqlens = [], []
        for req in group:
            bt, cs = req.stream_context.get_paged_state_views()
            block_tables.append(bt)
            cache_seqlens.append(cs)

        batched_bt = torch.cat(block_tables, dim=0)
        batched_cs = torch.cat(cache_seqlens, dim=0)

        batched_caches = [
            PagedKVCache(
                k_cache=pool.get_kv_view(l)[0],
                v_cache=pool.get_kv_view(l)[1],
                block_table=batched_bt,
                cache_seqlens=batched_cs,
                block_size=cfg.block_size_frames,
                host_seqlen=offset,
            )
            for l in range(cfg.num_layers)  # noqa: E741
        ]

        log_probs, new_cnn = model.forward_chunk_paged(
            xs_stacked,
            offset,
            batched_caches,
            cnn_stacked,
            cache_t1=att_mgr.cached_frames([req.stream_id for req in group]),
        )
        for row, req in enumerate(group):
            req.stream_context.commit_chunk_paged(log_probs.size(1), new_cnn[:, row : row + 1])
            outputs[req.stream_id].append(log_probs[row : row + 1])
        att_mgr.check_integrity()
        offset += log_probs.size(1)
    for req in group:
        req.stream_context.free()
    return outputs


@pytest.mark.numerics
@pytest.mark.parametrize("left", [-1, 0, 1, 3])
def test_paged_dense_and_batched_give_the_oracles_numbers(left: int) -> None:
    parts = make_parts(num_left_chunks=left, max_num_blocks=64)
    streams = {sid: make_chunks(7, seed=sid) for sid in (42, 43, 44)}
    batched = run_batched(parts, streams)
    for sid, chunks in streams.items():
        expected = torch.cat(parts.model.offline(chunks, left), dim=1)
        paged, _ = run_paged(parts, sid, chunks)
        dense, _ = run_dense(parts, sid, chunks)
        for outputs in (paged, dense, batched[sid]):
            torch.testing.assert_close(
                torch.cat(outputs, dim=1), expected, atol=FLOAT64_NETWORK, rtol=0
            )


@pytest.mark.parametrize("block", [5, 8, 13])
def test_paged_equals_dense_when_blocks_are_wider_than_chunks(block: int) -> None:
    parts = make_parts(block_size_frames=block, max_num_blocks=64)
    chunks = make_chunks(9)
    expected = torch.cat(parts.model.offline(chunks, 2), dim=1)
    for run in (run_paged, run_dense):
        outputs, _ = run(parts, 1, chunks)
        torch.testing.assert_close(
            torch.cat(outputs, dim=1), expected, atol=FLOAT64_NETWORK, rtol=0
        )


def test_paged_and_dense_decode_the_same_tokens() -> None:
    parts = make_parts()
    _, paged = run_paged(parts, 1, make_chunks(6))
    _, dense = run_dense(parts, 1, make_chunks(6))
    assert paged.tokens == dense.tokens


def test_a_finished_stream_leaves_everything_free() -> None:
    parts = make_parts()
    run_paged(parts, 1, make_chunks(6))
    assert parts.pool.num_free_blocks == parts.pool.num_blocks
    assert parts.ctc_mgr.num_streams == 0
    assert [parts.att_mgr.allocate_stream(sid) for sid in range(4)] == [1, 2, 3, 0]


def test_the_documents_own_configuration_is_accepted() -> None:
    cfg = CacheConfig(
        num_layers=12, n_kv_head=4, head_dim=64, hidden_dim=256, kernel_size=15, chunk_size=16,
        num_left_chunks=4, block_size_frames=16, max_num_blocks=2048,
    )  # fmt: skip
    assert cfg.blocks_per_stream == 5
    assert cfg.max_logical_blocks == 4
    assert cfg.max_stream_frames == 80
    assert cfg.cnn_cache_frames == 14
    assert cfg.kv_last_dim == 128
