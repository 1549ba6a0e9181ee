"""What a second pass is asked for, what it asks of the model that weighs hypotheses, and none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from oasr_backend.decoders.arrays import IntArray
from oasr_backend.types import Hypothesis

Tokens = Sequence[int]
FloatArray = npt.NDArray[np.float64]
#: The hypotheses of streams by slot, best first.
NBests = Mapping[int, Sequence[Hypothesis]]


class Memory(NamedTuple):
    """What the encoder heard of each stream: zero, and not real, past a stream's own frames."""

    encoded_STD: Tensor
    is_real_ST: Tensor


class HypothesisScorer(Protocol):
    """Weighs whole hypotheses; an attention decoder, for one."""

    def __call__(self, nbests: Sequence[Sequence[Tokens]], memory: Memory) -> list[FloatArray]: ...


class Rescoring(Protocol):
    """Streams that have ended, with all that their hypotheses are weighed by."""

    def weigh(self) -> None:
        """Runs on the device. Raises nothing, and neither reads nor writes any stream's state."""

    def settle(self) -> dict[int, list[Hypothesis]]:
        """The streams' hypotheses by their new scores, best first, and gives their frames back.

        A stream is missing whose hypotheses could not be weighed.
        """


class SecondPass(Protocol):
    """Weighs the hypotheses of the streams that ask for it, once they have ended."""

    @property
    def reason(self) -> str:
        """Why there is no second pass, as the end of a sentence; empty where there is one."""

    @property
    def num_kept(self) -> int:
        """Streams whose frames are kept."""

    def __contains__(self, slot: object) -> bool:
        """Whether the stream's frames are kept."""

    def open(self, slot: int) -> None:
        """Keeps the stream's frames from here on."""

    def close(self, slot: int) -> None:
        """Lets go of the stream's frames; harmless for a stream that was not opened."""

    def keep(self, slots_B: IntArray, num_frames_B: IntArray, encoded_BTD: Tensor) -> None:
        """One step: row i of the (B, T, D) frames belongs to slot i."""

    def take(self, nbests: NBests) -> Rescoring | None:
        """Takes streams out that have ended; None where there is nothing to weigh."""

    def check_integrity(self, open_slots: frozenset[int]) -> None: ...


@dataclass(frozen=True)
class NoDecoder:
    """Implements SecondPass where there is none; `reason` ends a sentence of "rescoring:"."""

    reason: str = "the checkpoint has no attention decoder"

    @property
    def num_kept(self) -> int:
        return 0

    def __contains__(self, slot: object) -> bool:
        return False

    def open(self, slot: int) -> None:
        """No stream may ask for what is not there, so there is nothing to keep."""

    def close(self, slot: int) -> None:
        """Nothing is held."""

    def keep(self, slots_B: IntArray, num_frames_B: IntArray, encoded_BTD: Tensor) -> None:
        """Nothing is kept."""

    def take(self, nbests: NBests) -> None:
        """Nothing is weighed."""

    def check_integrity(self, open_slots: frozenset[int]) -> None:
        """Nothing is held, so nothing can be wrong."""
