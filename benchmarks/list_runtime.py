"""The other way to keep streams' states: every stream has a list of tensors of its own.

A step joins the lists of its streams, tensor after tensor, runs the same model on what it joined,
and splits what comes back into the lists. A state whose slot axis is 1 has a tensor for each layer,
as toolkits hand them out.

Shapes: B streams, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oasr_backend.cache.state import SlotTensor, rolled
from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.models.acoustic_model import AcousticModel, ModelOutput
from oasr_backend.models.base import EncoderCaches

_WARM_UP_STEPS = 2


def is_layered(spec: StreamStateSpec) -> bool:
    """Whether axis 0 counts layers."""
    return spec.slot_axis == 1


@dataclass
class JoinedState:
    """Rows of one declared state: a tensor a layer, its rows first; one tensor without layers.

    `following` is what the step makes of them, in the same form.
    """

    spec: StreamStateSpec
    parts: list[Tensor]
    slot_ids: Tensor
    following: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.following = self.following or list(self.parts)

    def gather(self) -> Tensor:
        return torch.stack(self.following) if is_layered(self.spec) else self.following[0]

    def scatter(self, new: Tensor) -> None:
        self.following = list(new.unbind(0)) if is_layered(self.spec) else [new]

    def roll_in(self, new: Tensor, *, axis: int) -> None:
        if is_layered(self.spec):
            pairs = zip(self.parts, new.unbind(0), strict=True)
            self.following = [rolled(part, frames, axis - 1) for part, frames in pairs]
        else:
            self.following = [rolled(self.parts[0], new, axis)]

    def layer(self, number: int) -> SlotTensor:
        """All joined rows, in their order."""
        return SlotTensor(self.parts[number], self.slot_ids)

    def store(self) -> None:
        """What follows is kept by the caller."""


class ListRuntime:
    """A model and, for each of its streams, a list of state tensors.

    `step` runs the model operator by operator, since what it reads lies elsewhere in each step.
    """

    def __init__(
        self, model: AcousticModel, num_streams: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._model, self._device = model, device
        self._specs = [(spec, spec.dtype or dtype) for spec in model.state_specs]
        self._slot_ids = torch.arange(num_streams, device=device)
        self._first_position_B = torch.zeros_like(self._slot_ids)
        window_frames = model.window_geometry().window_frames
        self._num_new_B = torch.full_like(self._slot_ids, model.spec.chunk_frames)
        self._num_real_B = torch.full_like(self._slot_ids, window_frames)
        self.streams = [self._start() for _ in range(num_streams)]

    @property
    def num_tensors(self) -> int:
        """Of one stream."""
        return len(self.streams[0])

    @torch.inference_mode()
    def step(self, windows_BS: Tensor) -> ModelOutput:
        """Windows on the host."""
        windows_BS = windows_BS.to(self._device, non_blocking=True)
        states = self._states(self.join())
        output = self._run(windows_BS, states)
        self.split([part for state in states.values() for part in state.following])
        return output

    @torch.inference_mode()
    def join(self) -> list[Tensor]:
        """Each tensor of all streams as one."""
        return [torch.cat(rows) for rows in zip(*self.streams, strict=True)]

    @torch.inference_mode()
    def split(self, parts: Sequence[Tensor]) -> None:
        """Each stream's rows, which are views."""
        for row, stream in enumerate(zip(*(part.split(1) for part in parts), strict=True)):
            self.streams[row] = list(stream)

    def _start(self) -> list[Tensor]:
        zeros = []
        for spec, dtype in self._specs:
            shape = spec.shape[1:] if is_layered(spec) else spec.shape
            for _ in range(spec.shape[0] if is_layered(spec) else 1):
                zeros.append(torch.zeros((1, *shape), dtype=dtype, device=self._device))
        return zeros

    def _states(self, parts: list[Tensor]) -> dict[str, JoinedState]:
        rest, states = iter(parts), {}
        for spec, _ in self._specs:
            count = spec.shape[0] if is_layered(spec) else 1
            own = [next(rest) for _ in range(count)]
            states[spec.name] = JoinedState(spec, own, self._slot_ids)
        return states

    def _run(self, windows_BS: Tensor, states: dict[str, JoinedState]) -> ModelOutput:
        caches = EncoderCaches(
            kv=(),
            first_key_position_B=self._first_position_B,
            num_new_B=self._num_new_B,
            states=states,  # type: ignore[arg-type]
        )
        return self._model.forward_audio(windows_BS, caches, self._num_real_B)


class GraphedListRuntime(ListRuntime):
    """The same, with the model as a CUDA graph between the joining and the splitting."""

    def __init__(
        self, model: AcousticModel, num_streams: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(model, num_streams, device=device, dtype=dtype)
        with torch.inference_mode(), torch.cuda.device(device):
            self._parts = self.join()
            samples = model.window_geometry().window_samples
            self._windows_BS = torch.zeros((num_streams, samples), device=device)
            self._graph = torch.cuda.CUDAGraph()
            self._capture()

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                self._run(self._windows_BS, self._states(self._parts))
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            states = self._states(self._parts)
            self._output = self._run(self._windows_BS, states)
            self._following = [part for state in states.values() for part in state.following]

    @torch.inference_mode()
    def step(self, windows_BS: Tensor) -> ModelOutput:
        """The output is valid until the next call."""
        self._windows_BS.copy_(windows_BS, non_blocking=True)
        for part, rows in zip(self._parts, zip(*self.streams, strict=True), strict=True):
            torch.cat(rows, out=part)
        self._graph.replay()
        # The next replay writes over what this one made.
        self.split([part.clone() for part in self._following])
        return self._output
