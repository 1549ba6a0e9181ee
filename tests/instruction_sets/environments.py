"""Environments that stand for other machines: which instructions the libraries may use, on how
many threads.

PyTorch's own kernels, MKL's matrix products and oneDNN's convolutions each choose by the processor,
and each obeys a variable of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Level = Literal["baseline", "avx2", "avx512"]
#: The sets stand from the oldest to the newest.
LEVELS: tuple[Level, ...] = ("baseline", "avx2", "avx512")

_ATEN: Mapping[Level, str] = {"baseline": "default", "avx2": "avx2", "avx512": "avx512"}
_ONEDNN: Mapping[Level, str] = {"baseline": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}


@dataclass(frozen=True)
class Environment:
    """`aten`, `mkl` and `onednn` are limits; None leaves the choice to the library.

    `mkl_reproducible` holds MKL to `mkl` by its reproducible branch, another set of kernels.
    """

    name: str
    num_threads: int
    aten: Level
    mkl: Level | None = None
    onednn: Level | None = None
    mkl_reproducible: bool = False

    @property
    def limits(self) -> Mapping[str, Level | None]:
        return {"aten": self.aten, "mkl": self.mkl, "onednn": self.onednn}

    def variables(self) -> dict[str, str]:
        """The limits as the variables that the libraries read."""
        found = {
            "ATEN_CPU_CAPABILITY": _ATEN[self.aten],
            "OMP_NUM_THREADS": str(self.num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            # MKL would take no more threads than there are cores, and PyTorch follows it.
            "MKL_DYNAMIC": "FALSE",
        }
        if self.onednn is not None:
            found["ONEDNN_MAX_CPU_ISA"] = _ONEDNN[self.onednn]
        if self.mkl == "baseline":
            found["MKL_CBWR"] = "COMPATIBLE"
        elif self.mkl is not None:
            name = "MKL_CBWR" if self.mkl_reproducible else "MKL_ENABLE_INSTRUCTIONS"
            found[name] = self.mkl.upper()
        return found

    def process_environment(self) -> dict[str, str]:
        """This process's variables, with these limits in place of any that it has itself."""
        ours = ("ATEN_", "MKL_", "ONEDNN_", "DNNL_", "OMP_")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        return {**inherited, **self.variables()}


ENVIRONMENTS = (
    Environment("baseline-1", 1, aten="baseline", mkl="baseline", onednn="baseline"),
    Environment("avx2-1", 1, aten="avx2", mkl="avx2", onednn="avx2"),
    Environment("avx2-4", 4, aten="avx2", mkl="avx2", onednn="avx2", mkl_reproducible=True),
    Environment("avx512-2", 2, aten="avx512", mkl="avx512", onednn="avx512"),
    # Old vector loops around the newest products and convolutions.
    Environment("mixed-4", 4, aten="baseline"),
)
