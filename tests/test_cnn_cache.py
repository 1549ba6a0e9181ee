"""CnnCacheManager: one convolution state, seen by stream or by slots."""

from __future__ import annotations

import pytest
import torch

from oasr_backend.cache import CacheConfig, CnnCacheManager
from oasr_backend.errors import StreamStateError, UnknownStreamError

CONFIG = CacheConfig(
    num_layers=2, hidden_dim=3, kernel_size=5, num_left_chunks=1, max_num_blocks=8,
    max_batch_size=4, dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip


def test_a_new_stream_has_zeros_of_the_historic_shape() -> None:
    manager = CnnCacheManager(CONFIG, extra_slots=1)
    manager.allocate_stream(1)
    assert manager.get_cache(1).shape == (2, 1, 4, 3)
    assert not manager.get_cache(1).any()
    assert manager.buffer is manager.buffer_of("conv")
    assert manager.buffer.shape == (2, 5, 4, 3)


def test_updates_overwrite_in_place_and_touch_no_neighbour() -> None:
    manager = CnnCacheManager(CONFIG)
    manager.allocate_stream(1)
    manager.allocate_stream(2)
    cache = manager.get_cache(1)
    for value in (1.0, 2.0):
        manager.update(1, torch.full((2, 1, 4, 3), value))
        assert (cache == value).all()
    assert not manager.get_cache(2).any()


def test_a_batch_is_stacked_on_the_second_axis() -> None:
    manager = CnnCacheManager(CONFIG)
    for stream_id in (1, 2):
        manager.allocate_stream(stream_id)
        manager.update(stream_id, torch.full((2, 1, 4, 3), float(stream_id)))
    batch = manager.views([manager.slot_of(2), manager.slot_of(1)])["conv"].gather()
    assert batch.shape == (2, 2, 4, 3)
    assert batch[0, :, 0, 0].tolist() == [2, 1]


def test_another_shape_is_refused_with_both() -> None:
    manager = CnnCacheManager(CONFIG)
    manager.allocate_stream(1)
    with pytest.raises(StreamStateError, match=r"expected \(2, 1, 4, 3\), got \(2, 1, 3, 3\)"):
        manager.update(1, torch.zeros(2, 1, 3, 3))


def test_unknown_streams_are_refused() -> None:
    manager = CnnCacheManager(CONFIG)
    with pytest.raises(UnknownStreamError):
        manager.get_cache(1)
    with pytest.raises(UnknownStreamError):
        manager.update(1, torch.zeros(2, 1, 4, 3))
