"""What documents leave out: nothing is lost to a reader of them all, and none grows with age."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from oasr_client.whole import whole

from oasr_backend.config import ServingConfig
from oasr_backend.streaming.engine import Engine
from oasr_backend.text.tokenizer import Tokenizer, UnitTokenizer
from oasr_backend.text.told import RECENT_S, Told
from oasr_backend.types import Hypothesis, Samples
from tests.conftest import DEMO_DIR, Clip
from tests.engine_helpers import STRIDE_SAMPLES, ask_one, golden_engine, noise
from tests.result_schema import COUNTS, check_document

BEAM = {"decoder": "prefix_beam"}
MARKED = ["\u2581HE", "LLO", "\u2581", "A", "\u2581B", "S"]
VOCABULARIES = {
    "marked": ["<blank>", *MARKED],
    "with Han": ["<blank>", *MARKED, "\u4f60", "\u597d", "\u4e16\u754c"],
    "with bytes": ["<blank>", *MARKED, "<0xC3>", "<0xA9>", "<0xE4>", "<0xBD>", "<0xA0>"],
    "with marks": ["<blank>", *MARKED, ",", "\u2581-", "\u00ab", "'", "\u4f60", "\u3002"],
    "of letters": ["<blank>", "<space>", "a", "b", "c"],
    "of Thai": ["<blank>", "<space>", "\u0e01", "\u0e49", "\u0e32", "\u0e40\u0e01"],
    "of Han and words": ["<blank>", "\u4f60", "\u597d", "AB", "C", "7", "<unk>", "."],
}


@given(data=st.data())
@pytest.mark.parametrize("name", VOCABULARIES)
def test_words_that_are_left_out_are_those_of_the_whole_text(name: str, data: Any) -> None:
    """Whenever one looks, and however slowly tokens settle."""
    tokenizer = UnitTokenizer(VOCABULARIES[name])
    ids = data.draw(st.lists(st.integers(1, tokenizer.vocab_size - 1), max_size=30))
    told, words = Told(), [word.text for word in tokenizer.words(ids)]
    for known in sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6))):
        stable = data.draw(st.integers(0, known))
        look(told, tokenizer, ids[:known], num_stable=stable)
        rest = [word.text for word in tokenizer.words(ids[told.num_tokens :])]
        assert [*words[: told.num_words], *rest] == words


def look(told: Told, tokenizer: Tokenizer, ids: Sequence[int], *, num_stable: int) -> None:
    rest = Hypothesis(tuple(ids[told.num_tokens :]), 0.0, tuple(range(told.num_tokens, len(ids))))
    told.leave_out_words(
        rest,
        tokenizer.words(rest.tokens),
        num_settled=num_stable - told.num_tokens,
        before_frame=len(ids),
    )


def test_a_word_is_left_out_when_it_is_old_and_another_one_is_settled_behind_it() -> None:
    tokenizer = UnitTokenizer(VOCABULARIES["marked"])
    rest = Hypothesis((1, 2, 5, 6, 1), 0.0, (0, 10, 20, 30, 40))
    words = tokenizer.words(rest.tokens)
    for num_settled, before_frame, expected in (
        (5, 100, (4, 2)),
        (4, 100, (2, 1)),
        (2, 100, (0, 0)),
        (5, 11, (2, 1)),
        (5, 10, (0, 0)),
    ):
        told = Told()
        told.leave_out_words(rest, words, num_settled=num_settled, before_frame=before_frame)
        assert (told.num_tokens, told.num_words) == expected


def documents(
    engine: Engine, samples_S: Samples, parameters: dict[str, Any], *, asks: Iterator[bool]
) -> list[dict[str, Any]]:
    """Those of a stream in pieces of a window's stride, where `asks` says that one is wanted."""
    found, starts = [], range(0, samples_S.size, STRIDE_SAMPLES)
    for start in starts:
        is_last = start == starts[-1]
        result = ask_one(
            engine,
            "a",
            samples_S[start : start + STRIDE_SAMPLES],
            flags=("S" if start == 0 else "") + ("E" if is_last else ""),
            parameters=parameters if start == 0 else {},
            wants_result=is_last or next(asks),
        )
        if result.document is not None:
            found.append(check_document(result.document))
    return found


def put_together(told: Sequence[dict[str, Any]], count: str) -> list[Any]:
    """What a reader has who keeps as many entries as the next document leaves out."""
    entries: list[Any] = []
    for document in told:
        assert document[count] <= len(entries), "an entry was never told"
        entries = [*entries[: document[count]], *document[COUNTS[count]]]
    return entries


def speech(clips: list[Clip], *, seconds: float) -> Samples:
    """Clip after clip with a pause of a second and a half between them."""
    pause_S = np.zeros(24000, np.float32)
    parts = [[soundfile.read(clip.path, dtype="float32")[0], pause_S] for clip in clips]
    return np.concatenate(list(itertools.chain(*parts)))[: round(16000 * seconds)]


@pytest.fixture(scope="module", name="engine")
def _engine() -> Engine:
    return Engine.load(DEMO_DIR, ServingConfig(), device="cpu")


@pytest.mark.parametrize(
    ("options", "every"),
    [({}, 1), (BEAM, 5), ({**BEAM, "partials": "stable"}, 1)],
    ids=["greedy", "beam, now and then", "beam, stable"],
)
def test_what_was_told_and_left_out_adds_up_to_the_last_document(
    engine: Engine, clips: list[Clip], options: dict[str, Any], every: int
) -> None:
    options = {**options, "word_times": True, "endpoint": True}
    asks = itertools.cycle(number == 0 for number in range(every))
    found = documents(engine, speech(clips, seconds=25), options, asks=asks)
    *live, final = found
    for count, name in COUNTS.items():
        assert live[-1][count] > 0, "nothing was left out: this test shows nothing"
        assert [document[count] for document in live] == sorted(one[count] for one in live)
        assert put_together(found, count) == final[name]
        left_out = live[-1][count]
        assert put_together(live, count)[:left_out] == final[name][:left_out], "settled for good"
    assert all(tells_what_is_recent(document, final) for document in live)
    for document, entire in zip(found, entire_documents(found), strict=True):
        assert [word["word"] for word in entire["words"]] == document["text"].split()


def entire_documents(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the client makes of them."""
    entire: list[dict[str, Any]] = []
    for document in found:
        entire.append(whole(document, entire[-1] if entire else {}))
    return entire


def tells_what_is_recent(document: dict[str, Any], final: dict[str, Any]) -> bool:
    """Whether only words that began `RECENT_S` ago are left out: who asks rarely has the rest."""
    left_out = final["words"][: document["num_words_before"]]
    return all(word["start_s"] < document["audio_s"] - RECENT_S for word in left_out)


def counting(engine: Engine, name: str, read: list[int]) -> Callable[..., list[Hypothesis]]:
    """That call of the engine's decoders; `read` gets the number of tokens of all it gives."""
    call = getattr(engine.caches.ctc, name)

    def counted(*args: Any, **more: Any) -> list[Hypothesis]:
        found: list[Hypothesis] = call(*args, **more)
        read.extend(len(hypothesis.tokens) for hypothesis in found)
        return found

    return counted


@pytest.mark.parametrize(
    "parameters", [{"word_times": True, "endpoint": True}, {**BEAM, "word_times": True, "nbest": 4}]
)
def test_an_answer_reads_no_more_tokens_of_an_old_stream_than_of_a_young_one(
    parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where the decoders are read, and in the lists of the documents."""
    engine, sizes, read = golden_engine(), [], []
    for name in ("best", "nbest"):
        monkeypatch.setattr(engine.caches.ctc, name, counting(engine, name, read))
    for number in range(150):
        samples_S = noise(number % 30)[:STRIDE_SAMPLES]
        flags, options = ("S", parameters) if number == 0 else ("", {})
        read.clear()
        result = ask_one(engine, "a", samples_S, flags=flags, parameters=options, wants_result=True)
        document = check_document(result.document)
        entries = sum(len(document.get(name, ())) for name in COUNTS.values())
        sizes.append((sum(read), entries))
    young, old = np.array(sizes[20:50]).max(0), np.array(sizes[-30:]).max(0)
    (stream,) = engine.streams
    assert stream.settled.num_tokens > 5 * len(document["tokens"])
    assert (old <= 2 * young).all(), (young, old)
