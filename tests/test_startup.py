"""Where the time of a start went, and what the start gives back."""

from __future__ import annotations

import re
import subprocess
import sys

_LIVES_TWO_STAGES = """
import time
from oasr_backend.triton_backend.startup import LoadTimes
time.sleep(0.2)
times = LoadTimes()
times.end("import")
time.sleep(0.1)
times.end("read")
print(times)
"""
_GIVES_BACK = """
import gc
from oasr_backend.triton_backend.startup import settle_memory

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

gc.disable()
# Small pieces, which the allocator keeps: the last one holds the end of the heap.
pieces = [bytearray(20_000) for _ in range(5_000)]
keeper, ring = pieces.pop(), []
ring.append(ring)
ring.append(pieces)
del pieces, ring
before = resident_mib()
settle_memory()
print(before - resident_mib(), gc.get_freeze_count() > 0, gc.isenabled())
"""
#: Packages that a stream on a CPU never needs, each dear to import, and our own parts for others.
_NEVER_NEEDED = (
    "triton", "sympy", "onnx", "onnxruntime", "torch._dynamo", "torch._inductor", "torch.onnx",
    "torch.utils.tensorboard", "typer", "rich", "pydantic", "pytriton", "tritonclient",
    "oasr_backend.serve", "oasr_backend.parity",
)  # fmt: skip
_IMPORTS_ALL = """
import sys
import oasr_backend.triton_backend.load
print(*sys.modules)
"""


def _printed(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_the_stages_of_a_start_begin_with_the_process_and_add_up() -> None:
    text = _printed(_LIVES_TWO_STAGES)
    match = re.fullmatch(r"import_s=(\d+\.\d\d) read_s=(\d+\.\d\d) total_s=(\d+\.\d\d)", text)
    assert match, text
    import_s, read_s, total_s = map(float, match.groups())
    assert import_s >= 0.2, "what came before the first line of the module counts"
    assert read_s >= 0.1
    assert abs(import_s + read_s - total_s) < 0.02


def test_what_a_start_left_over_goes_back_to_the_kernel() -> None:
    given_mib, is_frozen, is_enabled = _printed(_GIVES_BACK).split()
    assert float(given_mib) > 80, "of 95 MiB in a cycle that the collector must find"
    assert is_frozen == "True"
    assert is_enabled == "False", "whether it runs is its caller's matter"


def test_a_model_imports_nothing_that_only_other_servers_need() -> None:
    imported = set(_printed(_IMPORTS_ALL).split())
    assert "oasr_backend.streaming.engine" in imported
    assert not imported & set(_NEVER_NEEDED)
