"""Benchmarks run any family: its random checkpoints, its steps, and what these are set beside."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import device_step, random_checkpoint, slot_runtime, zipformer_package
from benchmarks.baseline import engine_text
from benchmarks.floor import Card, StepWork, card_of
from benchmarks.models import Model, RandomModel, StoredModel, add_model_arguments, chosen_model
from benchmarks.random_zipformer import (
    SIZES,
    ZipformerSize,
    random_weights,
    write_random_zipformer,
)
from benchmarks.step_bench import StepBench, build_engine
from benchmarks.workload import DEMO, Options, utterances
from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.models import ChunkSettings
from tests.conftest import DEMO_DIR, GOLDEN_DIR

TINY = ZipformerSize(
    num_layers=(1, 2), dims=(32, 48), feed_forward_dims=(32, 48), downsampling=(1, 2),
    num_heads=(2, 2), kernel_sizes=(15, 7), decoder_dim=32, joiner_dim=32,
)  # fmt: skip
IN_PYTORCH = {"cpu_encoder": "pytorch"}


@pytest.fixture(scope="module", name="tiny")
def _tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_zipformer(tmp_path_factory.mktemp("tiny"), TINY, vocab_size=60)


@pytest.fixture(scope="module", name="small")
def _small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_zipformer(tmp_path_factory.mktemp("small"), SIZES["small"])


def choose(*arguments: str, default: Model | None = None) -> object:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return chosen_model(parser, parser.parse_args(arguments), default)


# The checkpoints


def test_the_medium_zipformer_has_as_many_parameters_as_icefall_publishes() -> None:
    weights = random_weights(SIZES["medium"], heads=("transducer",))
    assert sum(weight.numel() for weight in weights.values()) == 66_110_931


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--heads", "foo"), "heads=foo; give some of transducer, ctc"),
        (("--heads", "ctc,"), "heads=; give some of transducer, ctc"),
        (("--vocab-size", "0"), "--vocab-size: 0 units; give 4 or more"),
        (("--vocab-size", "-7"), "--vocab-size: -7 units; give 4 or more"),
        (("--vocab-size", "x"), "--vocab-size: invalid"),
    ],
)
def test_what_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], told: str
) -> None:
    directory = tmp_path / "checkpoint"
    with pytest.raises(SystemExit) as ended:
        random_checkpoint.main([str(directory), "--family", "zipformer", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
    assert not directory.exists()


def test_a_random_checkpoint_has_the_keys_and_options_of_icefalls() -> None:
    """Those of a golden with both heads."""
    golden = torch.load(GOLDEN_DIR / "zip_rnnt_small" / "pretrained.pt", weights_only=True)["model"]
    assert set(random_weights(SIZES["medium"])) == set(golden)


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("small", {64: 833_028, 128: 1_381_892, 256: 2_479_620}),
        ("medium", {64: 1_146_372, 128: 1_850_884, 256: 3_259_908}),
        ("large", {64: 1_519_108, 128: 2_395_652, 256: 4_148_740}),
    ],
    ids=str,
)
def test_a_stream_of_a_published_size_keeps_the_bytes_that_follow_from_it(
    size: str, num_bytes: dict[int, int], tmp_path: Path
) -> None:
    """By left context, in frames of 20 ms."""
    write_random_zipformer(tmp_path, SIZES[size])
    encoder = open_checkpoint(tmp_path).info.encoder
    for left_frames, expected in num_bytes.items():
        states = encoder.under(ChunkSettings(16, left_frames // 16)).state_specs
        assert sum(4 * math.prod(state.shape) for state in states) == expected


def test_the_random_transducer_says_something_and_not_all_the_time(small: Path) -> None:
    engine = build_engine(StoredModel(small), 1, dtype="float32", device="cpu", settings=IN_PYTORCH)
    (clip,) = utterances(quick=True)[:1]
    words = engine_text(engine, clip[:6]).split()
    engine.close()
    assert 3 < len(words) < 80


def test_half_precision_keeps_the_random_activations_finite(small: Path) -> None:
    engine = build_engine(StoredModel(small), 1, dtype="float16", device="cpu", settings=IN_PYTORCH)
    bench = StepBench(engine, 1)
    bench.advance()
    assert torch.isfinite(bench.answer().float()).all()
    assert all(torch.isfinite(rows).all() for rows in bench.states().values())


# The choice of a model


def test_a_model_is_wenets_unless_another_is_chosen() -> None:
    assert choose() == RandomModel("wenet", "medium")
    assert choose(default=DEMO) is DEMO
    assert choose("--checkpoint", str(DEMO_DIR)) == StoredModel(DEMO_DIR)
    assert choose("--family", "zipformer", "--size", "large", "--heads", "ctc", default=DEMO) == (
        RandomModel("zipformer", "large", ("ctc",))
    )
    usual = RandomModel("zipformer")
    assert choose("--size", "small", default=usual) == RandomModel("zipformer", "small")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "large"], "wenet comes as medium"),
        (["--heads", "transducer"], "wenet comes with ctc alone"),
        (["--checkpoint", ".", "--family", "wenet"], "one or the other"),
    ],
)
def test_what_a_family_does_not_have_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        choose(*arguments)
    assert words in capsys.readouterr().err


def test_a_head_that_icefall_does_not_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"attention.*transducer, ctc"):
        write_random_zipformer(tmp_path, TINY, heads=("attention",))


# Steps, their floor, and the runtime of lists


def test_the_floor_is_the_longer_of_the_bytes_and_the_products() -> None:
    card = Card("example", bytes_per_s=1e9, flops_per_s=1e12)
    work = StepWork(weight_bytes=2_000_000, stream_bytes=1_000, stream_flops=10_000_000)
    assert work.floor_ms(card, 1) == pytest.approx(2.001)
    assert work.floor_ms(card, 1000) == pytest.approx(10.0)


def test_a_card_without_a_data_sheet_needs_its_figures() -> None:
    assert card_of("NVIDIA H200", "float16").flops_per_s == 989e12
    with pytest.raises(ValueError, match=r"no floor.*--bandwidth-tbs"):
        card_of("NVIDIA T4", "float16")
    given = card_of("NVIDIA T4", "float16", bandwidth_tbs=0.3, tflops=65.0)
    assert (given.bytes_per_s, given.flops_per_s) == (0.3e12, 65e12)


def test_a_device_step_of_any_family_stands_beside_its_floor(tiny: Path, tmp_path: Path) -> None:
    figures = ["--bandwidth-tbs", "0.02", "--tflops", "0.1"]
    arguments = ["--checkpoint", str(tiny), "--device", "cpu", "--dtype", "float32"]
    assert device_step.main(
        [*arguments, *figures, "--widths", "1", "3", "--profile", "3", "--results", str(tmp_path)]
    ) == 0  # fmt: skip
    document = json.loads((tmp_path / "device_step.json").read_text(encoding="utf-8"))
    found = {figure["name"]: figure["median"] for figure in document["figures"]}
    for width in (1, 3):
        floor, device = found[f"{width} streams: floor"], found[f"{width} streams: device"]
        assert 0 < floor < device
        assert found[f"{width} streams: replay equals eager"] == 1


def test_work_counts_weights_once_and_states_twice(tiny: Path) -> None:
    engine = build_engine(StoredModel(tiny), 1, dtype="float16", device="cpu", settings=IN_PYTORCH)
    work = StepWork.of(engine, tiny)
    assert work.stream_bytes == 2 * engine.store.states.nbytes_per_stream
    num_weights = sum(one.numel() for one in engine.parts.model.parameters())
    assert 0.5 * num_weights < work.weight_bytes / 2 <= num_weights
    assert work.stream_flops > 8 * num_weights


def test_lists_of_states_give_what_slots_give(tiny: Path) -> None:
    report = slot_runtime.run(
        StoredModel(tiny), {}, device="cpu", dtype="float32", num_streams=3, repeats=2
    )
    assert report.figure("encoder frames: largest difference").median < 1e-5
    assert report.figure("tensors of a stream").median >= 6 * 3 + 2
    assert report.figure(f"{slot_runtime.LISTS} / {slot_runtime.OURS}").median > 0


def test_lists_are_for_encoders_whose_states_are_all_slots() -> None:
    with pytest.raises(ValueError, match="K/V in paged blocks"):
        slot_runtime.run(DEMO, {}, device="cpu", dtype="float32", num_streams=1, repeats=1)


# The PyPI package


@pytest.mark.skipif(
    importlib.util.find_spec("zipformer") is None, reason="the package zipformer is not installed"
)
@pytest.mark.parametrize("heads", [("transducer",), ("ctc",)], ids=str)
def test_the_engine_and_the_package_hear_the_same(heads: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint = write_random_zipformer(tmp_path, TINY, heads=heads, vocab_size=60)
    model = StoredModel(checkpoint)
    report = zipformer_package.run(
        Options(quick=True, num_threads=1, model=model, settings=IN_PYTORCH), is_scripted=False
    )
    assert report.configuration["utterances_with_equal_text"] == "1 of 1"
    assert all(figure.median > 0 for figure in report.figures)
