"""Slots as numbers or as a tensor, which only the attention cache's calls by batch take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from oasr_backend.cache.kv_store import KvStore
from oasr_backend.cache.paged_kv import PagedRows
from oasr_backend.device import to_device

SlotIds = Sequence[int] | Tensor


def rows_of_slots(store: KvStore, slot_ids: SlotIds) -> PagedRows:
    """Fresh rows of the slots, in their order. A tensor of slots costs no upload."""
    if not isinstance(slot_ids, Tensor):
        slot_ids = to_device(np.asarray(slot_ids, dtype=np.int64), store.config.device)
    return store.tables.rows(slot_ids, store.config.block_size_frames)


def history_bound(store: KvStore, slot_ids: SlotIds) -> int:
    """The most visible frames that the host knows of the slots; of any stream for a tensor."""
    if not isinstance(slot_ids, Tensor):
        return store.history_frames(np.asarray(slot_ids, dtype=np.int64))
    if store.config.evicts:
        return store.config.max_cache_frames
    return store.history_frames(np.arange(store.config.max_batch_size))
