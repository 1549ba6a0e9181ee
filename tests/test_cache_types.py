"""CacheConfig: derived counts, and the geometries that it refuses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from oasr_backend.cache import CacheConfig, StreamStateSpec
from oasr_backend.errors import ConfigError


def make_config(**changes: Any) -> CacheConfig:
    return CacheConfig(**{"device": torch.device("cpu"), "max_num_blocks": 2048, **changes})


def test_dense_and_convolution_sizes_follow_the_model() -> None:
    cfg = make_config(head_dim=64, kernel_size=15)
    assert (cfg.kv_last_dim, cfg.cnn_cache_frames) == (128, 14)


def test_an_equal_block_and_chunk_peak_at_the_left_chunks_and_the_current_one() -> None:
    for left in (0, 1, 4):
        cfg = make_config(num_left_chunks=left)
        assert cfg.blocks_per_stream == left + 1
        assert cfg.max_logical_blocks == left
        assert cfg.max_cache_frames == 16 * left


@pytest.mark.parametrize(
    ("chunk", "block", "left", "peak"),
    [(4, 8, 2, 2), (4, 8, 3, 3), (4, 6, 2, 3), (16, 64, 4, 2), (5, 8, 9, 8)],
)
def test_the_peak_counts_evicted_frames_that_share_the_first_block(
    chunk: int, block: int, left: int, peak: int
) -> None:
    cfg = make_config(chunk_size=chunk, block_size_frames=block, num_left_chunks=left)
    assert cfg.blocks_per_stream == peak
    assert cfg.max_stream_frames == peak * block


def test_unlimited_history_gets_a_fair_share_of_the_pool() -> None:
    cfg = make_config(num_left_chunks=-1, max_num_blocks=2048, max_batch_size=32)
    assert cfg.blocks_per_stream == 64
    assert cfg.max_stream_frames == 1024
    assert cfg.max_logical_blocks is None
    assert cfg.max_cache_frames == -1


def test_the_fair_share_stops_at_what_the_table_addresses() -> None:
    cfg = make_config(num_left_chunks=-1, max_blocks_per_seq=10)
    assert cfg.blocks_per_stream == 10


def test_unlimited_history_logs_its_ceiling(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_config(num_left_chunks=-1)
    assert "64 blocks * 16 = 1024 frames" in caplog.text


def test_bounded_history_logs_no_ceiling(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_config(num_left_chunks=4)
    assert caplog.text == ""


def test_a_prefilled_window_is_the_left_context() -> None:
    assert make_config(num_left_chunks=4, prefill_kv_window=True).prefilled_cache_frames == 64
    assert make_config(num_left_chunks=4).prefilled_cache_frames == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 17}, "chunk_size=17 > block_size_frames=16"),
        ({"num_left_chunks": 8, "max_blocks_per_seq": 8}, "max_blocks_per_seq=8 .* 9 blocks"),
        ({"num_left_chunks": 4, "max_num_blocks": 159}, r"159 < 160 = max_batch_size 32 \* 5"),
        ({"num_left_chunks": -1, "max_num_blocks": 31}, "no block for each of 32 streams"),
        ({"prefill_kv_window": True}, "bounded window"),
        ({"num_left_chunks": -2}, "num_left_chunks=-2"),
        ({"num_left_chunks": 4, "position_limit_frames": 79}, "position_limit_frames=79"),
        ({"max_num_blocks": 0}, "max_num_blocks=0"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"kernel_size": -1}, "kernel_size=-1"),
    ],
)
def test_an_impossible_geometry_is_refused_with_its_numbers(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


def test_a_pool_of_exactly_the_peaks_is_accepted() -> None:
    assert make_config(num_left_chunks=4, max_num_blocks=160).pool_blocks == 160


def test_an_unsized_config_tells_how_to_size_it() -> None:
    cfg = make_config(max_num_blocks=None, num_left_chunks=-1)
    with pytest.raises(ConfigError, match="derive_max_num_blocks"):
        _ = cfg.blocks_per_stream


def test_declared_states_are_part_of_the_config() -> None:
    spec = StreamStateSpec("subsample.0", (2, 80, 4))
    assert make_config(stream_states=(spec,)).stream_states == (spec,)
