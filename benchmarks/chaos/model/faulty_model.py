"""The probed model with every fault that the chaos run looks for: its checks must fail.

The faults begin with the first behaving client, so that all before it is as it should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import probed_model

from oasr_backend.streaming.streams import Stream

_EVERY_NTH_STREAM_STAYS = 10
_EVERY_NTH_STREAM_IS_WRONG = 3
_EVERY_NTH_REQUEST_HANGS = 20
_MOST_HANGS = 8
_LEAK_OBJECTS = 500
#: It leaks with each reading of the probes, twice a second however busy the server is.
_LEAK_BYTES = 2 * 1024**2


class TritonPythonModel(probed_model.TritonPythonModel):
    def initialize(self, args: dict[str, str]) -> None:
        # It is set first, since the base class publishes from here on.
        self._kept: list[Any] = []
        self._num_requests = 0
        super().initialize(args)
        engine = self._model._engine
        self._close_stream = engine.streams.close
        self._right_texts = engine.parts.results.texts
        engine.streams.close = self._forget_to_close
        engine.parts.results.texts = self._wrong_texts

    def execute(self, requests: list[Any]) -> list[Any]:
        answers = super().execute(requests)
        for index, request in enumerate(requests):
            self._num_requests += self._has_begun or is_behaving(request)
            if self._has_begun:
                self._leak(request)
            number, rest = divmod(self._num_requests, _EVERY_NTH_REQUEST_HANGS)
            if rest == 0 and 0 < number <= _MOST_HANGS:
                answers[index] = self._hang(request, answers[index])
        return answers

    @property
    def _has_begun(self) -> bool:
        return self._num_requests > 0

    def _leak(self, request: Any) -> None:
        """The inputs live in shared memory for as long as any object refers to them."""
        self._kept += [request.inputs(), [[] for _ in range(_LEAK_OBJECTS)]]

    def _publish(self) -> None:
        super()._publish()
        if self._has_begun:
            self._kept.append(b"x" * _LEAK_BYTES)

    def _hang(self, request: Any, answer: Any) -> None:
        """The model cannot take back an answer that went, or will go, to a sender."""
        if answer is not None:
            self._kept.append(request.get_response_sender())

    def _forget_to_close(self, stream: Stream) -> None:
        if not self._has_begun or stream.slot % _EVERY_NTH_STREAM_STAYS:
            self._close_stream(stream)

    def _wrong_texts(self, streams: Sequence[Stream]) -> list[str]:
        texts = self._right_texts(streams)
        if not self._has_begun:
            return texts
        return [
            text if stream.slot % _EVERY_NTH_STREAM_IS_WRONG else text + " NOT"
            for stream, text in zip(streams, texts, strict=True)
        ]


def is_behaving(request: Any) -> bool:
    return str(request.correlation_id()).startswith("behaving-")
