"""Who gets in: everything that is checked between a request's arrival and its audio's buffering."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from oasr_backend.config import ServingConfig
from oasr_backend.decoders.group import DecoderGroup
from oasr_backend.errors import (
    ConfigError,
    InvalidRequestError,
    OasrError,
    StreamCancelledError,
    UnknownStreamError,
    shown,
)
from oasr_backend.features import decode_alaw, decode_mulaw
from oasr_backend.metrics import EngineMetrics
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.streams import NO_SLOT, Stream, StreamRegistry
from oasr_backend.types import AudioChunk, Pcm16, Samples

logger = logging.getLogger(__name__)

#: No audio in [-1, 1] has more power; a chunk that does is counted, never rescaled.
_FULL_POWER = 1.0
#: 32-bit PCM without its scale. What is beyond would overflow a power spectrum into NaN.
_LARGEST = 2.0**31
#: The first bytes of a WAV file, read as samples of either type.
_RIFF_PCM16 = tuple(np.frombuffer(b"RIFF", "<i2").tolist())
_RIFF_FP32 = tuple(np.frombuffer(b"RIFF", "<f4").tolist())
_DECODE = {"mulaw": decode_mulaw, "alaw": decode_alaw}


class Admission:
    """Opens, finds, refuses, reaps and finishes streams; logs and counts what it does."""

    def __init__(
        self,
        streams: StreamRegistry,
        decoders: DecoderGroup,
        config: ServingConfig,
        metrics: EngineMetrics,
    ) -> None:
        """`decoders` tell which options this model can honour.

        Raises ConfigError when the server's own defaults are not of that kind.
        """
        self._streams = streams
        self._config = config
        self._metrics = metrics
        self._decoders = decoders
        try:
            #: What a stream gets that asks for nothing.
            self.defaults = decoders.resolve(config.defaults)
            decoders.check(self.defaults)
        except InvalidRequestError as error:
            raise ConfigError(f"the defaults of the server's streams: {error}") from error

    def admit(self, chunk: AudioChunk, *, now_s: float) -> Stream:
        """The chunk's stream, with the samples buffered.

        Raises an OasrError that concerns this request alone. The stream is then as it was before;
        it ends only where its caller cannot continue it: at START, at END and when cancelled.
        """
        try:
            stream = self._open(chunk, now_s) if chunk.is_first else self._find(chunk, now_s)
            self._accept(stream, chunk)
        except OasrError as error:
            raise self._refusal(chunk, error.without_history()) from None
        stream.is_served = True
        self._metrics.audio_s += chunk.samples_S.size / stream.options.sample_rate
        return stream

    def _refusal(self, chunk: AudioChunk, error: OasrError) -> OasrError:
        """The error with what becomes of the stream, which is closed if it cannot go on."""
        is_cancelled = isinstance(error, StreamCancelledError)
        stream = self._streams.find(chunk.stream_id)
        if stream is not None and (chunk.is_first or chunk.is_last or is_cancelled):
            self._close(stream, reason="cancelled" if is_cancelled else "refused")
        if not isinstance(error, InvalidRequestError) or isinstance(error, UnknownStreamError):
            return error
        return type(error)(f"{error}. {_fate(chunk)}")

    def finish(self, stream: Stream, *, forget: bool) -> None:
        """Frees a stream that has its final text; `forget` False keeps its id to explain itself."""
        if forget:
            self._close(stream, reason=stream.finish_reason or "end")
        else:
            self._streams.release(stream)
            self._count_end(stream, reason=stream.finish_reason or "end")

    def abort(self, stream: Stream, *, reason: str) -> None:
        """Frees a stream that ends by no request of its own."""
        self._close(stream, reason=reason)

    def reap_idle(self, *, now_s: float) -> int:
        """Frees streams that have been silent for too long; returns how many."""
        limit_s = self._config.server.stream_idle_timeout_s
        return self._reap(before_s=now_s - limit_s, reason="idle")

    def _reap(self, *, before_s: float, reason: str) -> int:
        idle = self._streams.close_idle(before_s=before_s)
        for stream in idle:
            # One with a reason was counted when it ended; only its id was left.
            if stream.finish_reason is None:
                self._metrics.streams_reaped += 1
                self._log_end("stream_reaped", stream, reason)
        return len(idle)

    def _open(self, chunk: AudioChunk, now_s: float) -> Stream:
        previous = self._streams.find(chunk.stream_id)
        if previous is not None:
            # Also when the START itself is refused: for Triton the old sequence has ended.
            self._metrics.conflicts += 1
            self._close(previous, reason="replaced")
        if chunk.fault is not None:
            raise chunk.fault
        options = self.defaults
        if chunk.options is not None:
            options = self._decoders.resolve(chunk.options)
            self._check_language(options)
            self._decoders.check(options)
        if self._streams.is_full:
            # Triton forgets a silent sequence before we do: a stream past that limit is dead.
            self._reap(before_s=now_s - self._config.server.dead_after_s, reason="evicted")
        stream = self._streams.open(chunk.stream_id, options, now_s=now_s)
        stream.next_chunk_seq = chunk.chunk_seq
        self._metrics.streams_opened += 1
        logger.info(
            "event=stream_open stream=%r generation=%d", stream.stream_id, stream.generation
        )
        return stream

    def _check_language(self, options: StreamOptions) -> None:
        if options.language not in ("", self._config.model.language):
            known = (
                repr(self._config.model.language) if self._config.model.language else "not named"
            )
            raise InvalidRequestError(
                f"language={shown(options.language)}: this model has one language ({known}); leave "
                "language out"
            )

    def _find(self, chunk: AudioChunk, now_s: float) -> Stream:
        stream = self._streams.get(chunk.stream_id, now_s=now_s)
        if chunk.fault is not None:
            raise chunk.fault
        if chunk.options is not None:
            raise InvalidRequestError(
                f"stream {stream.stream_id!r}: options came after START; send them with its first "
                "request"
            )
        return stream

    def _accept(self, stream: Stream, chunk: AudioChunk) -> None:
        if stream.slot == NO_SLOT:
            raise UnknownStreamError(
                f"stream {stream.stream_id!r} ended at {stream.num_encoder_frames} frames "
                f"(finish_reason {stream.finish_reason!r}); send START to begin a new one"
            )
        if chunk.chunk_seq != stream.next_chunk_seq:
            raise stream.wrong_chunk_seq(chunk.chunk_seq)
        samples_S = self._checked_samples(stream, chunk)
        stream.accept(
            samples_S, is_last=chunk.is_last, tail_padding=self._config.server.tail_padding
        )
        # To ask is a round trip to the server: it pays where a step, or a whole stream, is spared.
        is_worth_asking = chunk.is_first or chunk.is_last or stream.has_ready_window
        if is_worth_asking and chunk.is_cancelled():
            raise StreamCancelledError(f"stream {stream.stream_id!r}: the request was cancelled")

    def _checked_samples(self, stream: Stream, chunk: AudioChunk) -> Samples | Pcm16:
        samples_S = chunk.samples_S
        encoding = stream.options.encoding
        if encoding != "pcm":
            return _DECODE[encoding](_g711_codes(stream, chunk))
        if not chunk.is_pcm16:
            self._check_range(stream, samples_S)
        if chunk.is_first and _begins_with_riff(chunk):
            raise InvalidRequestError(
                f"stream {stream.stream_id!r} begins with a RIFF header: send samples, not a WAV "
                "file; strip the header or let the client read the file"
            )
        return samples_S

    def _check_range(self, stream: Stream, samples_S: Samples | Pcm16) -> None:
        # One pass, and false for NaN too: what is looked at twice is rare.
        if np.dot(samples_S, samples_S) <= samples_S.size * _FULL_POWER:
            return
        is_sound = np.abs(samples_S) <= _LARGEST
        if not is_sound.all():
            position = int(is_sound.argmin())
            raise InvalidRequestError(
                f"stream {stream.stream_id!r}: sample {position} is {samples_S[position]:g}; send "
                "finite values in [-1, 1]"
            )
        self._metrics.loud_chunks += 1

    def _close(self, stream: Stream, *, reason: str) -> None:
        has_ended = stream.slot == NO_SLOT
        self._streams.close(stream)
        if not has_ended:
            self._count_end(stream, reason=reason)

    def _count_end(self, stream: Stream, *, reason: str) -> None:
        self._metrics.finished[reason] += 1
        self._log_end("stream_close", stream, reason)

    def _log_end(self, event: str, stream: Stream, reason: str) -> None:
        logger.info(
            "event=%s stream=%r generation=%d reason=%s audio_s=%.2f",
            event,
            stream.stream_id,
            stream.generation,
            reason,
            stream.audio_s,
        )


def _fate(chunk: AudioChunk) -> str:
    if chunk.is_first:
        return "Nothing is open under this id now"
    if chunk.is_last:
        return "The stream is closed too, since Triton has ended its sequence"
    return "The stream goes on without this request"


def _begins_with_riff(chunk: AudioChunk) -> bool:
    riff = _RIFF_PCM16 if chunk.is_pcm16 else _RIFF_FP32
    return tuple(chunk.samples_S[: len(riff)].tolist()) == riff


def _g711_codes(stream: Stream, chunk: AudioChunk) -> npt.NDArray[np.uint8]:
    codes_S = chunk.samples_S
    is_byte = chunk.is_pcm16 and ((codes_S >= 0) & (codes_S <= 255)).all()
    if codes_S.size and not is_byte:
        raise InvalidRequestError(
            f"stream {stream.stream_id!r}: encoding={stream.options.encoding!r} takes one code of "
            "0 .. 255 in each element of PCM16; send codes, or leave encoding out for samples"
        )
    return codes_S.astype(np.uint8)
