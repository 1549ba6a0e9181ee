"""What has room for every stream takes memory only for those that have come."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from oasr_backend.device import reserved_zeros

CPU = torch.device("cpu")
_MIB = 1 << 20
# Each in a process of its own, whose memory nothing else has touched. Prints MiB.
_MEASURE = """
import torch
from oasr_backend.cache import CacheConfig
from oasr_backend.cache.kv_store import KvStore
from oasr_backend.cache.state import SlotStates, StreamStateSpec

def resident_mib():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096 / 2**20

def kv_store():
    config = CacheConfig(
        num_layers=8, n_kv_head=4, head_dim=64, chunk_size=16, num_left_chunks=1,
        block_size_frames=16, max_num_blocks=512, max_blocks_per_seq=4, max_batch_size=128,
        device=torch.device("cpu"), dtype=torch.float32,
    )
    return KvStore(config, pad_lanes=1)

def states():
    return SlotStates([StreamStateSpec("conv", shape=(4, 1024))], 8192, torch.device("cpu"))

def at_work(store):
    import numpy as np
    rows = np.arange(4)
    for _ in range(150):
        store.prepare(rows)
        for cache in store.views(torch.arange(4), num_new_W=None, history_frames=0):
            cache.write(*torch.ones(2, 4, 16, 4, 64))
        store.commit(rows, np.full(4, 16))
    return store

torch.zeros(1).index_fill_(0, torch.zeros(1, dtype=torch.long), 1)
before = resident_mib()
"""


def _grown_mib(statement: str) -> float:
    script = f"{_MEASURE}\nmade = {statement}\nprint(resident_mib() - before)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return float(done.stdout)


@pytest.mark.parametrize("statement", ["kv_store()", "states()"])
def test_a_buffer_of_128_mib_takes_next_to_nothing_when_new(statement: str) -> None:
    assert _grown_mib(statement) < 16


def test_150_chunks_of_four_streams_touch_no_more_blocks_than_they_hold() -> None:
    """12 blocks of 256 KiB; the oldest-freed of all would take each of the 512."""
    assert _grown_mib("at_work(kv_store())") < 48


def test_reserved_memory_is_zero_writable_and_as_long_lived_as_its_tensor() -> None:
    buffer = reserved_zeros((2, 3, _MIB), dtype=torch.bfloat16, device=CPU)
    assert buffer.shape == (2, 3, _MIB)
    assert not buffer.any()
    view = buffer[1, 2]
    view.fill_(7)
    del buffer
    assert (view == 7).all()


@pytest.mark.parametrize("shape", [(0, 4), (3,), ()])
def test_any_shape_can_be_reserved(shape: tuple[int, ...]) -> None:
    assert torch.equal(reserved_zeros(shape, dtype=torch.float32, device=CPU), torch.zeros(shape))
