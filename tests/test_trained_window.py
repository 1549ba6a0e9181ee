"""A trained window is honoured to the frame: what a chunk sees, and what that takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oasr_backend.cache import CacheConfig, KvStore, derive_max_num_blocks
from oasr_backend.errors import ConfigError
from tests.reference.poison import PoisonedPool

NUM_STREAMS = 2
#: Lengths in frames: chunk, block, window.
Geometry = tuple[int, int, int]


def make_config(chunk: int, block: int, window: int, **changes: Any) -> CacheConfig:
    fields: dict[str, Any] = {
        "num_layers": 1, "n_kv_head": 1, "head_dim": 1, "hidden_dim": 1, "kernel_size": 2,
        "chunk_size": chunk, "block_size_frames": block, "window_frames": window,
        "max_num_blocks": None, "max_batch_size": NUM_STREAMS, "dtype": torch.float64,
        "device": torch.device("cpu"), "position_limit_frames": window + 4 * chunk,
    }  # fmt: skip
    return CacheConfig(**{**fields, **changes})


def sized_to_the_peak(config: CacheConfig) -> CacheConfig:
    assert config.peak_blocks is not None
    return replace(
        config,
        max_num_blocks=NUM_STREAMS * config.peak_blocks,
        max_blocks_per_seq=config.peak_blocks,
    )


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    chunk = draw(st.integers(1, 8))
    return chunk, draw(st.integers(chunk, 3 * chunk)), draw(st.integers(0, 5 * chunk))


def seen_by_chunk(
    heard: list[float], chunk: int, window: int, *, prefilled: int
) -> list[list[float]]:
    """Of each chunk behind the prefilled frames: all frames that its queries may see."""
    return [
        [heard[frame] for frame in range(len(heard)) if start - window <= frame < start + chunk]
        for start in range(prefilled, len(heard), chunk)
    ]


@settings(max_examples=80)
@given(geometry=geometries(), prefill=st.booleans())
@example(geometry=(16, 16, 70), prefill=False)
@example(geometry=(16, 16, 70), prefill=True)
@example(geometry=(14, 14, 70), prefill=True)
@example(geometry=(7, 16, 70), prefill=True)
@example(geometry=(16, 24, 70), prefill=False)
def test_a_chunk_sees_exactly_the_window_and_itself(geometry: Geometry, prefill: bool) -> None:
    """Two streams, one chunk apart, on a pool of exactly their peaks that is NaN where freed."""
    chunk, block, window = geometry
    config = sized_to_the_peak(make_config(chunk, block, window, prefill_kv_window=prefill))
    peak = config.peak_blocks
    assert peak is not None
    store = KvStore(config, pad_lanes=1, pool=PoisonedPool(config, scratch_blocks=peak))
    num_chunks = window // chunk + block + 3
    heard: dict[int, list[float]] = {slot: [0.0] * window * prefill for slot in range(NUM_STREAMS)}
    seen: dict[int, list[list[float]]] = {slot: [] for slot in heard}
    most_held: Counter[int] = Counter()
    for slot in heard:
        store.open(slot)
    for step in range(num_chunks):
        slots = list(heard) if step else [0]
        slots_B = np.array(slots)
        store.prepare(slots_B)
        rows_W = torch.tensor([*slots, store.pad_slot])
        history = store.history_frames(slots_B)
        assert history == window or not prefill
        (cache,) = store.views(rows_W, num_new_W=None, history_frames=history)
        first = 1.0 + step * chunk
        frames_WT = torch.arange(first, first + chunk, dtype=torch.float64).repeat(len(rows_W), 1)
        cache.write(frames_WT[..., None, None], frames_WT[..., None, None])
        k_WKHD, _ = cache.gather()
        assert k_WKHD[: len(slots)].isfinite().all()
        for row, slot in enumerate(slots):
            heard[slot] += frames_WT[row].tolist()
            seen[slot].append(k_WKHD[row, cache.layout.valid_BK[row]].flatten().tolist())
            most_held[slot] = max(most_held[slot], len(store.blocks_of(slot)))
        store.check_integrity(list(heard))
        store.commit(slots_B, np.full(len(slots), chunk))
        store.check_integrity(list(heard))
        positions = store.position_offsets(slots_B)
        assert (store.first_key_positions(slots_B) >= 0).all()
        assert (positions <= config.position_limit_frames).all()
    for slot, frames in heard.items():
        prefilled = config.prefilled_cache_frames
        assert seen[slot] == seen_by_chunk(frames, chunk, window, prefilled=prefilled)
    assert most_held[0] == peak, "the peak is what a stream comes to hold, and no more"


def test_seventy_frames_with_chunk_sixteen_are_seventy() -> None:
    config = make_config(16, 16, 70, prefill_kv_window=True)
    assert (config.evicts, config.max_cache_frames, config.prefilled_cache_frames) == (True, 70, 70)
    assert (config.max_logical_blocks, config.peak_blocks) == (5, 6)
    assert derive_max_num_blocks(config, budget_bytes=1 << 30) == 6 * NUM_STREAMS


@pytest.mark.parametrize(
    ("chunk", "block", "window", "prefill", "peak"),
    [(16, 16, 70, False, 6), (16, 16, 70, True, 6), (16, 16, 65, False, 6), (16, 16, 64, False, 5),
     (16, 16, 75, False, 6), (16, 16, 75, True, 6), (16, 16, 81, False, 7), (14, 14, 70, True, 6),
     (4, 8, 6, False, 2), (4, 8, 5, False, 2), (4, 8, 0, False, 1)],
)  # fmt: skip
def test_the_peak_is_counted_in_frames(
    chunk: int, block: int, window: int, prefill: bool, peak: int
) -> None:
    assert make_config(chunk, block, window, prefill_kv_window=prefill).peak_blocks == peak


def test_a_window_of_whole_chunks_takes_what_left_chunks_take() -> None:
    for chunk, block, left in ((16, 16, 4), (4, 6, 2), (5, 8, 9)):
        window = make_config(chunk, block, left * chunk)
        chunks = make_config(chunk, block, left * chunk, window_frames=None, num_left_chunks=left)
        assert window.peak_blocks == chunks.peak_blocks
        assert window.max_cache_frames == chunks.max_cache_frames


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_left_chunks": 5}, "window_frames=70 and num_left_chunks=5 both bound"),
        ({"window_frames": -1}, "window_frames=-1 must be 0 or more"),
        ({"position_limit_frames": 85}, r"position_limit_frames=85 .* 70 trained \+ 16 = 86"),
        ({"max_blocks_per_seq": 5}, r"6 blocks that ceil\(\(0 evicted \+ 70 trained \+ 16"),
        ({"max_num_blocks": 11}, r"11 < 12 = max_batch_size 2 \* 6 blocks a stream"),
    ],
)
def test_an_impossible_window_is_refused_with_its_numbers(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_config(16, 16, 70, **changes)
    if "num_left_chunks" not in changes:
        assert "num_left_chunks" not in str(caught.value), "a trained window is no setting"


def test_too_little_memory_for_a_window_names_no_setting_that_cannot_help() -> None:
    with pytest.raises(ConfigError, match="lower max_batch_size, or grant more memory"):
        derive_max_num_blocks(make_config(16, 16, 70), budget_bytes=1)
