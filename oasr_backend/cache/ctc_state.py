"""CTC decoder state per stream: one shared decoder, states that are pooled and used again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from oasr_backend.cache.types import default_device
from oasr_backend.decoders import (
    GpuDecoderConfig,
    GpuDecoderResult,
    GpuStreamingDecoder,
    StreamState,
)
from oasr_backend.decoders.bias.base import PrefixScorer
from oasr_backend.errors import StreamStateError, UnknownStreamError
from oasr_backend.types import StreamId


class StreamHandle:
    """One stream's decoder: the calls of a stand-alone GpuStreamingDecoder, bound to a state.

    Valid until the stream is freed; the state then serves another stream.
    """

    def __init__(self, decoder: GpuStreamingDecoder, state: StreamState) -> None:
        self.decoder = decoder
        self.state = state

    @property
    def config(self) -> GpuDecoderConfig:
        return self.decoder.config

    @property
    def step(self) -> int:
        """Frames heard since the start of the stream."""
        return self.state.step

    def decode_chunk(self, log_probs_BTV: torch.Tensor) -> None:
        self.decoder.decode_chunk(log_probs_BTV, self.state)

    def peek(self) -> GpuDecoderResult:
        return self.decoder.peek(self.state)

    def finalize_stream(self) -> GpuDecoderResult:
        return self.decoder.finalize_stream(self.state)


class CtcStateCacheManager:
    """Maps stream ids to decoder states. A freed state keeps its rows and waits for the next.

    An unknown id raises UnknownStreamError (a KeyError). Not thread-safe.
    """

    def __init__(
        self,
        decoder_config: GpuDecoderConfig | None = None,
        *,
        device: torch.device | str | None = None,
        scorers: Sequence[PrefixScorer] = (),
    ) -> None:
        """`device` holds the log-probs; None: the one that a CacheConfig takes by default."""
        self.decoder = GpuStreamingDecoder(
            decoder_config or GpuDecoderConfig(), device or default_device(), scorers=scorers
        )
        self._states: dict[StreamId, StreamState] = {}
        self._pooled: list[StreamState] = []

    @property
    def num_streams(self) -> int:
        return len(self._states)

    @property
    def num_pooled(self) -> int:
        return len(self._pooled)

    def allocate_stream(
        self, stream_id: StreamId, batch: int = 1, vocab_size: int | None = None
    ) -> None:
        """Open a stream. Raises StreamStateError for an id that is open or without vocab_size."""
        if stream_id in self._states:
            raise StreamStateError(f"stream {stream_id!r} is already allocated; free it first")
        if vocab_size is None:
            raise StreamStateError(f"stream {stream_id!r} needs vocab_size, the width of log-probs")
        if self._pooled:
            self.decoder.reset_state(self._pooled[-1], batch, vocab_size)
            self._states[stream_id] = self._pooled.pop()
        else:
            self._states[stream_id] = self.decoder.create_state(batch, vocab_size)

    def free_stream(self, stream_id: StreamId) -> None:
        """Close a stream; its state goes to the pool, its buffers are kept."""
        self._pooled.append(self._get_state(stream_id))
        del self._states[stream_id]

    def reset_stream(self, stream_id: StreamId) -> None:
        """Start again: no hypothesis, frame 0."""
        state = self._get_state(stream_id)
        self.decoder.reset_state(state, state.batch, state.vocab_size)

    def get_decoder(self, stream_id: StreamId) -> StreamHandle:
        return StreamHandle(self.decoder, self._get_state(stream_id))

    def get_states(self, stream_ids: Iterable[StreamId]) -> list[StreamState]:
        return [self._get_state(stream_id) for stream_id in stream_ids]

    def check_integrity(self) -> None:
        """Every state belongs to one stream or the pool, and every row to one state."""
        states = [*self._states.values(), *self._pooled]
        rows = [row for state in states for row in state.rows]
        assert len({id(state) for state in states}) == len(states), "a state has two users"
        assert len(set(rows)) == len(rows), "a row has two users"
        self.decoder.check_integrity()

    def _get_state(self, stream_id: StreamId) -> StreamState:
        try:
            return self._states[stream_id]
        except KeyError:
            raise UnknownStreamError(
                f"stream {stream_id!r} has no decoder state; allocate_stream() comes first"
            ) from None
