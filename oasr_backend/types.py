"""What the layers hand to each other. Torch-free, frozen, built whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

#: A Triton correlation id. The integer 42 and the string "42" are two streams.
StreamId = Union[int, str]


@dataclass(frozen=True)
class Hypothesis:
    """One decoded token sequence. `times` are the encoder frames at which the tokens appear."""

    tokens: tuple[int, ...]
    score: float
    times: tuple[int, ...] = field(default=())
