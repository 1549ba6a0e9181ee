"""What a second pass asks of the model that weighs hypotheses, and what it hands to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Tokens = Sequence[int]
FloatArray = npt.NDArray[np.float64]


class Memory(NamedTuple):
    """What the encoder heard of each stream: zero, and not real, past a stream's own frames."""

    encoded_STD: Tensor
    is_real_ST: Tensor


class HypothesisScorer(Protocol):
    """Weighs whole hypotheses; an attention decoder, for one."""

    def __call__(self, nbests: Sequence[Sequence[Tokens]], memory: Memory) -> list[FloatArray]: ...


@dataclass(frozen=True)
class NoDecoder:
    """Why there is nothing to rescore with, as the end of a sentence that begins "rescoring:"."""

    reason: str = "the checkpoint has no attention decoder"
