"""The open streams of one engine: who they are, what they own, when they were last heard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from oasr_backend.errors import (
    InvalidRequestError,
    OasrError,
    StreamLimitError,
    UnknownStreamError,
)
from oasr_backend.features import AudioBuffer, StreamingResampler
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.store import StreamStore
from oasr_backend.text.segments import Segments
from oasr_backend.text.told import Told
from oasr_backend.text.unit_text import START, Joint
from oasr_backend.types import Pcm16, Samples, StreamId


@dataclass(slots=True)
class SettledText:
    """The part of a transcript that cannot change, so that it is put into words only once."""

    text: str = ""
    num_tokens: int = 0
    # Where the text of the next tokens goes on.
    joint: Joint = START

    def add(self, text: str, joint: Joint, *, num_tokens: int) -> None:
        self.text += text
        self.joint = joint
        self.num_tokens += num_tokens


#: In place of a slot where a stream has none.
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Stream:
    """What one caller owns. Its state is in the store's rows of `slot`.

    `slot` is NO_SLOT once the rows have been given back before END ("length"): the stream then only
    waits for its caller to learn of it. `generation` tells streams of one id apart in the log.
    """

    stream_id: StreamId
    generation: int
    options: StreamOptions
    slot: int
    audio: AudioBuffer
    resampler: StreamingResampler
    # When its last request came, or was answered if that is done.
    last_heard_s: float
    # A request of it waits for its answer; until then it is not idle, however long that takes.
    is_served: bool = False
    next_chunk_seq: int | None = None
    num_encoder_frames: int = 0
    num_input_samples: int = 0
    finish_reason: str | None = None
    failure: OasrError | None = None
    # A step has it in hand: no other may advance it.
    is_stepping: bool = False
    # Steps that the device has been given and whose outcome is not yet read.
    num_in_flight: int = 0
    # Length of the last step that it took part in.
    step_ms: float = 0.0
    settled: SettledText = field(default_factory=SettledText)
    told: Told = field(default_factory=Told)
    # Made when a document first asks for segments.
    segments: Segments | None = None

    @property
    def audio_s(self) -> float:
        """Seconds of audio received, silence padding not counted."""
        return self.num_input_samples / self.options.sample_rate

    @property
    def has_ready_window(self) -> bool:
        return self.audio.num_ready_windows > 0 and self.slot != NO_SLOT

    def wrong_chunk_seq(self, number: int | None) -> InvalidRequestError:
        """What is told of a number that is not `next_chunk_seq`: a stream numbers all or none."""
        expected = self.next_chunk_seq
        if expected is None:
            what = "its START had none; leave it out, or number all requests of a stream"
        elif number is None:
            what = f"expected {expected}; number all requests of a stream or none"
        else:
            what = f"expected {expected}; a chunk was lost or repeated: send the expected one"
        return InvalidRequestError(f"stream {self.stream_id!r}: chunk_seq={number}, {what}")

    def accept(self, samples_S: Samples | Pcm16, *, is_last: bool, tail_padding: bool) -> None:
        """Buffers a chunk; at the end also what the resampler still holds."""
        if self.next_chunk_seq is not None:
            self.next_chunk_seq += 1
        self.num_input_samples += samples_S.size
        self.audio.accept(self.resampler.accept(samples_S))
        if is_last:
            self.audio.accept(self.resampler.finish())
            self.audio.finish(tail_padding=tail_padding)


class StreamRegistry:
    """Open streams by correlation id. The one place where a stream begins and ends."""

    def __init__(
        self,
        *,
        max_streams: int,
        idle_timeout_s: float,
        store: StreamStore,
        new_buffer: Callable[[], AudioBuffer],
    ) -> None:
        self.max_streams = max_streams
        self.idle_timeout_s = idle_timeout_s
        self._store = store
        self._new_buffer = new_buffer
        self._streams: dict[StreamId, Stream] = {}
        self._next_generation = 1

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def is_full(self) -> bool:
        return len(self._streams) >= self.max_streams

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def __contains__(self, stream_id: StreamId) -> bool:
        return stream_id in self._streams

    def open(self, stream_id: StreamId, options: StreamOptions, *, now_s: float) -> Stream:
        """Allocates everything or nothing. Raises StreamLimitError with the numbers.

        The caller closes a live stream of that id first.
        """
        if self.is_full:
            raise StreamLimitError(
                f"stream {stream_id!r} is refused: {len(self._streams)} streams are open and "
                f"max_streams is {self.max_streams}; try again later or raise max_streams"
            )
        audio = self._new_buffer()
        stream = Stream(
            stream_id=stream_id,
            generation=self._next_generation,
            options=options,
            slot=NO_SLOT,
            audio=audio,
            resampler=StreamingResampler(options.sample_rate, audio.geometry.frames.sample_rate),
            last_heard_s=now_s,
        )
        # Last, since nothing that is made after it could give it back.
        stream.slot = self._store.open(options)
        self._next_generation += 1
        self._streams[stream_id] = stream
        return stream

    def find(self, stream_id: StreamId) -> Stream | None:
        """The stream of that id, if one is open. It does not count as heard."""
        return self._streams.get(stream_id)

    def get(self, stream_id: StreamId, *, now_s: float) -> Stream:
        """Raises UnknownStreamError when no such stream is open."""
        try:
            stream = self._streams[stream_id]
        except KeyError:
            raise UnknownStreamError(
                f"stream {stream_id!r} is unknown here (never started, ended, or freed after "
                f"{self.idle_timeout_s:g} s without a request); send START on the first request of "
                "the sequence"
            ) from None
        stream.last_heard_s = now_s
        return stream

    def release(self, stream: Stream) -> None:
        """Gives the rows back but keeps the id until its caller ends it."""
        slot, stream.slot = stream.slot, NO_SLOT
        if slot != NO_SLOT:
            self._store.close(slot)

    def close(self, stream: Stream) -> None:
        """Forgets the stream and frees all it owns; harmless for one that is closed already."""
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]
        self.release(stream)

    def close_idle(self, *, before_s: float) -> list[Stream]:
        """Closes every stream that was last heard before `before_s`, and returns them."""
        idle = [s for s in self if s.last_heard_s < before_s and not s.is_served]
        for stream in idle:
            self.close(stream)
        return idle
