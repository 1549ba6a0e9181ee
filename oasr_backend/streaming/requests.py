"""Requests on their way through the engine: one at a time per stream, in the order they came."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from oasr_backend.streaming.streams import Stream
from oasr_backend.types import AudioChunk, ChunkResult, StreamId


@dataclass(slots=True)
class Pending:
    """One request and its answer, once there is one; `stream` is whose audio it brought."""

    request: AudioChunk
    stream: Stream | None = None
    result: ChunkResult | None = None

    @property
    def is_done(self) -> bool:
        return self.result is not None

    @property
    def needs_step(self) -> bool:
        """Whether its stream has a window left to decode."""
        stream = self.stream
        return stream is not None and self.result is None and stream.has_ready_window


class RequestQueues:
    """A queue per stream id. Its head is being served; the others wait for the head's answer.

    The heads are kept in the order in which their streams were last stepped, so that when more are
    ready than a step takes, the longest-waiting go first. Few streams have more than a head.
    """

    def __init__(self) -> None:
        self._heads: OrderedDict[StreamId, Pending] = OrderedDict()
        self._waiting: dict[StreamId, deque[Pending]] = {}

    def __len__(self) -> int:
        return len(self._heads) + sum(map(len, self._waiting.values()))

    def push(self, pending: Pending) -> bool:
        """Whether the request is its stream's head now."""
        stream_id = pending.request.stream_id
        if stream_id in self._heads:
            self._waiting.setdefault(stream_id, deque()).append(pending)
            return False
        self._heads[stream_id] = pending
        return True

    def pop(self, stream_ids: Sequence[StreamId]) -> list[Pending]:
        """Removes the heads of these streams; returns those that take their places."""
        following = []
        for stream_id in stream_ids:
            waiting = self._waiting.get(stream_id)
            if waiting is None:
                del self._heads[stream_id]
                continue
            self._heads[stream_id] = head = waiting.popleft()
            if not waiting:
                del self._waiting[stream_id]
            following.append(head)
        return following

    def head(self, stream_id: StreamId) -> Pending:
        return self._heads[stream_id]

    def heads(self) -> list[Pending]:
        return list(self._heads.values())

    def streams(self) -> list[Stream]:
        """The streams of the heads, the longest-waiting first."""
        return [head.stream for head in self._heads.values() if head.stream is not None]

    def all(self) -> list[Pending]:
        """The heads, then those that wait."""
        return [*self._heads.values(), *chain.from_iterable(self._waiting.values())]

    def stepped(self, streams: Sequence[Stream]) -> None:
        """These streams have had their turn; the others come first."""
        for stream in streams:
            if stream.stream_id in self._heads:
                self._heads.move_to_end(stream.stream_id)

    def clear(self) -> None:
        self._heads.clear()
        self._waiting.clear()
