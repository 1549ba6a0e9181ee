"""The client hands on all entries, although a live stream's documents leave some out."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from oasr_client import StreamingClient, iter_chunks, read_audio
from oasr_client.whole import whole

BEAM = {"decoder": "prefix_beam", "nbest": 3}


class Server(Protocol):
    grpc_url: str
    model_name: str


class Clip(Protocol):
    path: Path


def document(text: str, words: list[str], before: int, **more: Any) -> dict[str, Any]:
    return {"text": text, "words": words, "num_words_before": before, **more}


def test_entries_that_are_left_out_come_from_the_document_before() -> None:
    first = whole(document("A B C", ["A", "B", "C"], 0), {})
    second = whole(document("A B D E", ["D", "E"], 2), first)
    assert second == document("A B D E", ["A", "B", "D", "E"], 0)
    third = whole(document("A B D", ["D"], 2), second)
    assert third["words"] == ["A", "B", "D"]
    assert second["words"] == ["A", "B", "D", "E"], "an answer stays as it was given"


def test_alternatives_share_what_is_left_out() -> None:
    earlier = {"nbest": [{"text": "A B", "tokens": [1, 2]}, {"text": "A C", "tokens": [1, 3]}]}
    later = {
        "text": "A C D",
        "num_tokens_before": 1,
        "nbest": [{"text": "C D", "tokens": [3, 4]}, {"text": "B", "tokens": [2]}],
    }
    assert whole(later, earlier)["nbest"] == [
        {"text": "A C D", "tokens": [1, 3, 4]},
        {"text": "A B", "tokens": [1, 2]},
    ]


def test_a_document_of_another_model_stays_as_it_is() -> None:
    other = {"words": [{"word": "A"}], "nbest": [], "duration": 3}
    assert whole(other, {"words": [{"word": "B"}]}) == other


def test_each_result_of_a_long_stream_spells_its_text(
    live_server: Server, clips: list[Clip]
) -> None:
    samples = np.concatenate([read_audio(clip.path) for clip in clips[:4]])
    options = {**BEAM, "word_times": True, "endpoint": True}
    url, name = live_server.grpc_url, live_server.model_name
    with StreamingClient(url, model_name=name, want_result=True) as client:
        stream = client.stream(options=options)
        updates = [stream.send(chunk) for chunk in iter_chunks(samples, 640)]
        updates.append(stream.finish())
    results = [update.result for update in updates if update.result is not None]
    assert len(results) == len(updates)
    for update, result in zip(updates, results, strict=True):
        assert [word["word"] for word in result["words"]] == update.text.split()
        assert result["nbest"][0]["text"] == update.text
        assert [one["id"] for one in result["tokens"]] == result["nbest"][0]["tokens"]
        assert result["num_words_before"] == result["num_segments_before"] == 0
    closed = [[one for one in result["segments"] if one["is_final"]] for result in results[:-1]]
    assert all(b[: len(a)] == a for a, b in itertools.pairwise(closed))
