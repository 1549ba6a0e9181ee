"""Hotwords and rescoring help real speech, and the documents tell the measured figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from oasr_client.manifest import Reference, word_errors

from benchmarks import accuracy
from benchmarks.accuracy import ABSENT, BEAM, RESCORED, favouring, rare_words, recall, transcribe
from benchmarks.report import RESULTS_DIRECTORY
from benchmarks.workload import read_audio
from oasr_backend.config import ServingConfig
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk
from tests.conftest import DEMO_DIR, ROOT

RECORDINGS = accuracy.recordings()
#: The first cell of a row in docs/result.md, and the beginning of its figures' names.
HOTWORD_ROWS = {
    "own of each recording": "own words",
    "all 230 for every recording": "all words",
    "20 that no speaker says": "absent words",
}
SEARCH_ROWS = {
    "`greedy`": "greedy",
    "`prefix_beam`, 10 hypotheses": "prefix beam 10",
    "the same with `rescoring`": "prefix beam 10, rescored",
}


def measured() -> dict[str, float]:
    """Each figure of benchmarks/results/accuracy.json by its name."""
    path = RESULTS_DIRECTORY / "accuracy.json"
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    return {figure["name"]: figure["median"] for figure in figures}


@pytest.fixture(scope="module", name="engine")
def _engine() -> Engine:
    return load_engine(DEMO_DIR, ServingConfig(), device="cpu")


@pytest.fixture(scope="module", name="beam_texts")
def _beam_texts(engine: Engine) -> list[str]:
    return transcribe(engine, RECORDINGS, [BEAM] * len(RECORDINGS))


def error_rate(texts: list[str], recordings: list[Reference] = RECORDINGS) -> float:
    heard = {one.audio: text for one, text in zip(recordings, texts, strict=True)}
    return word_errors(recordings, heard).rate


def test_true_rare_words_are_heard_more_often(engine: Engine, beam_texts: list[str]) -> None:
    """At most a third of the words that the plain beam misses stay unheard."""
    rare = rare_words(RECORDINGS)
    boosted = transcribe(engine, RECORDINGS, [favouring(words, 1.0) for words in rare])
    assert 1 - recall(boosted, rare) <= (1 - recall(beam_texts, rare)) / 3
    assert error_rate(boosted) < error_rate(beam_texts) - 0.02


def test_absent_hotwords_cost_little(engine: Engine, beam_texts: list[str]) -> None:
    said = {word for one in RECORDINGS for word in one.text.lower().split()}
    assert said.isdisjoint(ABSENT)
    disturbed = transcribe(engine, RECORDINGS, [favouring(ABSENT, 1.0)] * len(RECORDINGS))
    assert error_rate(disturbed) <= error_rate(beam_texts) + 0.005


def test_the_trained_attention_decoder_makes_fewer_errors_than_the_beam(
    engine: Engine, beam_texts: list[str]
) -> None:
    rescored = transcribe(engine, RECORDINGS, [RESCORED] * len(RECORDINGS))
    assert error_rate(rescored) < error_rate(beam_texts) - 0.01
    assert error_rate(beam_texts) == pytest.approx(
        measured()["prefix beam 10, all: word error rate"] / 100, abs=2e-3
    )


def rows(name: str) -> dict[str, list[str]]:
    """The tables' rows of a document: first cell to the numbers of the others."""
    lines = re.findall(r"^\| (.+) \|$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    cells = [line.split(" | ") for line in lines]
    return {first: re.findall(r"[\d.]+(?= %)", " ".join(others)) for first, *others in cells}


def told(*names: str) -> list[str]:
    figures = measured()
    return [f"{figures[name]:.1f}" for name in names]


def test_the_documented_hotwords_are_those_measured() -> None:
    kinds = ("recall of rare words", "word error rate")
    found = rows("docs/result.md")
    assert found["none"] == told(*(f"no hotwords: {kind}" for kind in kinds)) * 2
    for row, name in HOTWORD_ROWS.items():
        columns = [f"{name}, boost {boost}: {kind}" for boost in (1.0, 1.5) for kind in kinds]
        assert found[row] == told(*columns)


def test_the_documented_word_error_rates_are_those_measured() -> None:
    found = rows("docs/result.md")
    for row, name in SEARCH_ROWS.items():
        columns = (f"{name}, {group}: word error rate" for group in ("all", "testset", "natural"))
        assert found[row] == told(*columns)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for group in ("all", "testset"):
        (number,) = told(f"greedy, {group}: word error rate")
        assert f"{number} %" in readme


def test_the_example_document_is_a_real_answer(engine: Engine) -> None:
    """The example is a stream's after 1.92 s of a recording, but for the time of its step."""
    text = (ROOT / "docs" / "result.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    shown = json.loads(block)
    path = DEMO_DIR / "testset" / "kokoro_LJ050-0017_am_liam.wav"
    samples_S = read_audio(path)[: round(shown["audio_s"] * 16_000)]
    (result,) = engine.process([
        AudioChunk(
            "a", samples_S, is_first=True, options=StreamOptions(word_times=True), wants_result=True
        )
    ])  # fmt: skip
    assert result.document is not None
    first_word, ellipsis = shown.pop("words")
    assert ellipsis == "..."
    assert shown.pop("tokens") == ["..."]
    confidence = pytest.approx(first_word.pop("confidence"), abs=1e-3)
    assert result.document["words"][0] == {**first_word, "confidence": confidence}
    shown.pop("step_ms")
    assert shown.items() <= result.document.items()


def test_the_program_writes_every_figure_for_a_few_recordings(tmp_path: Path) -> None:
    accuracy.main(["--first", "2", "--dtype", "bfloat16", "--results", str(tmp_path)])
    document = json.loads((tmp_path / "accuracy.json").read_text(encoding="utf-8"))
    figures = {figure["name"]: figure["median"] for figure in document["figures"]}
    assert document["configuration"]["recordings"] == 2
    assert set(figures) <= set(measured())
    assert figures["own words, boost 1.5: recall of rare words"] > 50
    assert figures["bfloat16: texts that differ from float32's"] in (0, 1, 2)


def test_texts_that_differ_are_counted() -> None:
    exact = ["", "nobody says this"]
    figure = accuracy.changed_texts(RECORDINGS[:2], exact, device="cpu", dtype="float32")
    assert figure.values == [2.0]
