"""The shipped model, which also publishes what its process holds, to the byte.

Resident memory cannot show a small leak: the heap keeps what it was once given, and a leak fills
that first. Nor can the size of a region in /dev/shm, which grows in large steps.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import c_python_backend_utils as c_utils
import triton_python_backend_utils as pb_utils

from oasr_backend.triton_model import Periodic, TritonModel

_INTERVAL_S = 0.5


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


_PROBES = {
    "chaos_shm_free_bytes": _shm_free_bytes,
    "chaos_heap_bytes": _heap_bytes,
    "chaos_python_blocks": sys.getallocatedblocks,
}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = TritonModel(args)
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
        # Publishing takes shared memory itself, so all is read first.
        values = [read() for read in _PROBES.values()]
        for gauge, value in zip(self._gauges, values, strict=True):
            gauge.set(float(value))
