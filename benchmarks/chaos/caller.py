"""Raw requests with a deadline and a record of every answer."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc  # type: ignore[import-untyped]
import numpy as np

from benchmarks.chaos.server import MODEL_NAME
from benchmarks.load import wire
from benchmarks.load.utterances import Pcm

OK = "OK"
REFUSED = "UNAVAILABLE"
INVALID = "INVALID_ARGUMENT"
#: A request that takes longer hangs. Far above what a minute of audio takes on a small machine
#: that others use as well.
DEADLINE_S = 300.0
_MAX_EXAMPLES = 10

_ids = itertools.count((1 + secrets.randbits(20)) << 40)


def new_id() -> int:
    """An id that no caller has used before, so that a hostile client takes no other stream's id."""
    return next(_ids)


@dataclass
class Record:
    """The answers that hostile clients got, by act, and the deeds that they completed."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    num_unexpected: int = 0
    wrong_texts: list[str] = field(default_factory=list)
    num_texts: int = 0

    def note(self, act: str, status: str, *, expected: tuple[str, ...], detail: str = "") -> None:
        self.answers[act, status] += 1
        if status not in expected:
            self.num_unexpected += 1
            if len(self.unexpected) < _MAX_EXAMPLES:
                self.unexpected.append(f"{act}: {status}, expected {'/'.join(expected)}: {detail}")

    def note_text(self, act: str, text: str, expected: str) -> None:
        self.num_texts += 1
        if text != expected:
            self.wrong_texts.append(f"{act}: {text!r} instead of {expected!r}")

    @property
    def deadline_misses(self) -> int:
        return sum(n for (_, status), n in self.answers.items() if status == "DEADLINE_EXCEEDED")


class Caller:
    """One hostile client on one connection; `chance` decides what it does."""

    def __init__(
        self,
        channel: wire.InferChannel,
        record: Record,
        *,
        deadline_s: float,
        chance: random.Random,
    ) -> None:
        self.record = record
        self.chance = chance
        self._channel = channel
        self._deadline_s = deadline_s

    async def send(self, act: str, request: bytes, expected: tuple[str, ...] = (OK,)) -> str | None:
        """The text, or None when the server answered with an error."""
        try:
            answer = await self._channel.call(request, self._deadline_s)
        except grpc.aio.AioRpcError as error:
            status, detail = error.code().name, error.details() or ""
            self.record.note(act, status, expected=expected, detail=detail)
            return None
        self.record.note(act, OK, expected=expected)
        return wire.text_of(answer)

    async def start(self, act: str, stream_id: int | str, samples_S: Pcm) -> str | None:
        """A START that may be refused for want of room."""
        return await self.send(
            act, request(stream_id, samples_S, flags=wire.START), expected=(OK, REFUSED)
        )

    def check_text(self, deed: str, text: str | None, expected: str) -> None:
        """Notes that the deed is done, unless `text` is None: the server refused the stream."""
        if text is not None:
            self.record.deeds[deed] += 1
            self.record.note_text(deed, text, expected)

    async def start_and_cancel(self, act: str, request_bytes: bytes, after_s: float) -> None:
        """Sends the request and cancels it `after_s` later, unless the answer comes first."""
        call = self._channel.call(request_bytes, self._deadline_s)
        await asyncio.sleep(after_s)
        call.cancel()
        try:
            await call
        except asyncio.CancelledError:
            self.record.note(act, "CANCELLED", expected=("CANCELLED",))
            self.record.deeds[act] += 1
        except grpc.aio.AioRpcError as error:
            self.record.note(act, error.code().name, expected=("CANCELLED", REFUSED))
        else:
            self.record.note(act, OK, expected=(OK,))


async def status_of(channel: wire.InferChannel, request_bytes: bytes) -> str:
    """OK, or the name of the error."""
    try:
        await channel.call(request_bytes, DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return OK


def request(
    stream_id: int | str,
    samples_S: Pcm,
    *,
    flags: bytes = b"",
    parameters: Mapping[str, wire.Parameter] | None = None,
) -> bytes:
    return wire.head(MODEL_NAME, stream_id, parameters) + flags + wire.body(samples_S, "pcm16")


def bad_request(
    stream_id: int | str, data: bytes, *, name: str, triton_type: str, shape: tuple[int, ...]
) -> bytes:
    """Any tensor in any state; the flags are left to the caller."""
    return wire.head(MODEL_NAME, stream_id) + wire.raw_body(
        data, name=name, triton_type=triton_type, shape=shape
    )


SILENCE = np.zeros(1600, dtype=np.int16)
EMPTY = np.zeros(0, dtype=np.int16)
