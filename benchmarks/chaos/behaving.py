"""Clients that do everything right, through the shipped client: their texts must be exact."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oasr_client import AsyncStreamingClient, ClientError, DeadlineError, RetryPolicy

from benchmarks.chaos.server import MODEL_NAME
from benchmarks.chaos.speech import Clip

_CHUNK_CHOICES_MS = (320.0, 640.0, 1000.0)
#: A client may ask a full server again, but must not repair a lost stream unseen.
_RETRY = RetryPolicy(start_attempts=8, max_restarts=0)


@dataclass
class Outcome:
    """The counts of all behaving clients together."""

    texts_by_client: Counter[int] = field(default_factory=Counter)
    wrong_texts: list[str] = field(default_factory=list)
    deadline_misses: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    chunk_s: array[float] = field(default_factory=lambda: array("d"))
    final_s: array[float] = field(default_factory=lambda: array("d"))

    @property
    def num_texts(self) -> int:
        return self.texts_by_client.total()

    def note_error(self, error: ClientError) -> None:
        if isinstance(error, DeadlineError):
            self.deadline_misses += 1
        self.errors[f"{type(error).__name__}: {str(error)[:160]}"] += 1


@dataclass(frozen=True)
class Manners:
    """`speed` is audio seconds per second of each client; `is_over` ends its last utterance."""

    url: str
    clips: Sequence[Clip]
    speed: float
    deadline_s: float
    is_over: Callable[[], bool]


async def behave(manners: Manners, outcome: Outcome, seed: int) -> None:
    """One client: an utterance after the other until the run is over."""
    chance = random.Random(seed)
    async with AsyncStreamingClient(
        manners.url, model_name=MODEL_NAME, timeout_s=manners.deadline_s, retry=_RETRY
    ) as client:
        await asyncio.sleep(chance.random())
        while not manners.is_over():
            clip, chunk_ms = chance.choice(manners.clips), chance.choice(_CHUNK_CHOICES_MS)
            try:
                text = await _utter(client, clip, chunk_ms, manners=manners, outcome=outcome)
            except ClientError as error:
                outcome.note_error(error)
                continue
            outcome.texts_by_client[seed] += 1
            if text != clip.text:
                outcome.wrong_texts.append(f"{clip.name}: {text!r} instead of {clip.text!r}")


async def _utter(
    client: AsyncStreamingClient,
    clip: Clip,
    chunk_ms: float,
    *,
    manners: Manners,
    outcome: Outcome,
) -> str:
    stream_id = f"behaving-{uuid.uuid4()}"
    async with client.stream(stream_id) as stream:
        due_s = time.monotonic()
        for chunk in clip.chunks(chunk_ms):
            due_s += chunk_ms / 1000 / manners.speed
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            sent_s = time.monotonic()
            await stream.send(chunk)
            outcome.chunk_s.append(time.monotonic() - sent_s)
        sent_s = time.monotonic()
        text = str((await stream.finish()).text)
        outcome.final_s.append(time.monotonic() - sent_s)
    return text
