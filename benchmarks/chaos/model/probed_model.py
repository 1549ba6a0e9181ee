"""The shipped model, which also publishes what its process holds, to the byte.

Resident memory cannot show a small leak: the heap keeps what it was once given, and a leak fills
that first. Nor can the size of a region in /dev/shm, which grows in large steps.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

import c_python_backend_utils as c_utils
import numpy as np
import triton_python_backend_utils as pb_utils

from oasr_backend.streaming.engine import Engine
from oasr_backend.triton_backend.periodic import Periodic
from oasr_backend.triton_backend.service import StreamingService
from oasr_backend.types import AudioChunk, Samples

_INTERVAL_S = 0.5
#: When set, the model takes steps of 1 to this many streams before it publishes anything.
_REACH_WIDTHS = "CHAOS_REACH_WIDTHS"
_HISTORY_STEPS = 6


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2, all arenas together."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _MallInfo


def _heap_bytes() -> int:
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _shm_free_bytes() -> int:
    # The stub sets it after it has read this file.
    return int(c_utils.shared_memory.free_memory())


def _reach_widths(engine: Engine, num_widths: int) -> None:
    """Takes one step of each width with streams of full history, as all others will have.

    The libraries below PyTorch keep what they prepare for a width: memory that is no leak.
    """
    ids = [f"width {number}" for number in range(1, num_widths + 1)]
    silence_S = np.zeros(engine.parts.geometry.window_samples, np.float32)
    stride_S = silence_S[: engine.parts.geometry.stride_samples]
    _speak(engine, ids, silence_S, is_first=True)
    for width in [num_widths] * _HISTORY_STEPS + list(range(1, num_widths + 1)):
        _speak(engine, ids[:width], stride_S)
    _speak(engine, ids, silence_S[:0], is_last=True)


def _speak(engine: Engine, ids: list[str], samples_S: Samples, **flags: bool) -> None:
    for result in engine.process([AudioChunk(one, samples_S, **flags) for one in ids]):
        if result.error is not None:
            raise result.error


_PROBES = {
    "chaos_probed_seconds": time.time,
    "chaos_shm_free_bytes": _shm_free_bytes,
    "chaos_heap_bytes": _heap_bytes,
    "chaos_python_blocks": sys.getallocatedblocks,
}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = StreamingService(args)
        _reach_widths(self._model._engine, int(os.environ.get(_REACH_WIDTHS, "0")))
        self._families = [
            pb_utils.MetricFamily(name=name, description=name, kind=pb_utils.MetricFamily.GAUGE)
            for name in _PROBES
        ]
        self._gauges = [family.Metric(labels={}) for family in self._families]
        self._publish()
        self._publishing = Periodic((self._publish,), interval_s=_INTERVAL_S)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self._model.execute(requests)

    def finalize(self) -> None:
        self._publishing.stop()
        self._model.close()

    def _publish(self) -> None:
        # Publishing takes shared memory itself, so all readings come first.
        values = [read() for read in _PROBES.values()]
        for gauge, value in zip(self._gauges, values, strict=True):
            gauge.set(float(value))
