"""One live caller of each server: posts audio as it becomes due, and notes when it is answered.

Shapes: S samples of a post.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load import wire
from benchmarks.peers.packages import require
from benchmarks.workload import MODEL_NAME, FloatArray

_DEADLINE_S = 60.0
_DONE = "Done!"


class CallError(RuntimeError):
    """A server ended a call, or answered otherwise than it should."""


@dataclass(frozen=True)
class Speech:
    """What a caller says. `window_posts[k]` is the post that completes window k."""

    posts: Sequence[FloatArray]
    post_s: float
    window_posts: Sequence[int]

    @property
    def duration_s(self) -> float:
        return len(self.posts) * self.post_s

    def due_s(self, post: int) -> float:
        """Seconds after the caller's start when the post's last sample has been spoken."""
        return (post + 1) * self.post_s


@dataclass
class Heard:
    """Latencies from the moment a post was due, in seconds, and the final text."""

    window_s: list[float] = field(default_factory=list)
    final_s: float = 0.0
    text: str = ""


async def call_ours(
    channel: wire.InferChannel, speech: Speech, *, stream_id: int, start_s: float
) -> Heard:
    """A request a post over one gRPC stream; a window is answered with the post that completes it.

    A post waits for the answer to the one before, as a sequence of Triton wants it; latencies
    count from when it was due.
    """
    heard, stream = Heard(), channel.open_stream()
    head, last = wire.head(MODEL_NAME, stream_id), len(speech.posts) - 1
    completing = set(speech.window_posts)
    for post, samples_S in enumerate(speech.posts):
        flags = (wire.START if post == 0 else b"") + (wire.END if post == last else b"")
        due_s = start_s + speech.due_s(post)
        await sleep_until(due_s)
        heard.text = await stream.ask(head + flags + wire.body(samples_S, "fp32"), _DEADLINE_S)
        if post in completing:
            heard.window_s.append(time.monotonic() - due_s)
    heard.final_s = time.monotonic() - due_s
    return heard


async def call_peer(session: Any, url: str, speech: Speech, *, start_s: float) -> Heard:
    """Posts without waiting. The server sends a message for each window that it has decoded.

    Raises CallError when it sends fewer than there are windows, or ends the call too early.
    """
    heard = Heard()
    async with session.ws_connect(url, max_msg_size=0) as socket:
        speaking = asyncio.create_task(_speak(socket, speech, start_s))
        try:
            listening = _listen(socket, speech, heard, start_s)
            await asyncio.wait_for(listening, speech.duration_s + _DEADLINE_S)
            await speaking
        finally:
            speaking.cancel()
    if len(heard.window_s) < len(speech.window_posts):
        raise CallError(
            f"{url} answered {len(heard.window_s)} of {len(speech.window_posts)} windows"
        )
    return heard


async def _speak(socket: Any, speech: Speech, start_s: float) -> None:
    for post, samples_S in enumerate(speech.posts):
        await sleep_until(start_s + speech.due_s(post))
        await socket.send_bytes(samples_S.tobytes())
    await socket.send_str("Done")


async def _listen(socket: Any, speech: Speech, heard: Heard, start_s: float) -> None:
    text_kind = require("aiohttp").WSMsgType.TEXT
    async for message in socket:
        now_s = time.monotonic()
        if message.type is not text_kind:
            raise CallError(f"a message of type {message.type}; the server sends text alone")
        if message.data == _DONE:
            return
        window = len(heard.window_s)
        if window < len(speech.window_posts):
            due_s = start_s + speech.due_s(speech.window_posts[window])
            heard.window_s.append(now_s - due_s)
        heard.text = json.loads(message.data)["text"].strip()
        # The last of them is the final text.
        heard.final_s = now_s - start_s - speech.duration_s
    raise CallError("the server closed the connection before it said that it is done")


async def sleep_until(instant_s: float) -> None:
    while (left_s := instant_s - time.monotonic()) > 0:
        await asyncio.sleep(left_s)
