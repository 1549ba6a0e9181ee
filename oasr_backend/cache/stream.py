"""One stream's three caches behind one handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from oasr_backend.cache.attention_cache import AttentionCacheManager
from oasr_backend.cache.paged_kv import PagedKVCache
from oasr_backend.cache.state import SlotStateCache
from oasr_backend.errors import UnknownStreamError
from oasr_backend.types import StreamId

DecoderT_co = TypeVar("DecoderT_co", covariant=True)


class ConvolutionCache(Protocol):
    """What a context asks of a `CnnCacheManager`."""

    def get_cache(self, stream_id: StreamId) -> Tensor: ...
    def check_update(self, stream_id: StreamId, new_cnn_cache: Tensor) -> None: ...
    def update(self, stream_id: StreamId, new_cnn_cache: Tensor) -> None: ...
    def reset_stream(self, stream_id: StreamId) -> None: ...
    def free_stream(self, stream_id: StreamId) -> None: ...


class CtcStates(Protocol[DecoderT_co]):
    """What a context asks of a `CtcStateCacheManager`."""

    def get_decoder(self, stream_id: StreamId) -> DecoderT_co: ...
    def free_stream(self, stream_id: StreamId) -> None: ...


class StreamContext(Generic[DecoderT_co]):
    """Bundles managers that have the stream allocated already; `free` releases it from all.

    `states` holds an encoder's declared states beside the convolution's, if it has any.
    After `free` every call but `free` raises UnknownStreamError, even when the id is in use again.
    """

    def __init__(
        self,
        stream_id: StreamId,
        attention_cache: AttentionCacheManager,
        cnn_cache: ConvolutionCache,
        ctc_state: CtcStates[DecoderT_co] | None = None,
        *,
        states: SlotStateCache | None = None,
    ) -> None:
        self.stream_id = stream_id
        self._attention = attention_cache
        self._cnn = cnn_cache
        self._ctc = ctc_state
        self._states = states
        self._is_freed = False

    # Paged

    def prepare_chunk(self) -> None:
        self._check_live()
        self._attention.prepare_chunk(self.stream_id)

    def get_att_caches(self) -> list[PagedKVCache]:
        self._check_live()
        return self._attention.get_paged_caches(self.stream_id)

    def get_paged_state_views(self) -> tuple[Tensor, Tensor]:
        self._check_live()
        return self._attention.get_paged_state_views(self.stream_id)

    def commit_chunk_paged(self, chunk_frames: int, new_cnn: Tensor | None = None) -> None:
        """Counts the chunk and stores its convolution context, or changes neither."""
        self._check_live()
        self._attention.check_commit([self.stream_id], [chunk_frames])
        if new_cnn is not None:
            self._cnn.update(self.stream_id, new_cnn)
        self._attention.commit_chunk_paged(self.stream_id, chunk_frames)

    # Dense

    def get_att_cache(self) -> Tensor:
        self._check_live()
        return self._attention.get_stacked_cache(self.stream_id)

    def commit_chunk(self, new_kv: Tensor, new_cnn: Tensor) -> None:
        """Appends the chunk's packed K/V and stores its convolution context, or changes neither."""
        self._check_live()
        self._cnn.check_update(self.stream_id, new_cnn)
        self._attention.commit(self.stream_id, new_kv)
        self._cnn.update(self.stream_id, new_cnn)

    # Both

    def get_cnn_cache(self) -> Tensor:
        self._check_live()
        return self._cnn.get_cache(self.stream_id)

    def get_decoder(self) -> DecoderT_co:
        self._check_live()
        if self._ctc is None:
            raise UnknownStreamError(f"stream {self.stream_id!r} was made without a decoder state")
        return self._ctc.get_decoder(self.stream_id)

    def reset(self) -> None:
        """Rewinds what the encoder heard, at a turn's end.

        The slot, the persistent states and the decoder's state stay.
        """
        self._check_live()
        self._attention.reset_stream(self.stream_id)
        self._cnn.reset_stream(self.stream_id)
        if self._states is not None:
            self._states.reset_stream(self.stream_id)

    def free(self) -> None:
        """Releases every part even if one fails, then raises the first error.

        A second call does nothing.
        """
        if self._is_freed:
            return
        self._is_freed = True
        owners = (self._attention, self._cnn, self._states, self._ctc)
        releases = [owner.free_stream for owner in owners if owner is not None]
        _call_all(releases, self.stream_id)

    def _check_live(self) -> None:
        if self._is_freed:
            raise UnknownStreamError(f"stream {self.stream_id!r} is freed: make a new context")


def _call_all(releases: Sequence[Callable[[StreamId], None]], stream_id: StreamId) -> None:
    first_error: Exception | None = None
    for release in releases:
        try:
            release(stream_id)
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
