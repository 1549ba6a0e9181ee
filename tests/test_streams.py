"""The registry begins and ends a stream properly, whatever its caller does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from oasr_backend.errors import (
    PoolExhaustedError,
    StreamLimitError,
    UnknownStreamError,
)
from oasr_backend.features import AudioBuffer
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.streams import Stream, StreamRegistry
from tests.engine_helpers import golden_engine

ENGINE = golden_engine()


def registry(max_streams: int = 2) -> StreamRegistry:
    return StreamRegistry(
        max_streams=max_streams,
        idle_timeout_s=90.0,
        store=ENGINE.store,
        new_buffer=lambda: AudioBuffer(ENGINE.parts.geometry),
    )


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    yield
    ENGINE.check_integrity()
    assert ENGINE.store.decoders.num_streams == 0


def test_every_stream_gets_a_generation_of_its_own() -> None:
    streams = registry()
    first = streams.open("a", StreamOptions(), now_s=0.0)
    streams.close(first)
    second = streams.open("a", StreamOptions(), now_s=0.0)
    assert second.generation > first.generation
    streams.close(first)
    assert streams.get("a", now_s=1.0) is second, "closing an old generation spares the new one"
    streams.close(second)
    streams.close(second)
    assert len(streams) == 0


def test_the_limit_is_named_with_the_remedy() -> None:
    streams = registry()
    opened = [streams.open(name, StreamOptions(), now_s=0.0) for name in ("a", 1)]
    assert streams.is_full
    with pytest.raises(StreamLimitError, match=r"2 .*max_streams"):
        streams.open("b", StreamOptions(), now_s=0.0)
    for stream in opened:
        streams.close(stream)
    assert not streams.is_full


def test_rows_that_were_lost_are_told_with_what_brings_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = golden_engine(max_streams=2).store
    slot = store.open(StreamOptions())
    close = store.decoders.close

    def failing_close(slot: int) -> None:
        close(slot)
        raise RuntimeError("no such row")

    with monkeypatch.context() as patch:
        patch.setattr(store.decoders, "close", failing_close)
        with pytest.raises(RuntimeError, match="no such row"):
            store.close(slot)
    other = store.open(StreamOptions())
    with pytest.raises(StreamLimitError, match=r"open: 1 of 2, rows lost .*: 1; a reload"):
        store.open(StreamOptions())
    store.close(other)
    store.close(store.open(StreamOptions()))


def test_an_unknown_stream_is_told_why_and_what_to_do() -> None:
    with pytest.raises(UnknownStreamError, match=r"42.*90 s.*send START"):
        registry().get(42, now_s=0.0)


def test_looking_a_stream_up_counts_as_hearing_from_it() -> None:
    streams = registry()
    early = streams.open("early", StreamOptions(), now_s=0.0)
    late = streams.open("late", StreamOptions(), now_s=0.0)
    streams.get("late", now_s=50.0)
    assert streams.close_idle(before_s=50.0) == [early]
    assert list(streams) == [late]
    assert streams.close_idle(before_s=51.0) == [late]


def test_a_released_stream_keeps_its_id_and_nothing_else() -> None:
    streams = registry()
    stream = streams.open("a", StreamOptions(), now_s=0.0)
    stream.accept(np.zeros(20000, np.float32), is_last=False, tail_padding=True)
    assert stream.has_ready_window
    streams.release(stream)
    assert not stream.has_ready_window
    assert streams.get("a", now_s=0.0) is stream
    streams.close(stream)
    assert "a" not in streams


def test_a_stream_whose_caches_find_no_room_is_not_registered() -> None:
    streams, store = registry(), ENGINE.store
    taken = [store.open(StreamOptions()) for _ in range(store.slots.num_free_slots)]
    with pytest.raises(PoolExhaustedError):
        streams.open("a", StreamOptions(), now_s=0.0)
    assert len(streams) == 0
    for slot in taken:
        store.close(slot)


@pytest.mark.parametrize(("rate", "seconds"), [(8000, 0.5), (16000, 1.0), (44100, 0.25)])
def test_seconds_are_counted_at_the_rate_of_the_caller(rate: int, seconds: float) -> None:
    streams = registry()
    stream = streams.open("a", StreamOptions(sample_rate=rate), now_s=0.0)
    samples_S = np.zeros(round(rate * seconds), np.float32)
    stream.accept(samples_S, is_last=True, tail_padding=True)
    assert stream.audio_s == pytest.approx(seconds)
    assert stream.audio.heard_samples == pytest.approx(16000 * seconds, abs=2)
    streams.close(stream)


def test_numbers_advance_with_each_accepted_chunk() -> None:
    streams = registry()
    stream: Stream = streams.open("a", StreamOptions(), now_s=0.0)
    stream.next_chunk_seq = 3
    stream.accept(np.zeros(10, np.float32), is_last=False, tail_padding=True)
    assert stream.next_chunk_seq == 4
    assert "chunk_seq=3, expected 4" in str(stream.wrong_chunk_seq(3))
    streams.close(stream)
