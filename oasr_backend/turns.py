"""Requests on their way through the engine: one at a time per stream, in the order they came."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oasr_backend.streams import Stream
from oasr_backend.types import AudioChunk, ChunkResult, StreamId


@dataclass(slots=True)
class Turn:
    """One request and its answer, once there is one; `stream` is whose audio it brought."""

    request: AudioChunk
    stream: Stream | None = None
    result: ChunkResult | None = None

    @property
    def is_done(self) -> bool:
        return self.result is not None


class TurnQueues:
    """A queue per stream id. Its head is being served; the others wait for the head's answer.

    The heads are kept in the order in which their streams were last stepped, so that when more are
    ready than a step takes, the longest-waiting go first.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[StreamId, deque[Turn]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def push(self, stream_id: StreamId, turn: Turn) -> bool:
        """Whether the turn is its stream's head now."""
        queue = self._queues.setdefault(stream_id, deque())
        queue.append(turn)
        return len(queue) == 1

    def pop(self, stream_id: StreamId) -> Turn | None:
        """Removes the head; returns the next one, if any waits."""
        queue = self._queues[stream_id]
        queue.popleft()
        if queue:
            return queue[0]
        del self._queues[stream_id]
        return None

    def head(self, stream_id: StreamId) -> Turn:
        return self._queues[stream_id][0]

    def heads(self) -> Iterator[Turn]:
        return iter([queue[0] for queue in self._queues.values()])

    def all(self) -> Iterator[Turn]:
        return iter([turn for queue in self._queues.values() for turn in queue])

    def stepped(self, streams: Sequence[Stream]) -> None:
        """These streams have had their turn; the others come first."""
        for stream in streams:
            if stream.stream_id in self._queues:
                self._queues.move_to_end(stream.stream_id)

    def clear(self) -> None:
        self._queues.clear()
