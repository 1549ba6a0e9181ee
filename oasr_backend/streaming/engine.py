"""The order of things: requests in, answers out, one batched step for all that are ready.

State changes at four moments only: open, prepare, commit, close. A failure between prepare and
commit closes the streams of that step and touches no other.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from oasr_backend.checkpoints import Checkpoint, load_wenet
from oasr_backend.config import ServingConfig
from oasr_backend.decoders.base import Finish
from oasr_backend.decoders.group import decoder_config, load_language_model
from oasr_backend.device import on_device
from oasr_backend.errors import DeviceLostError, OasrError, StepFailedError
from oasr_backend.features import AudioBuffer
from oasr_backend.metrics import EngineMetrics, Reading
from oasr_backend.models.acoustic_model import ModelOutput
from oasr_backend.streaming.admission import Admission
from oasr_backend.streaming.assemble import build_rescorer
from oasr_backend.streaming.batching import StepBatch, next_batch, split_step, stack_windows
from oasr_backend.streaming.fair_lock import FairLock
from oasr_backend.streaming.refusal_log import RefusalLog
from oasr_backend.streaming.results import ResultBuilder
from oasr_backend.streaming.runner import EncoderRunner, is_device_lost
from oasr_backend.streaming.self_test import SelfTest
from oasr_backend.streaming.store import StreamCaches, build_cache_config
from oasr_backend.streaming.streams import Stream, StreamRegistry
from oasr_backend.streaming.turns import Turn, TurnQueues
from oasr_backend.types import AudioChunk, ChunkResult

logger = logging.getLogger(__name__)

#: Windows that an END in whole chunks leaves behind the one that it fills: with tail padding, two.
_LAST_WINDOWS = 2


@dataclass
class _Launched:
    """Streams whose step the device works on; `finish` is None where that failed."""

    streams: Sequence[Stream]
    begin_s: float
    finish: Finish | None = None


class Engine:
    """Serves many streams with one model. Thread-safe: every public call takes the lock.

    `submit` admits requests, `step` advances every stream that has a full window by one, and a turn
    is done once its stream has none left. `process` does all of it for callers that can wait.

    While the model or the attention decoder runs the lock is free, so that nobody waits for a step
    to be told no. What the step works on stays as it is: a stream's next request waits behind the
    one that is served.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ServingConfig,
        *,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config.with_defaults(on_gpu=device.type == "cuda")
        model = checkpoint.model
        dtype = getattr(torch, config.model.dtype)
        cache_config = build_cache_config(config, model.spec, device=device, dtype=dtype)
        most_positions = max(config.cache.position_limit_frames, cache_config.max_stream_frames)
        model.prepare(
            device=device, dtype=dtype, num_positions=most_positions + config.cache.chunk_size
        )
        self.config = config
        self.model = model
        self.geometry = model.window_geometry(config.cache.chunk_size)
        self.caches = StreamCaches(
            cache_config,
            decoder_config(config, model.blank_id),
            tokenizer=checkpoint.tokenizer,
            vocab_size=model.vocab_size,
            rescorer=build_rescorer(
                checkpoint.decoder, config, cache_config, frame_s=self.geometry.encoder_frame_s
            ),
            language_model=load_language_model(config, checkpoint.tokenizer, device),
        )
        self.metrics = EngineMetrics()
        self.streams = StreamRegistry(
            max_streams=config.step.max_streams,
            idle_timeout_s=config.server.stream_idle_timeout_s,
            open_context=self.caches.open,
            new_buffer=lambda: AudioBuffer(self.geometry),
        )
        self._admission = Admission(
            self.streams, config, self.metrics, check_options=self.caches.ctc.check
        )
        self._runner = EncoderRunner(
            model,
            self.caches,
            window_shape=(config.step.max_step_streams, self.geometry.window_samples),
        )
        if config.step.cuda_graphs:
            self._runner.capture()
        self._results = ResultBuilder(
            checkpoint.tokenizer, self.caches.ctc, frame_s=self.geometry.encoder_frame_s
        )
        self._clock = clock
        # Taken in this order: whoever steps or wants no step to go on, then whoever looks.
        self._stepping = FairLock()
        self._lock = FairLock()
        self._turns = TurnQueues()
        self._refusals = RefusalLog(clock)
        self._landed_s = 0.0
        self._step_begin_s: float | None = None
        self._lost: DeviceLostError | None = None

    @classmethod
    def load(cls, checkpoint_dir: str | Path, config: ServingConfig, *, device: str) -> Engine:
        """Loads a checkpoint directory and gets ready to serve it on `device`.

        Raises ConfigError: what cannot be loaded, or cannot decode a short utterance, is not ready.
        """
        if config.search.lm_path:
            config = config.changed(lm_path=str(Path(checkpoint_dir, config.search.lm_path)))
        with on_device(torch.device(device)):
            engine = cls(load_wenet(checkpoint_dir), config, device=torch.device(device))
            engine.test_itself()
        return engine

    def test_itself(self) -> None:
        """One short utterance, which leaves nothing behind. Raises SelfTestError."""
        with self._stepping, self._lock:
            SelfTest(self.caches, self._runner, self._results, self.geometry, self.config).run()

    @property
    def is_healthy(self) -> bool:
        """False once the device cannot be used any more; every request then says so."""
        return self._lost is None

    @property
    def step_age_s(self) -> float:
        """Seconds since the step in progress began; 0 between two steps."""
        begin_s = self._step_begin_s
        return 0.0 if begin_s is None else time.monotonic() - begin_s

    def process(self, requests: Sequence[AudioChunk]) -> list[ChunkResult]:
        """One answer per request, in their order; never raises for one stream's fault."""
        turns = self.submit(requests)
        while not all(turn.is_done for turn in turns):
            self.step()
        return [turn.result for turn in turns if turn.result is not None]

    def submit(self, requests: Sequence[AudioChunk]) -> list[Turn]:
        """Admits requests; a turn that needs no decoding is done at once.

        Triton keeps one request of a sequence in flight. So a START that shares a list with a
        continuation or END of a live stream of that id begins the *next* stream: it comes later.
        """
        with self._lock:
            turns = [Turn(request) for request in requests]
            in_order = sorted(turns, key=self._begins_anew)
            heads = [turn for turn in in_order if self._turns.push(turn)]
            now_s = self._clock()
            for turn in heads:
                self._admit(turn, now_s)
            with self._failing_whole([turn.stream for turn in heads if turn.stream]):
                self._settle(heads)
            return turns

    def step(self) -> None:
        """One window of every stream that is ready, as far as the step's width goes.

        Raises nothing: what goes wrong is the answer of those who took part and have none yet.
        """
        with self._in_step():
            ready: Sequence[Stream] = []
            with self._failing_whole(self._waiting()):
                ready = next_batch(
                    self._waiting(), max_step_streams=self.config.step.max_step_streams
                )
            with self._failing_whole(ready), on_device(self.caches.config.device):
                if going_on := self._without_full(ready):
                    self._turns.stepped(going_on)
                    self._step(going_on)

    def close_idle(self) -> int:
        """Frees streams whose callers went silent; one with a request in hand is not silent."""
        with self._lock:
            return self._admission.reap(
                before_s=self._clock() - self.config.server.stream_idle_timeout_s
            )

    def close(self) -> None:
        """Answers what is still waiting with an error and frees every stream."""
        with self._stepping, self._lock:
            for turn in self._turns.all():
                self._refuse(
                    turn, StepFailedError("the server unloads this model; send START again")
                )
            self._turns.clear()
            for stream in self.streams:
                self._admission.abort(stream, reason="unload")

    def readings(self) -> list[Reading]:
        """Every metric now."""
        with self._lock:
            pool = self.caches.pool
            gauges = (
                ("oasr_active_streams", "Open streams", len(self.streams)),
                (
                    "oasr_max_streams",
                    "Streams that can be open at once",
                    self.config.step.max_streams,
                ),
                ("oasr_free_blocks", "K/V blocks that no stream holds", pool.num_free_blocks),
                ("oasr_used_blocks", "K/V blocks in use", pool.num_blocks - pool.num_free_blocks),
                ("oasr_healthy", "1 while the device works", int(self.is_healthy)),
            )
            readings = [Reading(name, "gauge", text, {}, value) for name, text, value in gauges]
            return [*readings, *self.metrics.readings()]

    def check_integrity(self) -> None:
        """Every cache agrees with itself."""
        with self._stepping, self._lock:
            self.caches.check_integrity()

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        with self._stepping, self._lock:
            self._step_begin_s = time.monotonic()
            try:
                yield
            finally:
                self._step_begin_s = None

    def _waiting(self) -> list[Stream]:
        """The streams of the turns that are being served, the longest-waiting first."""
        return [turn.stream for turn in self._turns.heads() if turn.stream]

    def _begins_anew(self, turn: Turn) -> bool:
        return turn.request.is_first and turn.request.stream_id in self.streams

    def _admit(self, turn: Turn, now_s: float) -> None:
        """Opens or finds the stream and gives it the samples; a refusal changes no other stream."""
        request = turn.request
        try:
            if self._lost is not None:
                raise self._lost
            turn.stream = self._admission.admit(request, now_s=now_s)
        except OasrError as error:
            self._refuse(turn, error)
        except Exception as error:
            logger.error("event=admission_failed stream=%r", request.stream_id, exc_info=error)
            self._refuse(turn, StepFailedError(f"stream {request.stream_id!r}: {error!r}"))

    def _refuse(self, turn: Turn, error: OasrError) -> None:
        self.metrics.rejected[type(error).__name__] += 1
        self._refusals.note(turn.request.stream_id, error)
        turn.result = ChunkResult(error=error.without_history())

    def _step(self, streams: Sequence[Stream]) -> None:
        """Prepare, forward, commit, answer; on a GPU one part's host work runs beside another's."""
        ahead: deque[_Launched] = deque()
        try:
            for part in self._parts(streams):
                ahead.append(self._launch(part))
                # Before the next part is made up: streams may fail as they land.
                if len(ahead) == EncoderRunner.MOST_AHEAD:
                    self._land(ahead.popleft())
        finally:
            self._land_all(ahead)

    def _land_all(self, ahead: deque[_Launched]) -> None:
        """Also those behind one that lands badly: until then the device may write to their rows."""
        try:
            while ahead:
                self._land(ahead.popleft())
        finally:
            if ahead:
                self._land_all(ahead)

    def _parts(self, streams: Sequence[Stream]) -> Iterator[Sequence[Stream]]:
        """What is launched one after the other; whoever asks for the next has launched the last.

        A stream that ends goes on to its last window: nothing else of it is to come. It is in the
        first part, so that its next window shares the second part with whoever has not stepped.
        """
        if not self._runner.runs_ahead:
            yield streams
            return
        part, left = split_step(streams)
        yield part
        for _ in range(1 + _LAST_WINDOWS):
            ending = [one for one in part if one.audio.is_finished and one.has_ready_window]
            part, left = [*left, *self._without_full(ending)], []
            if not part:
                return
            yield part

    def _launch(self, streams: Sequence[Stream]) -> _Launched:
        launched = _Launched(streams, begin_s=time.perf_counter())
        for stream in streams:
            stream.num_in_flight += 1
        with self._failing(streams):
            batch = self._prepare(streams)
            with self._lock.released():
                output = self._forward(batch)
            launched.finish = self.caches.commit(batch.generations, batch.num_frames, output)
            for stream, num_frames in zip(streams, batch.num_frames, strict=True):
                stream.num_encoder_frames += num_frames
        return launched

    def _land(self, launched: _Launched) -> None:
        if launched.finish is not None:
            with self._failing(launched.streams):
                launched.finish()
        landed_s = time.perf_counter()
        step_ms = (landed_s - launched.begin_s) * 1e3
        for stream in launched.streams:
            stream.step_ms = step_ms
            stream.num_in_flight -= 1
        # Of two parts that overlap, the time counts once.
        self.metrics.step_done(
            len(launched.streams), landed_s - max(launched.begin_s, self._landed_s)
        )
        self._landed_s = landed_s
        self._conclude(launched.streams)

    def _conclude(self, streams: Sequence[Stream]) -> None:
        """Answers those that need no further step, while the device is at the others'."""
        landed = [stream for stream in streams if not stream.num_in_flight]
        with self._failing(landed):
            self._end(landed, meanwhile=self._lock.released)
        self._settle([self._turns.head(stream.stream_id) for stream in landed])

    def _prepare(self, streams: Sequence[Stream]) -> StepBatch:
        self.caches.prepare([stream.generation for stream in streams])
        return stack_windows(streams, self.geometry, into=self._runner.next_staging())

    def _forward(self, batch: StepBatch) -> ModelOutput:
        if self.config.step.debug_slow_step_ms:
            time.sleep(self.config.step.debug_slow_step_ms / 1000)
        return self._runner.forward(batch)

    @contextmanager
    def _failing(self, streams: Sequence[Stream]) -> Iterator[None]:
        """What goes wrong inside ends these streams and no others."""
        try:
            yield
        except Exception as error:
            self._fail(streams, error)

    @contextmanager
    def _failing_whole(self, streams: Sequence[Stream]) -> Iterator[None]:
        """What goes wrong inside is at once the answer of those streams that wait for theirs."""
        try:
            yield
        except Exception as error:
            generations = {stream.generation for stream in streams}
            self._give_up(
                [turn for turn in self._turns.heads() if _serves(turn, generations)], error
            )

    def _give_up(self, heads: Sequence[Turn], error: Exception) -> None:
        """Refuses those that have no answer yet, and serves whoever waits behind them."""
        left = [(turn, turn.stream) for turn in heads if turn.stream and not turn.is_done]
        self._fail([stream for _, stream in left], error)
        for turn, stream in left:
            self._close_failed(turn, stream)
        following = self._turns.pop([turn.request.stream_id for turn in heads])
        for turn in following:
            self._admit(turn, self._clock())
        self._settle(following)

    def _fail(self, streams: Sequence[Stream], error: Exception) -> None:
        """Marks the streams of a failed step, whose rows may be half-written.

        They are closed when the device is through with them: until then nobody else gets the rows.
        """
        logger.error("event=step_failed streams=%d", len(streams), exc_info=error)
        if is_device_lost(error):
            self._lost = DeviceLostError(
                f"the device failed ({error}); this instance answers nothing until it is restarted"
            )
        for stream in streams:
            stream.failure = self._lost or StepFailedError(
                f"stream {stream.stream_id!r} ends: its step failed ({error}); send START again"
            )
            stream.audio.discard()

    def _without_full(self, streams: Sequence[Stream]) -> Sequence[Stream]:
        """Unlimited history has a ceiling; a stream that reaches it ends with its text so far."""
        if self.caches.config.evicts:
            return streams
        self._conclude([stream for stream in streams if self._ends_at_capacity(stream)])
        return [stream for stream in streams if stream.has_ready_window]

    def _ends_at_capacity(self, stream: Stream) -> bool:
        if not self.caches.attention.at_capacity(stream.generation):
            return False
        stream.finish_reason = "length"
        stream.audio.discard()
        return True

    def _end(
        self,
        streams: Iterable[Stream],
        *,
        meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """The last order of those that ended; the attention decoder runs within `meanwhile`."""
        if not self.caches.ctc.weighs_ends:
            return
        ended = [one for one in streams if one.audio.is_finished and not one.has_ready_window]
        self.caches.ctc.end(
            [one.generation for one in ended if one.failure is None], meanwhile=meanwhile
        )

    def _settle(self, heads: list[Turn]) -> None:
        """Answers those that have no window left, then admits whoever waits behind them."""
        now_s = self._clock()
        while done := [turn for turn in heads if not _needs_step(turn)]:
            self._answer([turn for turn in done if turn.result is None], now_s)
            heads = self._turns.pop([turn.request.stream_id for turn in done])
            for following in heads:
                self._admit(following, now_s)

    def _answer(self, turns: Sequence[Turn], now_s: float) -> None:
        heard: list[tuple[Turn, Stream, AudioChunk]] = []
        for turn in turns:
            stream, request = turn.stream, turn.request
            assert stream is not None
            stream.is_served, stream.last_heard_s = False, now_s
            if stream.failure is not None:
                self._close_failed(turn, stream)
                continue
            if request.is_last:
                stream.finish_reason = stream.finish_reason or "end"
            heard.append((turn, stream, request))
        try:
            self._tell(heard)
        except Exception as error:
            left = [(turn, stream) for turn, stream, _ in heard if not turn.is_done]
            self._fail([stream for _, stream in left], error)
            for turn, stream in left:
                self._close_failed(turn, stream)

    def _close_failed(self, turn: Turn, stream: Stream) -> None:
        assert stream.failure is not None
        self._refuse(turn, stream.failure)
        with self._freeing(stream):
            self._admission.abort(stream, reason="failed")

    @contextmanager
    def _freeing(self, stream: Stream) -> Iterator[None]:
        """What goes wrong inside costs the rows of this stream: it has its answer, others go on."""
        try:
            yield
        except Exception as error:
            logger.error("event=free_failed stream=%r", stream.stream_id, exc_info=error)

    def _tell(self, heard: Sequence[tuple[Turn, Stream, AudioChunk]]) -> None:
        """The text so far, or the final one; a stream that has that is finished."""
        # No step has concluded an END that came without a window.
        self._end(stream for _, stream, _ in heard)
        texts = self._results.texts([stream for _, stream, _ in heard])
        for (turn, stream, request), text in zip(heard, texts, strict=True):
            document = self._results.document(text, stream) if request.wants_result else None
            turn.result = ChunkResult(text=text, document=document)
            if stream.finish_reason:
                with self._freeing(stream):
                    self._admission.finish(stream, forget=request.is_last)


def _needs_step(turn: Turn) -> bool:
    """Whether its stream has a window left to decode."""
    stream = turn.stream
    return stream is not None and turn.result is None and stream.has_ready_window


def _serves(turn: Turn, generations: Set[int]) -> bool:
    """Whether its stream is one of these."""
    return turn.stream is not None and turn.stream.generation in generations
