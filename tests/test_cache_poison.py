"""A NaN left in recycled memory reaches no stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oasr_backend.cache import AttentionCacheManager, BlockPool, CacheConfig, CnnCacheManager
from oasr_backend.types import StreamId
from tests.reference.poison import NAN, PoisonedPool, UnzeroedPool
from tests.reference.stand_in_model import StandInModel


class PoisonedCnn(CnnCacheManager):
    def free_stream(self, stream_id: StreamId) -> None:
        slot = self.slot_of(stream_id)
        super().free_stream(stream_id)
        self.buffer[:, slot] = NAN


def make_config(**changes: Any) -> CacheConfig:
    fields: dict[str, Any] = {
        "num_layers": 2, "n_kv_head": 2, "head_dim": 3, "hidden_dim": 5, "kernel_size": 3,
        "chunk_size": 4, "num_left_chunks": 2, "block_size_frames": 6, "max_num_blocks": 12,
        "max_blocks_per_seq": 8, "max_batch_size": 3, "device": torch.device("cpu"),
        "dtype": torch.float64,
    }  # fmt: skip
    return CacheConfig(**{**fields, **changes})


def run(pool: BlockPool, cnn: CnnCacheManager) -> list[Tensor]:
    """Streams come and go, chunks are ragged, lanes pad the batch; all outputs in order."""
    config = pool.config
    manager, model = AttentionCacheManager(pool, config, pad_lanes=1), StandInModel(config)
    generator, outputs = torch.Generator().manual_seed(1), []
    lifetimes = {sid: (start, start + 3 + sid % 4) for sid, start in enumerate(range(0, 24, 2))}
    for tick in range(30):
        for sid, (start, end) in lifetimes.items():
            if tick == start:
                cnn.allocate_stream(sid, manager.allocate_stream(sid))
            if tick == end:
                manager.free_stream(sid)
                cnn.free_stream(sid)
            if tick == start + 2 and sid % 3 == 0:
                manager.reset_stream(sid)
                cnn.reset_stream(sid)
        live = [sid for sid, (start, end) in lifetimes.items() if start <= tick < end]
        if not live:
            continue
        counts = [1 + sid % 4 if tick == lifetimes[sid][1] - 1 else 4 for sid in live]
        manager.prepare_chunks_batched(live)
        slots = [*(manager.slot_of(sid) for sid in live), *manager.pad_slots]
        caches, _, _ = manager.get_batched_paged_caches(
            slots, chunk_frames=4, num_new_B=torch.tensor([*counts, 4])
        )
        view = cnn.views(slots)["conv"]
        xs = torch.randn(len(slots), 4, 5, generator=generator, dtype=torch.float64)
        for row, count in enumerate(counts):
            xs[row, count:] = 0
        xs[-1] = 0
        history = max(manager.cached_frames(live), config.prefilled_cache_frames)
        log_probs, new_cnn = model.forward_chunk_paged(
            xs, torch.tensor([*manager.position_offsets(live), 0]), caches, view.gather(),
            cache_t1=history,
        )  # fmt: skip
        view.scatter(new_cnn)
        manager.commit_chunks_paged_batched(live, counts)
        manager.check_integrity()
        outputs += [log_probs[row, :count] for row, count in enumerate(counts)]
    return outputs


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (PoisonedPool, {}),
        (PoisonedPool, {"prefill_kv_window": True}),
        (PoisonedPool, {"block_size_frames": 4}),
        (PoisonedPool, {"num_left_chunks": -1, "window_frames": 7}),
        (PoisonedPool, {"num_left_chunks": -1, "window_frames": 7, "prefill_kv_window": True}),
        (PoisonedPool, {"num_left_chunks": -1, "max_num_blocks": 24}),
        (UnzeroedPool, {}),
        (UnzeroedPool, {"block_size_frames": 4}),
        (UnzeroedPool, {"num_left_chunks": -1, "window_frames": 7}),
        (UnzeroedPool, {"num_left_chunks": -1, "max_num_blocks": 24}),
    ],
)
def test_poisoned_memory_changes_no_bit_of_any_output(
    kind: type[BlockPool], changes: dict[str, Any]
) -> None:
    config = make_config(**changes)
    clean = run(BlockPool(config, 1), CnnCacheManager(config, extra_slots=1))
    poisoned = run(kind(config, 1), PoisonedCnn(config, extra_slots=1))
    assert len(clean) == len(poisoned)
    for before, after in zip(clean, poisoned, strict=True):
        assert after.isfinite().all()
        assert torch.equal(before, after)


def test_a_block_is_zero_when_it_is_handed_out() -> None:
    config = make_config()
    pool = PoisonedPool(config)
    manager = AttentionCacheManager(pool, config)
    manager.allocate_stream(0)
    manager.prepare_chunk(0)
    held = int(manager.get_paged_state_views(0)[0][0, 0])
    for k_or_v in pool.get_kv_block_view(1, held):
        assert not k_or_v.any()
