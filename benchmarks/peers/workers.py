"""Long-lived worker processes, each with one recogniser on its own cores; told to work by turns.

A worker that has no turn sits in a read of its pipe and uses no processor time. Ours and
sherpa-onnx play the same utterances, in the same closed loop.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from benchmarks.engine import ClosedLoop, Recogniser
from benchmarks.peers.export import ExportedModel
from benchmarks.workload import CHUNK_S, DEMO_DIRECTORY, utterances

#: After these every stream has a full history.
_WARM_UP_ROUNDS = 6
_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 300.0


class WorkerError(RuntimeError):
    """A worker failed or does not answer."""


@dataclass(frozen=True)
class Plan:
    """One process. `model` None: the project's engine, else the file that sherpa-onnx reads."""

    exported: ExportedModel
    model: Path | None
    cores: tuple[int, ...]
    max_streams: int
    is_quick: bool

    @property
    def num_threads(self) -> int:
        return len(self.cores)


@dataclass(frozen=True)
class Turn:
    """What a worker did in one turn. `cpu_s` is user and system time of all its threads."""

    audio_s: float
    wall_s: float
    cpu_s: float


class Worker:
    """The controller's end of one process."""

    def __init__(self, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(plan, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        """Raises WorkerError."""
        self._receive(_START_TIMEOUT_S)

    def prepare(self, num_streams: int) -> None:
        """A fresh loop of `num_streams`, warmed up; `answered` waits for it."""
        self._pipe.send(("prepare", num_streams))

    def go(self, seconds: float) -> None:
        """Rounds for `seconds`, the last one ends later; `answered` gives the Turn."""
        self._pipe.send(("go", seconds))

    def answered(self) -> Turn | None:
        """Raises WorkerError."""
        return self._receive(_ANSWER_TIMEOUT_S)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _receive(self, timeout_s: float) -> Turn | None:
        if not self._pipe.poll(timeout_s):
            raise WorkerError(f"a worker gives no answer within {timeout_s:g} s; see its output")
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join(1.0)
            code = self._process.exitcode
            raise WorkerError(f"a worker ended with status {code}; its output says why") from None
        return answer if isinstance(answer, Turn) else None


class Crew:
    """The processes of one arrangement of one recogniser, which share the streams evenly."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._workers = [Worker(plan) for plan in plans]
        self._busy: list[Worker] = []

    def wait_ready(self) -> None:
        for worker in self._workers:
            worker.wait_ready()

    def prepare(self, num_streams: int) -> None:
        """Deals the streams out; a process without a stream stays idle."""
        count = len(self._workers)
        shares = [num_streams // count + (i < num_streams % count) for i in range(count)]
        dealt = zip(self._workers, shares, strict=True)
        self._busy = [worker for worker, share in dealt if share]
        for worker, share in zip(self._busy, shares, strict=False):
            worker.prepare(share)
        for worker in self._busy:
            worker.answered()

    def turn(self, seconds: float) -> list[Turn]:
        """All processes at once; each one's Turn."""
        for worker in self._busy:
            worker.go(seconds)
        turns = [worker.answered() for worker in self._busy]
        return [turn for turn in turns if turn is not None]

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.stop()


def _work(plan: Plan, pipe: Connection) -> None:
    """The process's main: says that it is ready, then does as it is told until it is killed."""
    os.sched_setaffinity(0, plan.cores)
    recogniser = _load(plan)
    audio = utterances(quick=plan.is_quick)
    pipe.send("ready")
    loop, num_streams = ClosedLoop(recogniser, audio, 1), 1
    while True:
        order, value = pipe.recv()
        if order == "go":
            pipe.send(_take_turn(loop, value, num_streams=num_streams))
            continue
        recogniser.close()
        num_streams = value
        loop = ClosedLoop(recogniser, audio, num_streams)
        for _ in range(2 if plan.is_quick else _WARM_UP_ROUNDS):
            loop.round()
        pipe.send("prepared")


def _load(plan: Plan) -> Recogniser:
    if plan.model is not None:
        from benchmarks.peers.recogniser import PeerRecogniser

        return PeerRecogniser(plan.exported, plan.model, num_threads=plan.num_threads)
    import torch

    from oasr_backend.config import ServingConfig
    from oasr_backend.streaming.assemble import load_engine

    torch.set_num_threads(plan.num_threads)
    config = ServingConfig.of(
        max_streams=plan.max_streams,
        chunk_size=plan.exported.chunk_size,
        num_left_chunks=plan.exported.num_left_chunks,
    )
    return load_engine(DEMO_DIRECTORY, config, device="cpu")


def _take_turn(loop: ClosedLoop, seconds: float, *, num_streams: int) -> Turn:
    num_rounds, cpu_s, started_s = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        loop.round()
        num_rounds += 1
    wall_s = time.perf_counter() - started_s
    return Turn(num_rounds * num_streams * CHUNK_S, wall_s, time.process_time() - cpu_s)
