"""The acts of hostile clients. Each act knows which answers are right and reports any other."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.chaos.caller import (
    DEADLINE_S,
    EMPTY,
    INVALID,
    OK,
    REFUSED,
    SILENCE,
    Caller,
    bad_request,
    new_id,
    request,
)
from benchmarks.chaos.server import Limits
from benchmarks.chaos.speech import Clip
from benchmarks.chaos.victim import READY
from benchmarks.load import wire
from benchmarks.load.utterances import Pcm
from oasr_backend.serve.process import TritonServer

_VICTIM_ARGUMENTS = ("-m", "benchmarks.chaos.victim")
_NUM_EMPTY = 5
_LATE_S = 2.5
#: A run does each of these at least once, or it proves nothing.
DEEDS = (
    "vanish", "kill -9", "cancel START", "cancel a chunk", "cancel END", "duplicate START",
    "late after Triton's limit", "late after both limits", "NaN or infinity", "minute with END",
    "minute left alone", "empty chunks", "wrong tensors", "flipped ids", "wrong options",
    "slow step",
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """What the acts share. `huge` and `victims` limit the costly ones to what one machine bears.

    `ends_minute` says in turn whether a minute comes with END.
    """

    server: TritonServer
    limits: Limits
    clips: Sequence[Clip]
    minute: Clip
    huge: asyncio.Semaphore
    victims: asyncio.Semaphore
    ends_minute: Iterator[bool]

    def clip(self, caller: Caller) -> Clip:
        return caller.chance.choice(self.clips)


Act = Callable[[Caller, Stage], Awaitable[None]]


async def vanish(caller: Caller, stage: Stage) -> None:
    """Speaks for a while and then sends nothing more."""
    stream_id, chunks = new_id(), stage.clip(caller).chunks(400)
    if await caller.start("vanish", stream_id, chunks[0]) is None:
        return
    for chunk in chunks[1 : caller.chance.randint(1, 4)]:
        await caller.send("vanish", request(stream_id, chunk))
    caller.record.deeds["vanish"] += 1


async def kill_9(caller: Caller, stage: Stage) -> None:
    """A client process with several streams dies in the middle of them."""
    if stage.victims.locked():
        return
    async with stage.victims:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *_VICTIM_ARGUMENTS, stage.server.grpc_url,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
            await asyncio.sleep(caller.chance.uniform(0.0, 1.5))
        except TimeoutError:
            line = b"no word"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            status = await process.wait()
    died_of_it = line == READY and status == -signal.SIGKILL
    what = OK if died_of_it else f"{line!r}, status {status}"
    caller.record.note("kill_9", what, expected=(OK,))
    caller.record.deeds["kill -9"] += died_of_it


async def cancel(caller: Caller, stage: Stage) -> None:
    """Takes back START, a middle chunk or END while it is on its way."""
    stream_id, clip = new_id(), stage.clip(caller)
    after_s = caller.chance.choice((0.0, 0.001, 0.01, 0.05))
    if caller.chance.random() < 0.3:
        started = request(stream_id, clip.samples_S, flags=wire.START)
        return await caller.start_and_cancel("cancel START", started, after_s)
    if await caller.start("cancel", stream_id, clip.samples_S[:8000]) is None:
        return None
    is_last = caller.chance.random() < 0.3
    rest = request(stream_id, clip.samples_S[8000:], flags=wire.END if is_last else b"")
    act = "cancel END" if is_last else "cancel a chunk"
    return await caller.start_and_cancel(act, rest, after_s)


async def duplicate_start(caller: Caller, stage: Stage) -> None:
    """Starts a live id again: the text is that of the second stream alone."""
    stream_id, first, second = new_id(), stage.clip(caller), stage.clip(caller)
    if await caller.start("duplicate_start", stream_id, first.samples_S[:16000]) is None:
        return
    text = await _speak(caller, "duplicate_start", stream_id, second.chunks(700))
    caller.check_text("duplicate START", text, second.text)


async def late_chunk(caller: Caller, stage: Stage) -> None:
    """Comes back after Triton's idle limit, or after the backend's own as well."""
    stream_id = new_id()
    if await caller.start("late_chunk", stream_id, SILENCE) is None:
        return
    limits = stage.limits
    # Triton looks for idle sequences at intervals, and a busy machine delays it.
    deed, limit_s = caller.chance.choice(
        (
            ("late after Triton's limit", limits.triton_idle_s),
            ("late after both limits", limits.stream_idle_s),
        )
    )
    await asyncio.sleep(_LATE_S + limit_s)
    await caller.send("late_chunk", request(stream_id, SILENCE), expected=(INVALID,))
    caller.record.deeds[deed] += 1


async def not_finite(caller: Caller, stage: Stage) -> None:
    """NaN or infinity amid a stream, which goes on without that chunk."""
    stream_id, clip = new_id(), stage.clip(caller)
    chunks = clip.chunks(900)
    if await caller.start("not_finite", stream_id, chunks[0]) is None:
        return
    samples = np.full(1600, 0.01, dtype=np.float32)
    samples[caller.chance.randrange(1600)] = caller.chance.choice((np.nan, np.inf, -np.inf))
    spoiled = bad_request(
        stream_id, samples.tobytes(), name="WAV", triton_type="FP32", shape=(1, 1600)
    )
    await caller.send("not_finite", spoiled, expected=(INVALID,))
    text = await _continue(caller, "not_finite", stream_id, chunks[1:])
    caller.check_text("NaN or infinity", text, clip.text)


async def huge_chunk(caller: Caller, stage: Stage) -> None:
    """A minute of speech in one request, then END or nothing."""
    if stage.huge.locked():
        return
    async with stage.huge:
        is_last = next(stage.ends_minute)
        flags = wire.START + (wire.END if is_last else b"")
        started = request(new_id(), stage.minute.samples_S, flags=flags)
        text = await caller.send("huge_chunk", started, expected=(OK, REFUSED))
        if is_last:
            caller.check_text("minute with END", text, stage.minute.text)
        else:
            caller.record.deeds["minute left alone"] += text is not None
        # Without a pause between acts the run would measure throughput and not chaos.
        await asyncio.sleep(3.0)


async def empty_chunks(caller: Caller, stage: Stage) -> None:
    """Empty START, empty chunks between speech, empty END."""
    stream_id, clip = new_id(), stage.clip(caller)
    if await caller.start("empty_chunks", stream_id, EMPTY) is None:
        return
    chunks = [EMPTY] * _NUM_EMPTY
    for chunk in clip.chunks(1000):
        chunks += [chunk, EMPTY]
    text = await _continue(caller, "empty_chunks", stream_id, chunks)
    caller.check_text("empty chunks", text, clip.text)


async def wrong_dtype(caller: Caller, stage: Stage) -> None:
    """Tensors of the wrong type, shape, size or name."""
    for data, name, triton_type, shape in WRONG_TENSORS:
        wrong = bad_request(new_id(), data, name=name, triton_type=triton_type, shape=shape)
        await caller.send("wrong_dtype", wrong + wire.START, expected=(INVALID,))
    caller.record.deeds["wrong tensors"] += 1


#: Each is (data, name, type, shape); Triton or the backend must refuse it.
WRONG_TENSORS: tuple[tuple[bytes, str, str, tuple[int, ...]], ...] = (
    (bytes(320), "WAV", "INT16", (1, 160)),
    (bytes(640), "PCM16", "FP32", (1, 160)),
    (bytes(640), "WAV", "FP32", (160,)),
    (bytes(640), "WAV", "FP32", (1, 1, 160)),
    (bytes(100), "PCM16", "INT16", (1, 160)),
    (bytes(320), "AUDIO", "INT16", (1, 160)),
    (bytes(4), "WAV_LENS", "INT32", (1, 1)),
)


async def flipped_ids(caller: Caller, stage: Stage) -> None:
    """Ids never begun, none, ended twice; then 42 and "42" side by side, which are two streams."""
    stream_id, clip, other_clip = new_id(), stage.clip(caller), stage.clip(caller)
    if await caller.start("flipped_ids", stream_id, EMPTY) is None:
        return
    for other in (str(stream_id), new_id(), f"{stream_id}x"):
        await caller.send("flipped_ids", request(other, SILENCE), expected=(INVALID,))
    nobody = request(0, SILENCE, flags=wire.START)
    await caller.send("flipped_ids", nobody, expected=(INVALID,))
    text, other_text = await asyncio.gather(
        _continue(caller, "flipped_ids", stream_id, clip.chunks(800)),
        _speak(caller, "flipped_ids", str(stream_id), other_clip.chunks(800)),
    )
    caller.check_text("flipped ids", text, clip.text)
    caller.check_text("flipped ids", other_text, other_clip.text)
    ended_twice = request(stream_id, SILENCE, flags=wire.END)
    await caller.send("flipped_ids", ended_twice, expected=(INVALID,))


async def wrong_parameters(caller: Caller, stage: Stage) -> None:
    """Options that do not exist or make no sense."""
    wrong: tuple[dict[str, wire.Parameter], ...] = (
        {"sample_rat": 8000}, {"sample_rate": 1}, {"sample_rate": "fast"},
    )  # fmt: skip
    for parameters in wrong:
        started = request(new_id(), SILENCE, flags=wire.START, parameters=parameters)
        await caller.send("wrong_parameters", started, expected=(INVALID,))
    caller.record.deeds["wrong options"] += 1


#: Each act stands with its weight in the choice.
ACTS: tuple[tuple[Act, int], ...] = (
    (vanish, 4), (kill_9, 1), (cancel, 4), (duplicate_start, 3), (late_chunk, 3),
    (not_finite, 3), (huge_chunk, 1), (empty_chunks, 3), (wrong_dtype, 3), (flipped_ids, 3),
    (wrong_parameters, 2),
)  # fmt: skip


async def _speak(
    caller: Caller, act: str, stream_id: int | str, chunks: Sequence[Pcm]
) -> str | None:
    """The text of a whole utterance; None when the server refused its START."""
    if await caller.start(act, stream_id, chunks[0]) is None:
        return None
    return await _continue(caller, act, stream_id, chunks[1:])


async def _continue(
    caller: Caller, act: str, stream_id: int | str, chunks: Sequence[Pcm]
) -> str | None:
    for chunk in chunks:
        if await caller.send(act, request(stream_id, chunk)) is None:
            return None
    return await caller.send(act, request(stream_id, EMPTY, flags=wire.END))
