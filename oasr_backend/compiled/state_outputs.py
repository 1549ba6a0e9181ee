"""What a graph gives of each state: whole rows, or the newest frames of a sliding window.

The graph tells it itself, so that it is served without the encoder that it was made from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from oasr_backend.cache.state import StagedSlotTensor
from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.compiled.session import Array

_KEY = "rolled_states"


class Rolled(NamedTuple):
    """The axis and the number of a window's newest frames."""

    axis: int
    frames: int


def tell_rolled(path: Path, rolled: Mapping[str, Rolled]) -> None:
    """Writes into the graph which states it gives the newest frames of."""
    model = import_module("onnx").ModelProto()
    model.metadata_props.add(key=_KEY, value=json.dumps(rolled))
    # Messages one behind the other are one message with the fields of both.
    with path.open("ab") as file:
        file.write(model.SerializeToString())


def told_rolled(session: Any) -> dict[str, Rolled]:
    """Raises KeyError for a graph that tells nothing."""
    told = json.loads(session.get_modelmeta().custom_metadata_map[_KEY])
    return {name: Rolled(*axis_and_frames) for name, axis_and_frames in told.items()}


@dataclass(frozen=True)
class StateOutput:
    """`shape` is that of one row, without the slots."""

    state: StreamStateSpec
    rolled: Rolled | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, state: StreamStateSpec, rolled: Rolled | None) -> StateOutput:
        sizes = list(state.buffer_shape(1))
        if rolled is not None:
            sizes[rolled.axis] = rolled.frames
        del sizes[state.slot_axis]
        dtype = torch.empty(0, dtype=state.dtype or torch.float32).numpy().dtype
        return cls(state, rolled, tuple(sizes), dtype)

    def empty(self, num_rows: int) -> Array:
        """Memory for some rows."""
        at = self.state.slot_axis
        return np.empty((*self.shape[:at], num_rows, *self.shape[at:]), self.dtype)

    def hand_over(self, parts: Sequence[Array], state: StagedSlotTensor) -> None:
        """To the state; each part holds some rows, in their order."""
        tensors = [torch.from_numpy(part) for part in parts]
        new = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=self.state.slot_axis)
        if self.rolled is None:
            state.scatter(new)
        else:
            state.roll_in(new, axis=self.rolled.axis)
