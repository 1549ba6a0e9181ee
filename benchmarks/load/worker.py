"""One process of the load: many paced streams on one event loop.

Every request has an intended send time: the moment its audio is complete. Latencies count from
there, so a client or server that lags is charged for it. A chunk is sent when its time has come
and the answer to the chunk before it is in, as a sequence has one request in flight.
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import grpc  # type: ignore[import-untyped]

from benchmarks.load import wire
from benchmarks.load.utterances import Utterance

_MAX_WRONG_EXAMPLES = 5
_SUMS = (
    "num_texts", "num_compared", "num_wrong", "answered_audio_s", "num_requests", "cpu_s",
)  # fmt: skip
_GC_THRESHOLD = 100_000
_MAX_UTTERANCES_BITS = 16
#: Neighbouring streams begin with recordings this far apart in the list.
_UTTERANCE_STRIDE = 7


#: What an audio stream sends its requests through.
Caller = wire.InferChannel | wire.InferStream


class LoadError(Exception):
    """The load could not be made; the message says which part and what to do."""


@dataclass(frozen=True)
class WorkerPlan:
    """`stream_indices` are those of the whole load; `first_id` is the run's first sequence id."""

    url: str
    model_name: str
    utterances: Sequence[Utterance]
    stream_indices: Sequence[int]
    start_offsets_s: Sequence[float]
    first_id: int
    deadline_s: float
    num_channels: int
    is_streaming: bool = False


@dataclass(frozen=True)
class Window:
    """Instants of time.monotonic, which all processes of a machine share."""

    start_s: float
    measure_from_s: float
    stop_s: float

    def measures(self, intended_s: float) -> bool:
        return self.measure_from_s <= intended_s < self.stop_s


@dataclass
class Samples:
    """The measurements; latencies are in seconds from the intended send time."""

    first_partial_s: array[float] = field(default_factory=lambda: array("d"))
    chunk_s: array[float] = field(default_factory=lambda: array("d"))
    final_s: array[float] = field(default_factory=lambda: array("d"))
    slip_s: array[float] = field(default_factory=lambda: array("d"))
    errors: Counter[str] = field(default_factory=Counter)
    num_texts: int = 0
    num_compared: int = 0
    num_wrong: int = 0
    wrong_examples: list[tuple[str, str]] = field(default_factory=list)
    answered_audio_s: float = 0.0
    num_requests: int = 0
    cpu_s: float = 0.0

    def add(self, other: Samples) -> None:
        for name in ("first_partial_s", "chunk_s", "final_s", "slip_s"):
            getattr(self, name).extend(getattr(other, name))
        self.errors.update(other.errors)
        self.wrong_examples = (self.wrong_examples + other.wrong_examples)[:_MAX_WRONG_EXAMPLES]
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def run_worker(plan: WorkerPlan, pipe: Connection) -> None:
    """The process's main: says "ready", waits for its Window, sends back its Samples.

    A server that cannot be reached is sent back as the error it is.
    """
    gc.set_threshold(_GC_THRESHOLD)
    try:
        pipe.send(asyncio.run(_Worker(plan).run(pipe)))
    except LoadError as error:
        pipe.send(error)


class _Worker:
    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._samples = Samples()
        self._window = Window(0.0, 0.0, 0.0)
        self._channels: list[wire.InferChannel] = []

    async def run(self, pipe: Connection) -> Samples:
        self._channels = [wire.InferChannel(self._plan.url) for _ in range(self._plan.num_channels)]
        for channel in self._channels:
            await _connect(channel, self._plan.url, self._plan.deadline_s)
        gc.collect()
        gc.freeze()
        pipe.send("ready")
        self._window = pipe.recv()
        starts = zip(self._plan.stream_indices, self._plan.start_offsets_s, strict=True)
        await asyncio.gather(self._cpu(), *(self._stream(index, at_s) for index, at_s in starts))
        for channel in self._channels:
            await channel.close()
        return self._samples

    async def _cpu(self) -> None:
        """The process's own work during the measurement."""
        await _sleep_until(self._window.measure_from_s)
        before_s = time.process_time()
        await _sleep_until(self._window.stop_s)
        self._samples.cpu_s = time.process_time() - before_s

    async def _stream(self, index: int, offset_s: float) -> None:
        """Utterances back to back on one absolute schedule, each under a new id."""
        begin_s = self._window.start_s + offset_s
        channel = self._channels[index % len(self._channels)]
        caller = self._caller(channel)
        number = 0
        while begin_s < self._window.stop_s:
            utterances = self._plan.utterances
            utterance = utterances[(index * _UTTERANCE_STRIDE + number) % len(utterances)]
            stream_id = self._plan.first_id + (index << _MAX_UTTERANCES_BITS) + number
            head = wire.head(self._plan.model_name, stream_id)
            try:
                await self._speak(caller, head, utterance, begin_s)
            except grpc.aio.AioRpcError as error:
                self._samples.errors[error.code().name] += 1
                caller = self._caller(channel)
            except (wire.AnswerError, asyncio.TimeoutError) as error:
                self._samples.errors[str(error)[:80] or "timeout"] += 1
                caller = self._caller(channel)
            begin_s += utterance.duration_s
            number += 1

    def _caller(self, channel: wire.InferChannel) -> Caller:
        return channel.open_stream() if self._plan.is_streaming else channel

    async def _speak(
        self, caller: Caller, head: bytes, utterance: Utterance, begin_s: float
    ) -> None:
        """One utterance; at the end of the run it is cut short with its END."""
        last, heard = len(utterance.bodies) - 1, False
        previous_ready_s = 0.0
        for index, (chunk, ready_s) in enumerate(
            zip(utterance.bodies, utterance.ready_s, strict=True)
        ):
            intended_s = begin_s + ready_s
            is_last = index == last or intended_s >= self._window.stop_s
            flags = (wire.START if index == 0 else b"") + (wire.END if is_last else b"")
            text, done_s = await self._send(caller, head + flags + chunk, intended_s)
            if self._window.measure_from_s <= done_s < self._window.stop_s:
                self._samples.answered_audio_s += ready_s - previous_ready_s
            previous_ready_s = ready_s
            if text and not heard and self._window.measures(begin_s + utterance.ready_s[0]):
                self._samples.first_partial_s.append(done_s - begin_s - utterance.ready_s[0])
            heard = heard or bool(text)
            if index == last:
                self._finish(utterance, text, intended_s=intended_s, done_s=done_s)
            if is_last:
                return

    async def _send(self, caller: Caller, request: bytes, intended_s: float) -> tuple[str, float]:
        """The text, and the time at which it came."""
        due_s = max(intended_s, time.monotonic())
        await _sleep_until(due_s)
        slip_s = time.monotonic() - due_s
        text = await caller.ask(request, self._plan.deadline_s)
        done_s = time.monotonic()
        if self._window.measures(intended_s):
            self._samples.num_requests += 1
            self._samples.slip_s.append(slip_s)
            self._samples.chunk_s.append(done_s - intended_s)
        return text, done_s

    def _finish(self, utterance: Utterance, text: str, *, intended_s: float, done_s: float) -> None:
        if self._window.measures(intended_s):
            self._samples.final_s.append(done_s - intended_s)
        self._samples.num_texts += 1
        if utterance.expected_text is None:
            return
        self._samples.num_compared += 1
        if text != utterance.expected_text:
            self._samples.num_wrong += 1
            if len(self._samples.wrong_examples) < _MAX_WRONG_EXAMPLES:
                self._samples.wrong_examples.append((utterance.name, text))


async def _connect(channel: wire.InferChannel, url: str, timeout_s: float) -> None:
    try:
        await channel.connect(timeout_s)
    except asyncio.TimeoutError:
        raise LoadError(
            f"no server answers at {url} within {timeout_s:g} s; give --url the gRPC port"
        ) from None


async def _sleep_until(instant_s: float) -> None:
    while (left_s := instant_s - time.monotonic()) > 0:
        await asyncio.sleep(left_s)


async def solo_texts(
    url: str,
    model_name: str,
    utterances: Sequence[Utterance],
    *,
    first_id: int,
    deadline_s: float,
) -> dict[str, str]:
    """Each utterance once, alone on the server: the text that it must have in company too."""
    channel, texts = wire.InferChannel(url), {}
    await _connect(channel, url, deadline_s)
    for number, utterance in enumerate(utterances):
        head = wire.head(model_name, first_id + number)
        for index, chunk in enumerate(utterance.bodies):
            flags = (wire.START if index == 0 else b"") + (
                wire.END if index == len(utterance.bodies) - 1 else b""
            )
            answer = await channel.call(head + flags + chunk, deadline_s)
        texts[utterance.name] = wire.text_of(answer)
    await channel.close()
    return texts
