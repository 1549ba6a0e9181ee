"""What the operations take besides tensors.

Shape letters: B rows, T new frames, K keys (history and new), P positions, H heads, C head
dimension, D channels, k taps of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn

#: The score of a cached frame that no frame of the stream has filled yet.
HIDDEN = -1000.0
#: Of log(1 + exp(x - shift)) - 0.08 x - offset; R is 0 at 0.
L_SHIFT, L_OFFSET = 4.0, 0.035
R_SHIFT, R_OFFSET = 1.0, 0.313261687
SLOPE = 0.08


class KeyValueLayout(Protocol):
    """What a kernel reads of `oasr_backend.cache.PagedLayout`."""

    # Names carry their shapes.
    @property
    def write_index_N(self) -> Tensor: ...  # noqa: N802
    @property
    def read_index_BK(self) -> Tensor: ...  # noqa: N802
    @property
    def history_B(self) -> Tensor: ...  # noqa: N802
    @property
    def visible_B(self) -> Tensor: ...  # noqa: N802
    @property
    def valid_BK(self) -> Tensor: ...  # noqa: N802
    @property
    def num_frames(self) -> int: ...


class KeyValuePages(Protocol):
    """What attention asks of `oasr_backend.cache.PagedKVCache`."""

    k_cache: Tensor
    v_cache: Tensor

    @property
    def layout(self) -> KeyValueLayout: ...
    def write(self, k_BTHD: Tensor, v_BTHD: Tensor) -> None: ...
    def gather(self) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class AttentionTables:
    """One layer's position terms: p and v . p of every position, and u."""

    position_PHC: Tensor
    position_bias_PH: Tensor
    bias_u_HC: Tensor

    @property
    def num_heads(self) -> int:
        return self.bias_u_HC.shape[0]


@dataclass(frozen=True)
class ConvolutionWeights:
    """`rest_D` is the gate of a zero frame; the state and the kernel see frames relative to it."""

    rest_D: Tensor
    depthwise: nn.Conv2d
    norm: nn.LayerNorm | None

    @property
    def kernel_size(self) -> int:
        return int(self.depthwise.kernel_size[1])


class SlotRows(Protocol):
    """Rows `slot_ids` (B,) int64 of a state's `buffer` (slots, ...), as they are stored.

    Kernels read them where they lie: everything behind a buffer's first axis is contiguous.
    """

    @property
    def buffer(self) -> Tensor: ...
    @property
    def slot_ids(self) -> Tensor: ...
    def gather(self) -> Tensor: ...


class HeadSizes(NamedTuple):
    """Of the attention weights: heads, and the widths of a head's query (and key) and position."""

    num_heads: int
    query_dim: int
    position_dim: int


@dataclass(frozen=True)
class ChunkConvolutionWeights:
    """The two depthwise kernels of a chunk, and what scales the second: (T, D), by position.

    The causal kernel has k // 2 + 1 taps, that of the chunk k. `taps_first` stores them as a GPU
    reads them fastest.
    """

    causal_Dk: Tensor
    causal_bias_D: Tensor
    chunk_Dk: Tensor
    chunk_bias_D: Tensor
    scale_TD: Tensor

    @property
    def state_frames(self) -> int:
        """Gated frames before the chunk that the causal kernel reads."""
        return self.causal_Dk.shape[1] - 1


@dataclass(frozen=True)
class ConvNeXtWeights:
    """`taps_Ck` are those of `depthwise`, stored by `taps_first`."""

    depthwise: nn.Conv2d
    taps_Ck: Tensor
    widen: nn.Conv2d
    narrow: nn.Conv2d

    @property
    def reach(self) -> int:
        return self.taps_Ck.shape[1] // (2 * self.depthwise.kernel_size[1])
