"""The streaming CTC decoder: many streams, one batched operation per chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from oasr_backend.decoders.base import CTC_SEARCHES, Search, SearchSettings
from oasr_backend.decoders.bias.base import PrefixScorer
from oasr_backend.decoders.chunk import ChunkRows, Finish, nothing_to_finish
from oasr_backend.decoders.config import GpuDecoderConfig
from oasr_backend.decoders.result import GpuDecoderResult
from oasr_backend.decoders.rows import RowPool, StreamState
from oasr_backend.errors import DecoderStateError, StreamStateError
from oasr_backend.types import Hypothesis


def _make_search(
    config: GpuDecoderConfig, device: torch.device, scorers: Sequence[PrefixScorer]
) -> Search:
    settings = SearchSettings(
        device=device,
        blank_id=config.blank_id,
        beam_size=config.beam_size,
        token_candidates=config.token_candidates,
        blank_threshold=config.blank_threshold,
        scorers=tuple(scorers),
        takes_log_probs=True,
    )
    return CTC_SEARCHES[config.decoder].make(settings)


class GpuStreamingDecoder:
    """Decodes streams chunk by chunk on any device. Any cut into chunks gives the same result.

    A `StreamState` names the rows a stream holds in the pooled buffers; release it when the stream
    ends. Not thread-safe: one thread drives a decoder.
    """

    def __init__(
        self,
        config: GpuDecoderConfig,
        device: torch.device | str = "cpu",
        *,
        scorers: Sequence[PrefixScorer] = (),
    ) -> None:
        """`scorers` favour some prefixes of the prefix beam over others."""
        self.config = config
        self.device = torch.device(device)
        self._rows = RowPool()
        self._search = _make_search(config, self.device, scorers)
        self._own_state: StreamState | None = None

    def create_state(self, batch: int, vocab_size: int) -> StreamState:
        """Raises StreamStateError for a batch below 1 or a vocabulary without the blank."""
        self._check_geometry(batch, vocab_size)
        return StreamState(self._rows, self._take_rows(batch), vocab_size)

    def reset_state(self, state: StreamState, batch: int, vocab_size: int) -> None:
        """Put the state at the start of a stream; its rows are kept when the batch is the same."""
        self._check_owner(state)
        self._check_geometry(batch, vocab_size)
        if batch == state.batch:
            self._search.reset_rows(state.rows)
        else:
            self._rows.free(state.give_up_rows())
            state.take_rows(self._take_rows(batch))
        state.vocab_size = vocab_size
        state.step = 0

    def release_state(self, state: StreamState) -> None:
        """Give the rows back. Raises DecoderStateError when they already are."""
        self._check_owner(state)
        self._rows.free(state.give_up_rows())

    def init_stream(self, batch: int, vocab_size: int) -> None:
        """Start the decoder's own stream, for calls without a state."""
        if self._own_state is None:
            self._own_state = self.create_state(batch, vocab_size)
        else:
            self.reset_state(self._own_state, batch, vocab_size)

    def decode_chunk(self, log_probs_BTV: torch.Tensor, state: StreamState | None = None) -> None:
        """Decode T frames of every batch entry of one state; T = 0 changes nothing."""
        self.decode_chunk_batch(log_probs_BTV, [self._state_or_own(state)])

    def decode_chunk_batch(
        self,
        log_probs_NTV: torch.Tensor,
        states: Sequence[StreamState],
        *,
        num_frames: Sequence[int] | None = None,
        mask: Sequence[bool] | torch.Tensor | None = None,
    ) -> None:
        """Decode one chunk of many states; N is the sum of their batches, in order.

        The hypotheses have grown when this returns. Further as `begin_chunk_batch`.
        """
        self.begin_chunk_batch(log_probs_NTV, states, num_frames=num_frames, mask=mask)()

    def begin_chunk_batch(
        self,
        log_probs_NTV: torch.Tensor,
        states: Sequence[StreamState],
        *,
        num_frames: Sequence[int] | None = None,
        mask: Sequence[bool] | torch.Tensor | None = None,
    ) -> Finish:
        """Queue the decoding of one chunk; hypotheses grow with the returned call.

        Per state, `num_frames` says how many of the T frames are valid (all when None) and `mask`
        whether it takes part; both live on the host. Frames and states left out change nothing.
        Log-probs are read as fp32. Raises StreamStateError before anything changes.
        """
        rows = self._check_chunk(log_probs_NTV, states)
        frames = _frames_per_state(log_probs_NTV.shape[1], len(states), num_frames)
        if mask is not None:
            takes_part = _host_mask(mask, states)
            frames = [n if takes else 0 for n, takes in zip(frames, takes_part, strict=True)]
        longest = max(frames, default=0)
        if not longest:
            return nothing_to_finish
        finish = self._search.begin(log_probs_NTV[:, :longest], _chunk_rows(states, rows, frames))
        for state, count in zip(states, frames, strict=True):
            state.step += count
        return finish

    def peek(self, state: StreamState | None = None) -> GpuDecoderResult:
        """The hypotheses so far; changes nothing and does no device work."""
        state = self._state_or_own(state)
        nbest = self.config.nbest
        return GpuDecoderResult.from_hypotheses(
            [self._search.hypotheses(row, nbest) for row in state.rows]
        )

    def finalize_stream(self, state: StreamState | None = None) -> GpuDecoderResult:
        """The result of a finished stream. Like `peek`: may be called twice, decoding may go on."""
        return self.peek(state)

    def peek_batch(self, states: Sequence[StreamState]) -> list[GpuDecoderResult]:
        return [self.peek(state) for state in states]

    def best_batch(
        self, states: Sequence[StreamState], *, skips: Sequence[int] | None = None
    ) -> list[Hypothesis]:
        """The best hypothesis of the first batch entry of each state; no device work.

        `skips` leaves out that many first tokens per state, so that a caller who keeps the
        `num_stable` part of a long transcript pays for the new tokens only.
        """
        skips = [0] * len(states) if skips is None else skips
        return [
            self._search.hypotheses(state.rows[0], 1, skip=skip)[0]
            for state, skip in zip(states, skips, strict=True)
        ]

    def nbest(self, state: StreamState, count: int, *, skip: int = 0) -> list[Hypothesis]:
        """The `count` best hypotheses of the state's first entry, or all there are; best first.

        Without their first `skip` tokens.
        """
        return self._search.hypotheses(state.rows[0], count, skip=skip)

    def num_stable(self, state: StreamState) -> int:
        """How many first tokens of the state's first entry can no longer change."""
        return self._search.num_stable(state.rows[0])

    def check_integrity(self) -> None:
        self._rows.check_integrity()

    def _take_rows(self, count: int) -> tuple[int, ...]:
        capacity = self._rows.capacity
        rows = self._rows.allocate(count)
        if self._rows.capacity > capacity:
            self._search.grow(self._rows.capacity)
        self._search.reset_rows(rows)
        return rows

    def _state_or_own(self, state: StreamState | None) -> StreamState:
        state = self._own_state if state is None else state
        if state is None:
            raise DecoderStateError(
                "the decoder has no stream; call init_stream(batch, vocab_size) or pass a state"
            )
        self._check_owner(state)
        return state

    def _check_owner(self, *states: StreamState) -> None:
        if any(state.owner is not self._rows for state in states):
            raise StreamStateError("the state belongs to another decoder; use the one it came from")

    def _check_geometry(self, batch: int, vocab_size: int) -> None:
        if batch < 1:
            raise StreamStateError(f"batch {batch} is too small; a state has 1 entry or more")
        if vocab_size <= self.config.blank_id:
            raise StreamStateError(
                f"vocab_size {vocab_size} does not hold blank_id {self.config.blank_id}; "
                "lower blank_id or give the model's full vocabulary"
            )

    def _check_chunk(self, log_probs_NTV: torch.Tensor, states: Sequence[StreamState]) -> list[int]:
        """The storage rows of the states, in order."""
        self._check_owner(*states)
        kinds = {(state.batch, state.vocab_size) for state in states}
        if len(kinds) > 1:
            raise StreamStateError(
                f"states of different (batch, vocab_size) in one call: {sorted(kinds)}; "
                "decode each kind in its own call"
            )
        rows = [row for state in states for row in state.rows]
        if len(set(rows)) < len(rows):
            raise StreamStateError(f"a state appears twice among {len(states)}; pass each once")
        shape = tuple(log_probs_NTV.shape)
        vocab_size = states[0].vocab_size if states else None
        if len(shape) != 3 or shape[0] != len(rows) or (states and shape[2] != vocab_size):
            raise StreamStateError(
                f"log-probs have shape {shape}; expected ({len(rows)}, T, {vocab_size}): "
                "one row per batch entry of each state"
            )
        return rows


def _frames_per_state(
    chunk_frames: int, num_states: int, num_frames: Sequence[int] | None
) -> list[int]:
    if num_frames is None:
        return [chunk_frames] * num_states
    if len(num_frames) != num_states:
        raise StreamStateError(
            f"num_frames has {len(num_frames)} entries for {num_states} states; give one per state"
        )
    frames = list(map(int, num_frames))
    wrong = [n for n in frames if not 0 <= n <= chunk_frames]
    if wrong:
        raise StreamStateError(f"num_frames {wrong} are not in 0..{chunk_frames}, the chunk's T")
    return frames


def _host_mask(mask: Sequence[bool] | torch.Tensor, states: Sequence[StreamState]) -> list[bool]:
    shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else (len(mask),)
    if shape != (len(states),):
        raise StreamStateError(f"mask has shape {shape}; expected ({len(states)},): one per state")
    return [bool(takes_part) for takes_part in mask]


def _chunk_rows(
    states: Sequence[StreamState], rows: Sequence[int], frames: Sequence[int]
) -> ChunkRows:
    batch = states[0].batch
    return ChunkRows(
        rows=np.array(rows, dtype=np.int64),
        num_frames=np.repeat(np.array(frames, dtype=np.int64), batch),
        start_frames=np.repeat(np.array([s.step for s in states], dtype=np.int64), batch),
    )
