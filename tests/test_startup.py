"""Where the time of a start went, and what the start gives back."""

from __future__ import annotations

import re
import subprocess
import sys

from oasr_backend.triton_backend.startup import _code_regions

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
_RUNS_AGAIN = """
import re
import torch
from oasr_backend.triton_backend.startup import settle_memory

def code_mib():
    text = open("/proc/self/smaps").read()
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    code = [part for part in parts if "libtorch_cpu" in part and " r-xp " in part]
    return sum(int(re.search(r"Rss: +(\\d+)", part)[1]) for part in code) / 1024

values = torch.linspace(0, 1, 1000).view(10, 100)
expected, before = values @ values.T, code_mib()
settle_memory()
print(before, code_mib(), torch.equal(values @ values.T, expected))
"""
_SMAPS_TEXT = """\
7f0000000000-7f0000200000 r-xp 00001000 fe:00 123   /usr/lib/lib code (deleted).so
Size:               2048 kB
Rss:                1024 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f0000400000-7f0000500000 r-xp 00000000 fe:00 124   /usr/lib/patched.so
Anonymous:             4 kB
7f0000600000-7f0000700000 r--p 00000000 fe:00 123   /usr/lib/data.so
Anonymous:             0 kB
7f0000800000-7f0000900000 r-xp 00000000 00:00 0
Anonymous:             0 kB
7f0000a00000-7f0000b00000 rwxp 00000000 fe:00 125   /usr/lib/written.so
Anonymous:             0 kB
7f0000c00000-7f0000c01000 r-xp 00000000 fe:00 126   /usr/lib/small.so
Anonymous:             0 kB
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
Anonymous:             0 kB
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


def test_code_that_only_the_start_ran_leaves_the_process_and_runs_again() -> None:
    before_mib, after_mib, is_same = _printed(_RUNS_AGAIN).split()
    assert float(before_mib) > 20
    assert float(after_mib) < float(before_mib) / 4
    assert is_same == "True"


def test_only_the_unchanged_code_of_files_is_taken_off() -> None:
    assert list(_code_regions(_SMAPS_TEXT)) == [(0x7F0000000000, 2 << 20), (0x7F0000C00000, 4096)]


def test_a_model_imports_nothing_that_only_other_servers_need() -> None:
    imported = set(_printed(_IMPORTS_ALL).split())
    assert "oasr_backend.streaming.engine" in imported
    assert not imported & set(_NEVER_NEEDED)
