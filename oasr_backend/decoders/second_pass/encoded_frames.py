"""What the encoder made of the streams that will be rescored, kept until they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from oasr_backend.decoders.second_pass.base import Memory
from oasr_backend.device import to_device
from oasr_backend.types import StreamId

_FIRST_CAPACITY = 32


@dataclass
class _Kept:
    blocks: list[int] = field(default_factory=list)
    num_frames: int = 0


class EncodedFrames:
    """One pooled buffer (P, T, D) of blocks; a block holds what one step gives to one stream.

    The buffer doubles when it is full and is never given back, so at most twice `max_streams` x
    `max_frames` frames are held, and nothing is allocated once the server has seen its peak. A
    stream that outgrows `max_frames` gives its blocks back and is kept no more.
    """

    def __init__(
        self,
        *,
        block_frames: int,
        model_dim: int,
        max_frames: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.max_frames = max_frames
        self._buffer_PTD = torch.empty((0, block_frames, model_dim), dtype=dtype, device=device)
        self._free: list[int] = []
        self._kept: dict[StreamId, _Kept] = {}

    def __contains__(self, stream_id: StreamId) -> bool:
        return stream_id in self._kept

    def __len__(self) -> int:
        """Streams that are kept."""
        return len(self._kept)

    @property
    def num_blocks(self) -> int:
        return self._buffer_PTD.shape[0]

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_frames(self, stream_id: StreamId) -> int:
        return self._kept[stream_id].num_frames

    def open(self, stream_id: StreamId) -> None:
        self._kept[stream_id] = _Kept()

    def close(self, stream_id: StreamId) -> None:
        """Harmless for a stream that is not kept."""
        kept = self._kept.pop(stream_id, None)
        if kept is not None:
            self._free.extend(kept.blocks)

    @torch.inference_mode()
    def append(
        self, stream_ids: Sequence[StreamId], num_frames: Sequence[int], encoded_BTD: Tensor
    ) -> None:
        """Copies the rows of those streams that are kept, all in one operation.

        Only a stream's last step may give fewer than T frames. Raises what the device raises when
        it has no room; nothing has changed then, save that streams too long are closed.
        """
        self._close_too_long(stream_ids, num_frames)
        rows = [row for row, one in enumerate(stream_ids) if one in self._kept and num_frames[row]]
        if not rows:
            return
        while len(self._free) < len(rows):
            self._double()
        blocks = self._free[-len(rows) :]
        device = self._buffer_PTD.device
        row_N, block_N = to_device(np.array([rows, blocks], dtype=np.int64), device)
        new_NTD = encoded_BTD.index_select(0, row_N).to(self._buffer_PTD.dtype)
        self._buffer_PTD.index_copy_(0, block_N, new_NTD)
        del self._free[-len(rows) :]
        for row, block in zip(rows, blocks, strict=True):
            kept = self._kept[stream_ids[row]]
            kept.blocks.append(block)
            kept.num_frames += num_frames[row]

    @torch.inference_mode()
    def gather(self, stream_ids: Sequence[StreamId]) -> Memory:
        """The frames of streams that are kept, side by side."""
        kept = [self._kept[stream_id] for stream_id in stream_ids]
        counts = np.array([one.num_frames for one in kept])
        blocks_SP = np.zeros((len(kept), max(len(one.blocks) for one in kept)), dtype=np.int64)
        for row, one in enumerate(kept):
            blocks_SP[row, : len(one.blocks)] = one.blocks
        is_real_ST = to_device(np.arange(counts.max()) < counts[:, None], self._buffer_PTD.device)
        block_X = to_device(blocks_SP.reshape(-1), self._buffer_PTD.device)
        encoded_XTD = self._buffer_PTD.index_select(0, block_X)
        encoded_STD = encoded_XTD.reshape(len(kept), -1, encoded_XTD.shape[2])[:, : counts.max()]
        # A masked frame still multiplies its value, which may be another stream's, or NaN.
        return Memory(encoded_STD.masked_fill(~is_real_ST.unsqueeze(-1), 0.0), is_real_ST)

    def check_integrity(self) -> None:
        """Every block is free or of one stream."""
        held = [block for kept in self._kept.values() for block in kept.blocks]
        assert sorted([*self._free, *held]) == list(range(self.num_blocks)), "a block has two users"
        block_frames = self._buffer_PTD.shape[1]
        for kept in self._kept.values():
            assert len(kept.blocks) == -(-kept.num_frames // block_frames)

    def _close_too_long(self, stream_ids: Sequence[StreamId], num_frames: Sequence[int]) -> None:
        for stream_id, count in zip(stream_ids, num_frames, strict=True):
            kept = self._kept.get(stream_id)
            if kept is not None and kept.num_frames + count > self.max_frames:
                self.close(stream_id)

    def _double(self) -> None:
        old = self.num_blocks
        shape = (max(_FIRST_CAPACITY, 2 * old), *self._buffer_PTD.shape[1:])
        buffer_PTD = self._buffer_PTD.new_empty(shape)
        buffer_PTD[:old] = self._buffer_PTD
        self._buffer_PTD = buffer_PTD
        self._free.extend(range(old, shape[0]))
