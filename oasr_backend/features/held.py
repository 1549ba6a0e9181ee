"""The samples of a stream that a later window needs, in the arrays that they came in."""

from __future__ import annotations

from collections import deque

import numpy as np

from oasr_backend.errors import StreamStateError
from oasr_backend.features.samples import FLOAT32, PCM16_SCALE
from oasr_backend.types import Pcm16, Samples


class HeldSamples:
    """Float32 in [-1, 1] and int16, in any order; oldest first.

    Samples are moved once, from the array that they came in to the window's row. `pieces` are
    those arrays; `_passed` samples of the first are done with.
    """

    def __init__(self) -> None:
        self.pieces: deque[Samples | Pcm16] = deque()
        #: How many are held.
        self.size = 0
        self._passed = 0
        self._num_float_pieces = 0

    @property
    def is_pcm16(self) -> bool:
        """Whether all are 16-bit samples."""
        return self._num_float_pieces == 0

    def append(self, samples_S: Samples | Pcm16) -> None:
        if samples_S.size:
            self.pieces.append(samples_S)
            self._count(samples_S)

    def put_in_front(self, samples_S: Samples | Pcm16) -> None:
        """Makes them the oldest. Nothing is let go before."""
        if samples_S.size:
            self.pieces.appendleft(samples_S)
            self._count(samples_S)

    def copy_first(self, into: Samples | Pcm16) -> None:
        """Fills `into` with the oldest samples; it is float32, or int16 where `is_pcm16`."""
        begin, skipped = 0, self._passed
        for piece in self.pieces:
            part = piece[skipped : skipped + into.size - begin]
            end = begin + part.size
            if part.dtype == into.dtype:
                into[begin:end] = part
            else:
                np.multiply(part, PCM16_SCALE, out=into[begin:end])
            if end == into.size:
                return
            begin, skipped = end, 0

    def let_go(self, num_samples: int) -> None:
        """Drops the oldest `num_samples`, of which there are as many at least."""
        self.size -= num_samples
        self._passed += num_samples
        pieces = self.pieces
        while pieces and self._passed >= pieces[0].size:
            piece = pieces.popleft()
            self._passed -= piece.size
            self._num_float_pieces -= piece.dtype == FLOAT32

    def check_integrity(self) -> None:
        """Raises StreamStateError unless counters and arrays agree."""
        num_held = sum(piece.size for piece in self.pieces) - self._passed
        num_float = sum(piece.dtype == FLOAT32 for piece in self.pieces)
        is_passed = bool(self.pieces) and self._passed >= self.pieces[0].size
        if (num_held, num_float) != (self.size, self._num_float_pieces) or is_passed:
            raise StreamStateError(
                f"{num_held} samples in {len(self.pieces)} arrays, {num_float} of them float32, "
                f"are not the {self.size} and {self._num_float_pieces} that are counted; close "
                "the stream"
            )

    def _count(self, samples_S: Samples | Pcm16) -> None:
        self._num_float_pieces += samples_S.dtype == FLOAT32
        self.size += samples_S.size
