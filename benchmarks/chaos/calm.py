"""The calm before the chaos: a lone stream, then all streams at once, all of them polite."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import numpy as np
from oasr_client import ClientError, StreamingClient

from benchmarks.chaos.caller import DEADLINE_S, EMPTY, new_id, request
from benchmarks.chaos.report import Check
from benchmarks.chaos.server import MODEL_NAME
from benchmarks.chaos.speech import Clip, read_clips
from benchmarks.load import wire
from benchmarks.load.utterances import SAMPLE_RATE
from oasr_backend.serve.process import TritonServer

_MINUTE_S = 60


def quiet_pass(server: TritonServer, clips: Sequence[Clip]) -> tuple[Check, float]:
    """Sends every recording once, alone; tells the audio seconds a second that this reached."""
    begin_s, wrong = time.monotonic(), []
    try:
        with StreamingClient(server.grpc_url, model_name=MODEL_NAME) as client:
            for clip in clips:
                with client.stream() as stream:
                    for chunk in clip.chunks(640):
                        stream.send(chunk)
                    if (text := stream.finish().text) != clip.text:
                        wrong.append(f"{clip.name}: {text!r} instead of {clip.text!r}")
    except ClientError as error:
        wrong.append(str(error))
    audio_s = sum(clip.samples_S.size for clip in clips) / SAMPLE_RATE
    detail = f"{len(clips)} recordings alone: {wrong or 'exact'}"
    return Check("quiet texts exact", not wrong, detail), audio_s / (time.monotonic() - begin_s)


async def speak_a_minute(url: str, clips: Sequence[Clip]) -> Clip:
    """A minute of speech, with the text that it gets in one request while no other stream lives."""
    samples_S = np.concatenate([clip.samples_S for clip in clips] * 2)[: _MINUTE_S * SAMPLE_RATE]
    channel = wire.InferChannel(url)
    whole = request(new_id(), samples_S, flags=wire.START + wire.END)
    text = await channel.ask(whole, DEADLINE_S)
    await channel.close()
    return Clip("minute", samples_S, text)


async def rehearse(url: str, clips: Sequence[Clip], *, num_streams: int) -> Check:
    """Runs every client's stream at once, so that memory reaches its size."""
    channel = wire.InferChannel(url)
    some = itertools.islice(itertools.cycle(clips), num_streams)
    wrong = await asyncio.gather(*(_speak(channel, clip) for clip in some))
    await channel.close()
    return Check(
        "texts of all clients at once exact", not any(wrong), f"{sum(wrong)} of {num_streams} wrong"
    )


async def fill(url: str, *, num_slots: int) -> Check:
    """Sends a window in each of `num_slots` streams at once, so that every slot and page exists."""
    channel = wire.InferChannel(url)
    window_S = read_clips()[0].samples_S[:SAMPLE_RATE]
    ids = [new_id() for _ in range(num_slots)]
    refused: list[BaseException] = []
    for flags, samples_S in ((wire.START, window_S), (wire.END, EMPTY)):
        calls = [channel.call(request(one, samples_S, flags=flags), DEADLINE_S) for one in ids]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        refused += [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    await channel.close()
    detail = f"{num_slots} streams at once, {len(refused)} refusals"
    return Check("room for all streams", not refused, detail)


async def _speak(channel: wire.InferChannel, clip: Clip) -> bool:
    """Whether the text is wrong."""
    stream_id, flags = new_id(), wire.START
    for chunk in clip.chunks(640):
        await channel.call(request(stream_id, chunk, flags=flags), DEADLINE_S)
        flags = b""
    end = request(stream_id, EMPTY, flags=wire.END)
    return await channel.ask(end, DEADLINE_S) != clip.text
