"""Live callers at real-time pace through each recogniser's own server.

All servers live at once; one is called at a time while the others are idle, by turns. Every caller
posts the same pieces of audio at the same times.

Latency. A recogniser works in windows of audio: window k can be decoded once the post has arrived
that brings its last sample. Both need the same post for it. Its latency is the time from the moment
that post was due, which is when its last sample had been spoken, to the arrival of the answer that
covers it: for ours the answer to that request, for the peer its k-th message, as it sends one for
each window. A caller or a server that lags is charged for it. "Final" is the time from the end of
speech to the final text, with the windows of silence that each server adds.

"Words unlike ours" is the word error rate between the final texts. In process it is nearly 0; the
peer's server centres its frames on their shifts, which no flag of it changes, and a feature grid
that lies 7.5 ms off gives other texts where the model is unsure.

Processor time is that of all processes of a server. The callers share its cores, as one process;
what they use stands apart, and is more for gRPC than for a websocket.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jiwer
import numpy as np

from benchmarks.load import wire
from benchmarks.peers import processes
from benchmarks.peers.callers import CallError, Heard, Speech, call_ours, call_peer
from benchmarks.peers.choices import Choices
from benchmarks.peers.export import ExportedModel
from benchmarks.peers.packages import require
from benchmarks.peers.servers import RunningServer
from benchmarks.report import Figure
from benchmarks.workload import SAMPLE_RATE, FloatArray, utterances

_IDLE_S = 3.0
_CONNECT_S = 10.0
#: From the order to the first caller's start.
_LEAD_S = 0.3
_FRAME_SHIFT, _FRAME_LENGTH, _SUBSAMPLING, _RIGHT_CONTEXT = 160, 400, 4, 6
_STREAM_IDS = itertools.count(1)


@dataclass
class Turns:
    """Of one server at one number of streams, a value for each turn."""

    p50_ms: list[float] = field(default_factory=list)
    p95_ms: list[float] = field(default_factory=list)
    final_p50_ms: list[float] = field(default_factory=list)
    final_p95_ms: list[float] = field(default_factory=list)
    cpu_share: list[float] = field(default_factory=list)
    caller_share: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(
        self, heard: Sequence[Heard], *, server_s: float, callers_s: float, audio_s: float
    ) -> None:
        """`server_s` and `callers_s` are processor time, spent on `audio_s` of speech.

        Raises CallError for a caller who was told nothing.
        """
        if not all(one.text for one in heard):
            raise CallError(
                "a caller spoke for seconds and got an empty text; see the server's log"
            )
        self.texts += [one.text for one in heard]
        windows_s = np.concatenate([one.window_s for one in heard])
        finals_s = np.array([one.final_s for one in heard])
        self.p50_ms.append(float(np.percentile(windows_s, 50)) * 1e3)
        self.p95_ms.append(float(np.percentile(windows_s, 95)) * 1e3)
        self.final_p50_ms.append(float(np.percentile(finals_s, 50)) * 1e3)
        self.final_p95_ms.append(float(np.percentile(finals_s, 95)) * 1e3)
        self.cpu_share.append(server_s / audio_s * 1e3)
        self.caller_share.append(callers_s / audio_s * 1e3)


def measure(
    servers: Sequence[RunningServer], exported: ExportedModel, choices: Choices
) -> list[Figure]:
    """`servers` are ready. Raises CallError and what a client raises for a failed request."""
    figures = [
        Figure(f"idle: {running.server.name}, CPU", "CPU ms/s", [_idle_ms(running)])
        for running in servers
    ]
    for post_s, num_streams in itertools.product(choices.posts_s, choices.paced_streams):
        speeches = _speeches(exported, choices, post_s)
        where = f"paced, {num_streams} streams, posts of {post_s:g} s"
        turns = {running.server.name: Turns() for running in servers}
        order = list(servers)
        for number in range(choices.num_paced_rounds):
            for running in order:
                before_s, callers_s = processes.cpu_s(running.pid), time.process_time()
                heard = asyncio.run(_turn(running, speeches, num_streams, seed=number))
                turns[running.server.name].add(
                    heard,
                    server_s=processes.cpu_s(running.pid) - before_s,
                    callers_s=time.process_time() - callers_s,
                    audio_s=num_streams * speeches[0].duration_s,
                )
            order = order[1:] + order[:1]
        for name, one in turns.items():
            figures += _figures(f"{where}: {name}", one)
        figures += _unlike(turns, where)
    return figures


def _idle_ms(running: RunningServer) -> float:
    before_s = processes.cpu_s(running.pid)
    time.sleep(_IDLE_S)
    return (processes.cpu_s(running.pid) - before_s) / _IDLE_S * 1e3


async def _turn(
    running: RunningServer, speeches: Sequence[Speech], num_streams: int, *, seed: int
) -> list[Heard]:
    """Callers that start at random within the time of one window, the same for every server."""
    generator = random.Random(seed)
    period_s = speeches[0].window_posts[1] - speeches[0].window_posts[0]
    offsets_s = [generator.random() * period_s * speeches[0].post_s for _ in range(num_streams)]
    spoken = [speeches[index % len(speeches)] for index in range(num_streams)]
    if running.server.is_ours:
        return await _turn_ours(running.server.url, spoken, offsets_s)
    return await _turn_peer(running.server.url, spoken, offsets_s)


async def _turn_ours(url: str, spoken: Sequence[Speech], offsets_s: Sequence[float]) -> list[Heard]:
    channel = wire.InferChannel(url)
    await channel.connect(_CONNECT_S)
    start_s = time.monotonic() + _LEAD_S
    try:
        return await asyncio.gather(*(
            call_ours(channel, speech, stream_id=next(_STREAM_IDS), start_s=start_s + offset_s)
            for speech, offset_s in zip(spoken, offsets_s, strict=True)
        ))  # fmt: skip
    finally:
        await channel.close()


async def _turn_peer(url: str, spoken: Sequence[Speech], offsets_s: Sequence[float]) -> list[Heard]:
    aiohttp = require("aiohttp")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        start_s = time.monotonic() + _LEAD_S
        return await asyncio.gather(*(
            call_peer(session, url, speech, start_s=start_s + offset_s)
            for speech, offset_s in zip(spoken, offsets_s, strict=True)
        ))  # fmt: skip


def _speeches(exported: ExportedModel, choices: Choices, post_s: float) -> list[Speech]:
    return [
        _speech(np.concatenate(chunks)[: round(choices.speak_s * SAMPLE_RATE)], exported, post_s)
        for chunks in utterances(quick=choices.is_quick)
    ]


def _speech(samples_S: FloatArray, exported: ExportedModel, post_s: float) -> Speech:
    """The utterance in posts. Raises ValueError for posts of which the two need different ones."""
    size = round(post_s * SAMPLE_RATE)
    num_posts = samples_S.size // size
    posts = list(samples_S[: num_posts * size].reshape(num_posts, size))
    ours, theirs = (
        _window_posts(exported.chunk_size, size, num_posts, first_samples=first)
        for first in first_window_samples(exported.chunk_size)
    )
    if ours != theirs:
        raise ValueError(
            f"with posts of {post_s:g} s the two recognisers complete their windows with "
            "different posts; choose posts of 0.16 or 0.64 s"
        )
    return Speech(posts, post_s, ours)


def first_window_samples(chunk_size: int) -> tuple[int, int]:
    """Samples until the first window is complete: ours, and the peer's server's.

    The peer's frames are centred on their shifts, and it waits for one frame more than it reads.
    """
    frames = (chunk_size - 1) * _SUBSAMPLING + _RIGHT_CONTEXT + 1
    ours = (frames - 1) * _FRAME_SHIFT + _FRAME_LENGTH
    theirs = frames * _FRAME_SHIFT + (_FRAME_SHIFT + _FRAME_LENGTH) // 2
    return ours, theirs


def _window_posts(
    chunk_size: int, post_samples: int, num_posts: int, *, first_samples: int
) -> list[int]:
    """For each window the index of the post that completes it; those within the speech."""
    stride = chunk_size * _SUBSAMPLING * _FRAME_SHIFT
    needs = itertools.count(first_samples, stride)
    posts = (-(-need // post_samples) - 1 for need in needs)
    return list(itertools.takewhile(lambda post: post < num_posts, posts))


def _figures(name: str, turns: Turns) -> list[Figure]:
    return [
        Figure(f"{name}, latency p50", "ms", turns.p50_ms),
        Figure(f"{name}, latency p95", "ms", turns.p95_ms),
        Figure(f"{name}, final p50", "ms", turns.final_p50_ms),
        Figure(f"{name}, final p95", "ms", turns.final_p95_ms),
        Figure(f"{name}, CPU", "CPU ms/audio s", turns.cpu_share),
        Figure(f"{name}, callers' CPU", "CPU ms/audio s", turns.caller_share),
    ]


def _unlike(turns: Mapping[str, Turns], where: str) -> list[Figure]:
    """Word error rates of the peer's final texts against ours, which are the first."""
    (_, ours), *others = turns.items()
    return [
        Figure(
            f"{where}: {name}, words unlike ours",
            "%",
            [float(jiwer.wer(ours.texts, one.texts)) * 100],
        )
        for name, one in others
    ]
