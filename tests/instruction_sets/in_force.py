"""Compares the instructions that a child's libraries report with the child's environment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.instruction_sets.environments import LEVELS, Environment, Level

_SPOKEN = {
    "mkl": re.compile(r"^MKL_VERBOSE oneMKL .* 64 architecture (.*?),? Lnx", re.MULTILINE),
    "onednn": re.compile(r"^onednn_verbose,v1,info,cpu,isa:(.*)$", re.MULTILINE),
}
#: PyTorch, MKL and oneDNN use these names; a set that is not named here is older.
_NEWEST_FIRST: tuple[tuple[str, Level], ...] = (
    (r"AVX-?512|AVX ?10", "avx512"),
    (r"AVX ?2", "avx2"),
)


@dataclass(frozen=True)
class Witness:
    """`levels` by library; a library that reported none is missing."""

    levels: Mapping[str, Level]
    num_threads: int
    documents: list[dict[str, Any]]

    @classmethod
    def from_output(cls, output: str) -> Witness:
        """Reads what tests.instruction_sets.witness wrote."""
        found = json.loads(output.rstrip().rsplit("\n", 1)[-1])
        levels = {"aten": level_of(found["aten"])}
        for library, pattern in _SPOKEN.items():
            if spoken := pattern.search(output):
                levels[library] = level_of(spoken[1])
        return cls(levels, found["threads"], found["documents"])

    def contradictions(self, environment: Environment) -> Iterator[str]:
        """The limits that had no effect."""
        for library, limit in environment.limits.items():
            level = self.levels.get(library)
            if level is None:
                yield f"{library} did not say what it runs on"
            elif limit is not None and LEVELS.index(level) > LEVELS.index(limit):
                yield f"{library} runs on {level}, beyond its limit {limit}"
        if self.levels["aten"] != environment.aten:
            yield f"aten runs on {self.levels['aten']}, not on {environment.aten}"
        if self.num_threads != environment.num_threads:
            yield f"{self.num_threads} threads, not {environment.num_threads}"

    def __str__(self) -> str:
        names = " ".join(f"{library}={level}" for library, level in self.levels.items())
        return f"{names} threads={self.num_threads}"


def level_of(spoken: str) -> Level:
    for pattern, level in _NEWEST_FIRST:
        if re.search(pattern, spoken):
            return level
    return "baseline"
