"""The families of docs/add_an_encoder.md, installed from outside and served by the real engine."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
import torch

from oasr_backend.cache import BlockPool, SlotStates
from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.errors import CheckpointError, ConfigError
from oasr_backend.parity import stream_log_probs
from oasr_backend.streaming.assemble import assemble, load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import Samples
from tests.doc_blocks import python_blocks
from tests.engine_helpers import ask, ask_one, chunk, error_of, noise
from tests.reference import toy_family as reference
from tests.toy_family import (
    DOCUMENT,
    RATE,
    SYMBOLS,
    installed,
    project,
    toy_tensors,
    tune,
    write_checkpoint,
    write_family,
)

CPU = torch.device("cpu")
AT_8_KHZ = {"sample_rate": RATE}


@pytest.fixture(autouse=True, scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("site")):
        yield


@pytest.fixture(name="toy_dir", scope="module")
def _toy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("toy"))


def toy_engine(toy_dir: Path, **settings: Any) -> Engine:
    config = ServingConfig.of(**{"max_streams": 4, **AT_8_KHZ, **settings})
    return load_engine(toy_dir, config, device="cpu")


@pytest.fixture(name="engine", scope="module")
def _engine(toy_dir: Path) -> Engine:
    return toy_engine(toy_dir)


def text_of(engine: Engine, samples_S: Samples, *, piece: int | None = None) -> str:
    """One stream alone, `piece` samples a request, or all at once."""
    piece = piece or samples_S.size
    starts = range(0, samples_S.size, piece)
    for start in starts:
        flags = ("S" if start == 0 else "") + ("E" if start == starts[-1] else "")
        result = ask_one(engine, "alone", samples_S[start : start + piece], flags=flags)
        assert result.error is None
    return result.text


def reference_text(samples_S: Samples, *, chunk_size: int = 16, tail: bool = True) -> str:
    """Of the whole signal, by the independent implementation."""
    weights = {name: tensor.numpy() for name, tensor in toy_tensors().items()}
    whole_S = samples_S.astype(np.float64)
    if tail:
        whole_S = reference.with_tail(samples_S, chunk_size=chunk_size)
    return reference.steady_text(reference.log_probs(reference.features(whole_S), weights), SYMBOLS)


# The family without attention: its own front end, state, search and reader


def test_different_audio_gives_different_text(engine: Engine) -> None:
    texts = {text_of(engine, tune(seed, seconds=3.0)) for seed in range(4)}
    assert len(texts) == 4
    assert min(map(len, texts)) > 5
    assert len(set("".join(texts))) > 5


@pytest.mark.parametrize("chunk_size", [8, 16])
def test_the_text_is_that_of_a_pass_over_the_whole_signal(toy_dir: Path, chunk_size: int) -> None:
    engine = toy_engine(toy_dir, chunk_size=chunk_size)
    for seed, seconds in enumerate((0.005, 0.3, 1.28, 2.7, 6.1)):
        samples_S = tune(seed, seconds=seconds)
        assert text_of(engine, samples_S) == reference_text(samples_S, chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", [8, 16])
def test_the_log_probs_are_those_of_a_pass_over_the_whole_signal(
    toy_dir: Path, chunk_size: int
) -> None:
    features_WF = reference.features(tune(1, seconds=3.0).astype(np.float64))
    weights = {name: tensor.numpy() for name, tensor in toy_tensors().items()}
    expected_TV = reference.log_probs(features_WF, weights)
    found_TV = stream_log_probs(
        toy_dir, features_WF.astype(np.float32), chunk_size=chunk_size, num_left_chunks=4
    )
    assert found_TV.shape == expected_TV.shape
    np.testing.assert_allclose(found_TV, expected_TV, atol=1e-4)


@pytest.mark.parametrize("piece", [500, 2_560, 7_777])
def test_any_cut_of_the_audio_gives_the_same_text(engine: Engine, piece: int) -> None:
    samples_S = tune(1, seconds=4.3)
    assert text_of(engine, samples_S, piece=piece) == reference_text(samples_S)


def test_a_stream_in_a_batch_gives_the_text_that_it_gives_alone(engine: Engine) -> None:
    """Streams of unequal length that begin at different times."""
    audio = [tune(seed, seconds=seconds) for seed, seconds in ((2, 2.0), (3, 3.7), (4, 5.1))]
    start = {"defaults": engine.config.defaults}
    ask(engine, chunk(0, audio[0][:5_000], flags="S", **start))
    ask(engine, chunk(0, audio[0][5_000:9_000]), chunk(1, audio[1][:9_000], flags="S", **start))
    results = ask(
        engine,
        chunk(0, audio[0][9_000:], flags="E"),
        chunk(1, audio[1][9_000:], flags="E"),
        chunk(2, audio[2], flags="SE", **start),
    )
    assert [result.text for result in results] == [reference_text(one_S) for one_S in audio]


def test_the_memory_of_a_stream_outlives_its_chunks(engine: Engine) -> None:
    """The same second half after two first halves: the leaky sum tells them apart."""
    halves = [tune(seed, seconds=1.28) for seed in (10, 11)]
    ends = set()
    for half_S in halves:
        ask_one(engine, "a", half_S, flags="S")
        state = engine.store.states.buffer_of("sum")[next(iter(engine.streams)).slot].clone()
        assert state.abs().min() > 0
        ends.add(tuple(state.tolist()))
        ask_one(engine, "a", flags="E")
    assert len(ends) == 2


def test_a_short_last_chunk_is_heard_and_ends_cleanly(toy_dir: Path) -> None:
    """Without silence behind the end, the last window is only partly real."""
    engine = toy_engine(toy_dir, tail_padding=False)
    samples_S = tune(5, seconds=2.0)
    for size in (240, 12_000, 12_800, 12_880, 13_039, 13_040, 15_900, 16_000):
        expected = reference_text(samples_S[:size], tail=False)
        assert text_of(engine, samples_S[:size]) == expected


def test_streams_at_another_rate_are_resampled_to_that_of_the_front_end(engine: Engine) -> None:
    samples_S = tune(3, seconds=3.0, rate=16_000)
    (result,) = ask(engine, chunk("a", samples_S, flags="SE", parameters={"sample_rate": 16_000}))
    assert result.error is None
    assert result.text == reference_text(soxr.resample(samples_S, 16_000, RATE))


def test_values_of_freed_streams_reach_no_other(
    toy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_what_is_freed(monkeypatch)
    engine = toy_engine(toy_dir, max_streams=1)
    for seed in range(3):
        samples_S = tune(seed, seconds=5.0)
        assert text_of(engine, samples_S) == reference_text(samples_S)


def test_an_encoder_without_attention_holds_no_block(engine: Engine) -> None:
    assert engine.store.kv is None
    ask_one(engine, "a", tune(0, seconds=1.0), flags="S")
    readings = {reading.name: reading.value for reading in engine.readings()}
    assert readings["oasr_used_blocks"] == readings["oasr_free_blocks"] == 0
    ask_one(engine, "a", flags="E")


def test_a_chunk_size_that_was_not_trained_is_refused_before_the_weights(tmp_path: Path) -> None:
    toy_dir = write_checkpoint(tmp_path)
    (toy_dir / "toy.pt").unlink()
    with pytest.raises(ConfigError, match=r"chunk_size=12.*set chunk_size to 8 or 16"):
        toy_engine(toy_dir, chunk_size=12)


def test_a_search_of_another_family_is_refused_with_the_names_of_its_own(engine: Engine) -> None:
    for name in ("greedy", "prefix_beam"):
        result = ask_one(engine, "a", flags="S", parameters={"decoder": name})
        error_of(result, f"decoder='{name}' is a search", "does not offer; send one of steady")
    assert ask_one(engine, "a", flags="SE", parameters={"decoder": "steady"}).error is None


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"hotwords": '["abc"]'}, "hotwords="),
        ({"rescoring": True}, "rescoring=True"),
        ({"use_lm": True}, "use_lm=True"),
        ({"nbest": 2}, "nbest=2"),
    ],
)
def test_an_option_that_the_search_does_not_honour_is_refused(
    engine: Engine, parameters: dict[str, Any], told: str
) -> None:
    result = ask_one(engine, "a", flags="S", parameters=parameters)
    error_of(result, told, "steady")


def test_what_is_known_before_the_weights_is_what_they_make(toy_dir: Path) -> None:
    opened = open_checkpoint(toy_dir)
    checkpoint = opened.load()
    assert opened.info.encoder == checkpoint.model.spec
    assert opened.info.frames == checkpoint.model.frontend.geometry
    assert opened.info.vocab_size == checkpoint.tokenizer.vocab_size == len(SYMBOLS)
    assert list(opened.info.searches) == ["steady"]


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ([torch.zeros(1)], "holds a list, no tensors by name; save the tensors alone"),
        ({"epoch": 3}, "holds a int under 'epoch', where a tensor by its name is meant"),
        ({0: torch.zeros(1)}, "holds a Tensor under 0, where a tensor by its name is meant"),
    ],
)
def test_a_file_of_something_else_than_weights_is_refused(
    tmp_path: Path, saved: Any, told: str
) -> None:
    toy_dir = write_checkpoint(tmp_path)
    torch.save(saved, toy_dir / "toy.pt")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(toy_dir).load()
    assert told in str(caught.value)
    assert "toy.pt" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"encoder.mix.bias": None}, "gives no value for encoder.mix.bias"),
        ({"encoder.extra": torch.zeros(1)}, "gives a value for encoder.extra"),
        ({"encoder.mix.bias": torch.zeros(3)}, "encoder.mix.bias is of shape (3,), not (16,)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    tensors = {**toy_tensors(), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    toy_dir = write_checkpoint(tmp_path, kept)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(toy_dir).load()
    assert told in str(caught.value)
    assert "toy.pt" in str(caught.value)


def test_a_missing_or_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    toy_dir = write_checkpoint(tmp_path)
    (toy_dir / "toy.pt").unlink()
    with pytest.raises(CheckpointError, match=r"toy\.pt does not exist; a toy checkpoint holds"):
        open_checkpoint(toy_dir).load()
    (toy_dir / "toy.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"toy\.json names no symbols"):
        open_checkpoint(toy_dir)


def test_the_checkpoint_that_the_document_makes_can_be_served(tmp_path: Path) -> None:
    make = importlib.import_module("toy_family.make").make
    make(tmp_path / "made", list(SYMBOLS))
    engine = toy_engine(tmp_path / "made")
    assert engine.is_healthy


def test_the_family_installs_as_a_project(tmp_path: Path) -> None:
    """By the document's pyproject.toml, with its modules and its reader."""
    write_family(tmp_path / "project")
    (tmp_path / "project" / "pyproject.toml").write_text(project(), encoding="utf-8")
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=tmp_path / "project", check=True, capture_output=True)
    with zipfile.ZipFile(tmp_path / "toy_family-1.0-py3-none-any.whl") as wheel:
        names = wheel.namelist()
        told = wheel.read("toy_family-1.0.dist-info/entry_points.txt").decode()
    assert {"toy_family/reader.py", "toy_family/make.py"} <= set(names)
    assert "[oasr_backend.readers]\ntoy = toy_family.reader:ToyReader" in told


# The encoder with attention


def attending_engine(**settings: Any) -> Engine:
    checkpoint = importlib.import_module("attending_family.reader").toy_checkpoint()
    config = ServingConfig.of(**{"max_streams": 4, **settings})
    return assemble(checkpoint, config, device=CPU)


@functools.cache
def shared_engine() -> Engine:
    return attending_engine()


def whole_text(samples_S: Samples) -> str:
    return text_of(shared_engine(), samples_S)


def test_the_attending_encoder_is_as_short_as_before() -> None:
    (encoder,) = [block for block in python_blocks(DOCUMENT) if "class ToyEncoder" in block]
    body = encoder[encoder.index("class ToyEncoder") :].strip().splitlines()
    assert len([line for line in body if line.strip()]) <= 42


def test_with_attention_different_audio_gives_different_text() -> None:
    texts = {whole_text(noise(seed, seconds=3.0)) for seed in range(4)}
    assert len(texts) == 4
    assert min(map(len, texts)) > 3


@pytest.mark.parametrize("piece", [1_000, 5_120, 7_777])
def test_with_attention_any_cut_of_the_audio_gives_the_same_text(piece: int) -> None:
    samples_S = noise(1, seconds=4.3)
    assert text_of(shared_engine(), samples_S, piece=piece) == whole_text(samples_S)


def test_with_attention_a_stream_in_a_batch_gives_the_text_that_it_gives_alone() -> None:
    """Streams of unequal length that begin at different times."""
    engine = shared_engine()
    audio = [noise(seed, seconds=seconds) for seed, seconds in ((2, 2.0), (3, 3.7), (4, 5.1))]
    ask(engine, chunk(0, audio[0][:9_000], flags="S"))
    ask(engine, chunk(0, audio[0][9_000:20_000]), chunk(1, audio[1][:20_000], flags="S"))
    results = ask(
        engine,
        chunk(0, audio[0][20_000:], flags="E"),
        chunk(1, audio[1][20_000:], flags="E"),
        chunk(2, audio[2], flags="SE"),
    )
    assert [result.text for result in results] == [whole_text(samples_S) for samples_S in audio]


def test_with_attention_a_short_last_chunk_is_heard_and_ends_cleanly() -> None:
    """Without silence behind the end, the last window is only partly real."""
    engine = attending_engine(tail_padding=False)
    samples_S = noise(5, seconds=2.0)
    texts = [text_of(engine, samples_S[:size]) for size in (31_000, 31_640, 32_000)]
    assert texts[2].startswith(texts[0][:-1])
    assert engine.store.kv.pool.num_free_blocks == engine.store.kv.pool.num_blocks


def poison_what_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def poison_blocks(pool: BlockPool, block_ids: list[int]) -> None:
        for block_id in block_ids:
            for part in pool.get_kv_block_view(0, block_id):
                part.fill_(float("nan"))

    def poison_slot(states: SlotStates, slot: int) -> None:
        for name in states.specs:
            states.fill_slot(name, slot, float("nan"))

    monkeypatch.setattr(BlockPool, "_before_reuse", poison_blocks)
    monkeypatch.setattr(SlotStates, "_before_reuse", poison_slot)


def test_with_attention_values_of_freed_streams_reach_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_what_is_freed(monkeypatch)
    engine = attending_engine(max_streams=1)
    for seed in range(3):
        samples_S = noise(seed, seconds=5.0)
        assert text_of(engine, samples_S) == whole_text(samples_S)


def test_positions_stay_in_the_table_and_blocks_are_constant_for_a_minute() -> None:
    engine = attending_engine(position_limit_frames=100)
    pool = engine.store.kv.pool
    held = []
    for index in range(60):
        result = ask_one(engine, "long", noise(index, seconds=1.0), flags="S" if not index else "")
        assert result.error is None
        held.append(pool.num_blocks - pool.num_free_blocks)
        (stream,) = engine.streams
        (position,) = engine.store.kv.position_offsets(np.array([stream.slot]))
        assert position <= 100
    assert set(held[10:]) == {4}
    assert np.isfinite(engine.store.states.buffer_of("conv").numpy()).all()
