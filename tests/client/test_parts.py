"""Streams that the server hears in several parts: what is sent again and what is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oasr_client.errors import ClientError, OverloadedError, StreamEndedError, StreamLostError
from oasr_client.parts import Parts
from oasr_client.session import (
    Pause,
    RetryPolicy,
    Session,
    StreamUpdate,
    advance,
)
from oasr_client.wire import ChunkRequest, Reply

RATE_HZ = 16000
STEP = 640
STEP_S = STEP / RATE_HZ


class CappedServer:
    """Decodes whole steps of 640 samples, at most `max_steps` a stream; the text is their first
    sample's value. `script` holds failures for the first requests.
    """

    def __init__(self, max_steps: int, *script: ClientError | None) -> None:
        self.max_steps = max_steps
        self.script = list(script)
        self.starts: list[int] = []
        self.samples = np.empty(0, np.int16)

    def perform(self, request: ChunkRequest) -> Reply | ClientError:
        failure = self.script.pop(0) if self.script else None
        if failure is not None:
            return failure
        if request.is_start:
            self.samples = np.empty(0, np.int16)
            self.starts.append(int(request.samples[0]) if request.samples.size else -1)
        self.samples = np.concatenate([self.samples, request.samples])
        return self.answer(is_end=request.is_end)

    def answer(self, *, is_end: bool) -> Reply:
        size = self.samples.size
        num_steps = -(-size // STEP) if is_end else size // STEP
        is_full = num_steps > self.max_steps
        num_steps = min(num_steps, self.max_steps)
        decoded_s = min(num_steps * STEP, size) / RATE_HZ
        words = [str(self.samples[n * STEP]) for n in range(num_steps)]
        entries = [
            {"word": word, "start_s": n * STEP_S, "end_s": (n + 1) * STEP_S}
            for n, word in enumerate(words)
        ]
        document = {
            "text": " ".join(words),
            "is_final": is_end or is_full,
            "finish_reason": "length" if is_full else "end" if is_end else None,
            "audio_s": size / RATE_HZ,
            "decoded_s": decoded_s,
            "num_frames": num_steps,
            "words": entries,
        }
        return Reply(" ".join(words), document)


def session(**policy: Any) -> Session:
    retry = RetryPolicy(backoff_s=0.0, **policy)
    return Session(7, dtype="pcm16", options={}, policy=retry)


def run(stream: Session, server: CappedServer, samples: Any, *, is_last: bool) -> StreamUpdate:
    exchange = stream.exchange(np.asarray(samples, np.int16), is_last=is_last)
    step = advance(exchange)
    while not isinstance(step, StreamUpdate):
        step = advance(exchange, None if isinstance(step, Pause) else server.perform(step))
    return step


NUM_SAMPLES = 10 * STEP + 320
RAMP = np.arange(NUM_SAMPLES, dtype=np.int16)
WORDS = [str(n * STEP) for n in range(11)]


CHUNKS = [200, 640, 1600, 1919, 1920, 1921, NUM_SAMPLES]


def unheard(seconds: float, begin_s: float) -> str:
    return f"{seconds:.2f} s of the audio sent, from {begin_s:.2f} s on, were not heard"


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("max_steps", [1, 3, 10, 11])
def test_every_sample_is_decoded_once_however_the_audio_is_cut(chunk: int, max_steps: int) -> None:
    server, stream = CappedServer(max_steps), session()
    *firsts, last = np.split(RAMP, range(chunk, RAMP.size, chunk))
    updates = [run(stream, server, part, is_last=False) for part in firsts]
    final = run(stream, server, last, is_last=True)
    assert final.text.split() == WORDS
    assert not any(update.is_final for update in updates)
    document = final.result
    assert document is not None
    assert [word["word"] for word in document["words"]] == WORDS
    assert [word["start_s"] for word in document["words"]] == [
        round(n * STEP_S, 3) for n in range(11)
    ]
    assert document["text"] == final.text
    assert document["audio_s"] == document["decoded_s"] == round(NUM_SAMPLES / RATE_HZ, 3)
    assert (document["is_final"], document["finish_reason"]) == (True, "end")
    assert document["num_frames"] == 11
    assert server.starts == list(range(0, NUM_SAMPLES, max_steps * STEP))
    assert final.segment == len(server.starts) - 1


def test_a_part_that_is_over_does_not_end_the_stream() -> None:
    server, stream = CappedServer(3), session()
    update = run(stream, server, RAMP[:1921], is_last=False)
    assert update.result is not None
    over = run(stream, server, RAMP[1921:3000], is_last=False)
    assert (over.is_final, over.result["is_final"]) == (False, False)  # type: ignore[index]
    assert over.result["finish_reason"] is None  # type: ignore[index]


def test_a_lost_stream_too_long_to_send_again_goes_on_behind_what_was_decoded() -> None:
    server = CappedServer(100, None, StreamLostError("idle"))
    stream = session(replay_limit_s=STEP_S)
    run(stream, server, RAMP[: STEP + 900], is_last=False)
    final = run(stream, server, RAMP[STEP + 900 : 4 * STEP], is_last=True)
    assert server.starts == [0, 2 * STEP]
    assert final.text.split() == WORDS[:4]
    assert final.result is not None
    assert [word["start_s"] for word in final.result["words"]] == [
        round(n * STEP_S, 3) for n in range(4)
    ]


def test_what_was_not_heard_is_told_where_the_stream_may_not_go_on() -> None:
    stream = session(max_restarts=0)
    with pytest.raises(StreamEndedError, match=unheard(0.16, 0.08)):
        run(stream, CappedServer(2), RAMP[: 6 * STEP], is_last=True)


def test_what_was_not_heard_is_told_where_the_server_decodes_nothing() -> None:
    with pytest.raises(StreamEndedError, match=unheard(0.24, 0.00)):
        run(session(), CappedServer(0), RAMP[: 6 * STEP], is_last=False)


def test_what_was_not_heard_is_told_where_no_further_part_is_let_in() -> None:
    server = CappedServer(6, None, OverloadedError("all streams are in use"))
    with pytest.raises(OverloadedError, match=unheard(0.08, 0.24)):
        run(session(), server, RAMP[: 8 * STEP], is_last=True)


def test_a_withheld_text_is_not_taken_for_the_whole_one() -> None:
    server = CappedServer(100, None, StreamLostError("idle"))
    policy = RetryPolicy(replay_limit_s=STEP_S)
    stream = Session(7, dtype="pcm16", options={"partials": "off"}, policy=policy)
    run(stream, server, RAMP[: STEP + 900], is_last=False)
    with pytest.raises(StreamLostError):
        run(stream, server, RAMP[STEP + 900 : 4 * STEP], is_last=True)


def test_documents_of_parts_become_one() -> None:
    parts = Parts()
    first = {"id": 1, "start_s": 0.5, "end_s": 1.0}
    still_open = {"text": "A B", "start_s": 0.5, "end_s": 1.0, "is_final": False, "reason": None}
    nbest = [
        {"text": "A B", "score": -1.0, "tokens": [1, 2]},
        {"text": "A", "score": -2.0, "tokens": [1]},
    ]
    lost = {"text": "A B", "audio_s": 2.5, "decoded_s": 2.0, "num_frames": 50}
    parts.close("A B", {**lost, "tokens": [first], "segments": [still_open], "nbest": nbest})
    again = {"text": "C", "score": -0.5, "tokens": [3]}
    later = {"text": "C", "audio_s": 1.0, "decoded_s": 0.64, "num_frames": 16, "step_ms": 1.0}
    document = parts.document({**later, "tokens": [first], "segments": [], "nbest": [again]})
    assert document == {
        "text": "A B C",
        "audio_s": 3.0,
        "decoded_s": 2.64,
        "num_frames": 66,
        "step_ms": 1.0,
        "tokens": [first, {"id": 1, "start_s": 2.5, "end_s": 3.0}],
        "segments": [{**still_open, "is_final": True, "reason": "restart"}],
        "nbest": [{"text": "A B C", "score": -1.5, "tokens": [1, 2, 3]}],
    }


def test_the_n_best_list_is_left_out_where_a_part_had_none() -> None:
    parts = Parts()
    parts.close("A", {"text": "A", "audio_s": 1.0, "decoded_s": 1.0})
    assert "nbest" not in parts.document({"text": "C", "nbest": []})


def test_a_text_is_rescored_where_every_part_of_it_was() -> None:
    parts = Parts()
    parts.close("A", {"rescored": True})
    assert parts.document({"rescored": True})["rescored"]
    parts.close("B", {"rescored": False})
    assert not parts.document({"rescored": True})["rescored"]


def test_what_was_not_decoded_at_all_is_sent_again_and_moves_nothing() -> None:
    parts = Parts()
    parts.close("", {"audio_s": 0.02, "decoded_s": 0.0, "num_frames": 0})
    words = [{"word": "A", "start_s": 0.5, "end_s": 0.6}]
    told = parts.document({"text": "A", "audio_s": 1.0, "decoded_s": 1.0, "words": words})
    assert (told["text"], told["audio_s"], told["decoded_s"]) == ("A", 1.0, 1.0)
    assert told["words"] == words
