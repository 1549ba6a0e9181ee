"""When an encoder is compiled, what is kept of that, and what is served where it cannot be."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oasr_backend.compiled import (
    GraphFiles,
    SessionEncoder,
    choice,
    compiled_encoder,
    files,
    large_tensors,
)
from oasr_backend.compiled.digest import graph_digest
from oasr_backend.compiled.exporter import StepShape, write_graph
from oasr_backend.errors import ConfigError
from oasr_backend.models import EncoderCaches, EncoderSpec, StreamingEncoder
from tests.compiled_helpers import (
    CHUNK,
    NUM_FEATURES,
    FeatureStreams,
    compiled,
    golden_encoder,
    golden_model,
    window_frames,
)


class Doubling(StreamingEncoder):
    """One frame to one frame, without any state."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor), requires_grad=False)

    @property
    def spec(self) -> EncoderSpec:
        return EncoderSpec(model_dim=NUM_FEATURES, subsampling_rate=1, right_context_frames=0)

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:  # noqa: ARG002
        return features_BWF * self.factor


class Untraceable(Doubling):
    """As code that an exporter has no operator for."""

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            raise RuntimeError("no operator for this\nand a second line")
        return super().forward_chunk(features_BWF, caches)


class Branching(Doubling):
    """A trace holds one branch, that of its example."""

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        doubled_BWF = super().forward_chunk(features_BWF, caches)
        return doubled_BWF if not features_BWF.any() else -doubled_BWF


class Endless(Doubling):
    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        doubled_BWF = super().forward_chunk(features_BWF, caches)
        return doubled_BWF / 0 if torch.onnx.is_in_onnx_export() else doubled_BWF


def chosen(encoder: StreamingEncoder, folder: Path, chosen_by: str = "auto") -> StreamingEncoder:
    return compiled_encoder(
        encoder,
        choice=chosen_by,
        chunk_frames=CHUNK,
        window_frames=window_frames(encoder),
        num_features=NUM_FEATURES,
        files=GraphFiles(folder),
    )


def names(folder: Path) -> list[str]:
    """Without the checksums, of which each graph has a file."""
    graphs = len(list(folder.glob("*.onnx")))
    assert len(list(folder.glob("*.sums"))) == graphs or not graphs
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".sums")


# What is served


def test_auto_compiles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(chosen(Doubling(), tmp_path), SessionEncoder)
    assert "event=encoder_compiled kind=onnx origin='exported'" in caplog.text


def test_pytorch_leaves_the_encoder_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder = Doubling()
    with caplog.at_level(logging.INFO):
        assert chosen(encoder, tmp_path, "pytorch") is encoder
    assert "event=encoder_eager reason=cpu_encoder=pytorch" in caplog.text
    assert not names(tmp_path)


def test_an_unknown_choice_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'onx' is not known; give one of auto, onnx, onnx_int8"):
        chosen(Doubling(), tmp_path, "onx")


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [
        (Untraceable(), "Untraceable was not exported: RuntimeError: no operator for this"),
        (Branching(), "its frames differ from PyTorch's by 2, more than 0.0001"),
        (Endless(), "its frames differ from PyTorch's by inf, more than 0.0001"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_encoder_that_no_graph_can_hold_is_served_as_it_came(
    encoder: StreamingEncoder, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(encoder, tmp_path) is encoder
    assert f"event=encoder_eager reason={reason}" in caplog.text
    assert "second line" not in caplog.text
    assert not names(tmp_path), "nothing is kept of a graph that does not serve"
    with pytest.raises(ConfigError) as caught:
        chosen(encoder, tmp_path, "onnx")
    assert str(caught.value) == (
        f"cpu_encoder=onnx: {reason}; mend that, or set cpu_encoder=auto or pytorch"
    )


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_a_missing_package_is_named(
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None if name == missing else "found")
    encoder = Doubling()
    with caplog.at_level(logging.INFO):
        assert chosen(encoder, tmp_path) is encoder
    assert f"event=encoder_eager reason=not installed: {missing}" in caplog.text
    with pytest.raises(ConfigError, match=f"not installed: {missing}; pip install {missing};"):
        chosen(encoder, tmp_path, "onnx_int8")


def test_eight_bits_stay_near_the_eager_encoder(tmp_path: Path) -> None:
    """Near, and not as near as float32 comes."""
    encoder = golden_encoder()
    errors = {}
    for kind in ("onnx", "onnx_int8"):
        session = compiled(encoder, tmp_path, choice=kind)
        errors[kind] = choice.relative_error(session, encoder, session._shape)
    assert errors["onnx"] < 1e-5 < 1e-3 < errors["onnx_int8"] < choice.MOST_ERROR["onnx_int8"]
    assert len(names(tmp_path)) == 2


# What is kept


def step_of(encoder: StreamingEncoder) -> np.ndarray:
    streams = FeatureStreams(encoder, num_slots=1)
    streams.open(0, 0)
    return streams.step([0])[0]


def test_a_kept_file_is_served_without_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = step_of(chosen(golden_encoder(), tmp_path))
    (name,) = names(tmp_path)
    monkeypatch.setattr(choice, "write_graph", None)
    with caplog.at_level(logging.INFO):
        after = step_of(chosen(golden_encoder(), tmp_path))
    assert "event=encoder_compiled kind=onnx origin='kept file'" in caplog.text
    np.testing.assert_array_equal(after, before)
    assert names(tmp_path) == [name]


def test_a_kept_file_that_cannot_be_touched_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(f"{path} is read-only")

    chosen(Doubling(), tmp_path, "onnx")
    monkeypatch.setattr(files.os, "utime", refuse)
    monkeypatch.setattr(choice, "write_graph", None)
    assert isinstance(chosen(Doubling(), tmp_path, "onnx"), SessionEncoder)


@pytest.mark.parametrize("damage", ["cut short", "other bytes", "another encoder"])
def test_a_file_that_is_not_the_encoders_is_made_anew(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = step_of(chosen(golden_encoder(), tmp_path))
    (name,) = names(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    if damage == "cut short":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "other bytes":
        path.write_bytes(b"no graph")
    else:
        other = golden_model().encoder
        for parameter in other.parameters():
            parameter.mul_(1.5)
        chosen(other, tmp_path / "other")
        (other_name,) = names(tmp_path / "other")
        shutil.move(tmp_path / "other" / other_name, path)
        shutil.rmtree(tmp_path / "other")
    encoder = chosen(golden_encoder(), tmp_path)
    assert isinstance(encoder, SessionEncoder)
    assert f"event=encoder_file_refused file={path} reason=" in caplog.text
    np.testing.assert_array_equal(step_of(encoder), before)
    assert names(tmp_path) == [name]
    assert len(path.read_bytes()) == len(whole)


def test_one_changed_byte_of_a_large_table_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no trial looks: it reads the first rows of a table alone."""
    monkeypatch.setattr(large_tensors, "_LEAST_BYTES", 4096)
    before = step_of(chosen(golden_encoder(), tmp_path, "onnx"))
    graph, data = names(tmp_path)
    path = tmp_path / data
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 0x40
    path.write_bytes(whole)
    np.testing.assert_array_equal(step_of(chosen(golden_encoder(), tmp_path, "onnx")), before)
    assert f"event=encoder_file_refused file={tmp_path / graph} reason=it is not" in caplog.text
    assert path.read_bytes() != whole


def test_a_graph_that_finds_no_room_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(choice, "write_graph", full)
    encoder = Doubling()
    assert chosen(encoder, tmp_path) is encoder
    (record,) = [one for one in caplog.records if "event=encoder_eager" in one.message]
    assert record.levelno == logging.WARNING
    assert "No space left" in record.message
    assert "make room, or set XDG_CACHE_HOME" in record.message


def test_the_runtime_reports_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    chosen(Doubling(), tmp_path)
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


def test_a_kept_graph_may_be_read_by_other_users(tmp_path: Path) -> None:
    chosen(golden_encoder(), tmp_path, "onnx")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_a_folder_that_cannot_be_written_to_keeps_nothing_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("no folder")
    assert isinstance(chosen(Doubling(), in_the_way / "encoders", "onnx"), SessionEncoder)
    assert f"event=encoder_not_kept folder={in_the_way}" in caplog.text
    assert "set XDG_CACHE_HOME" in caplog.text
    assert names(tmp_path) == ["file"]


def test_the_files_that_were_used_last_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for count in range(3):
        chosen(Doubling(count + 1.0), tmp_path)
        (name,) = set(names(tmp_path)).difference(made)
        made.append(name)
        os.utime(tmp_path / name, (count, count))
    chosen(Doubling(1.0), tmp_path)
    one = (tmp_path / made[0]).stat().st_size
    monkeypatch.setattr(files, "MOST_BYTES", 2 * one + one // 2)
    chosen(Doubling(0.5), tmp_path)
    kept = names(tmp_path)
    assert len(kept) == 2
    assert made[0] in kept, "it was used again"
    monkeypatch.setattr(files, "MOST_BYTES", 1)
    assert isinstance(chosen(Doubling(0.25), tmp_path), SessionEncoder)
    assert len(names(tmp_path)) == 1, "the newest is kept at any size"


def test_what_an_ended_process_left_is_removed_and_what_another_makes_is_not(
    tmp_path: Path,
) -> None:
    for name in (".making-old", ".making-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "graph.onnx").write_text("half")
    os.utime(tmp_path / ".making-old", (0, 0))
    chosen(Doubling(), tmp_path)
    assert [name for name in names(tmp_path) if name.startswith(".")] == [".making-new"]


def test_processes_that_make_one_graph_at_the_same_time_each_serve_it(tmp_path: Path) -> None:
    """Two are within `staging` at once; the later one keeps its file over the other's."""
    encoder = golden_encoder()
    shape = StepShape(CHUNK, window_frames(encoder), NUM_FEATURES)
    kept = GraphFiles(tmp_path)
    with kept.staging() as first, kept.staging() as second:
        for folder in (first, second):
            write_graph(encoder, shape, folder / f"{graph_digest(encoder, shape)}.onnx")
            kept.keep(folder / f"{graph_digest(encoder, shape)}.onnx")
    (name,) = names(tmp_path)
    assert isinstance(chosen(encoder, tmp_path, "onnx"), SessionEncoder)
    assert names(tmp_path) == [name]


def test_a_large_table_lies_in_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made anew with the graph when it is gone, and gone with it."""
    plain = step_of(chosen(golden_encoder(), tmp_path / "plain"))
    monkeypatch.setattr(large_tensors, "_LEAST_BYTES", 4096)
    folder = tmp_path / "split"
    assert isinstance(chosen(golden_encoder(), folder, "onnx"), SessionEncoder)
    graph, data = names(folder)
    assert data == f"{graph}.data"
    assert (folder / graph).stat().st_size < (tmp_path / "plain" / graph).stat().st_size
    for damage in (os.unlink, lambda path: os.truncate(path, 4096)):
        damage(folder / data)
        np.testing.assert_array_equal(step_of(chosen(golden_encoder(), folder, "onnx")), plain)
        assert names(folder) == [graph, data]
    GraphFiles(folder).forget(graph)
    assert not list(folder.iterdir())


def test_a_name_follows_from_all_that_a_graph_follows_from() -> None:
    shape = StepShape(CHUNK, window_frames(golden_encoder()), NUM_FEATURES)
    models = [golden_model() for _ in range(4)]
    changed, renamed, longer = (model.encoder for model in models[1:])
    next(changed.parameters()).add_(1e-6)
    for module in renamed.modules():
        if hasattr(module, "activation"):
            module.activation = nn.functional.gelu
    longer.tabulate_positions(600)
    found = {
        "same": graph_digest(models[0].encoder, shape),
        "weights": graph_digest(changed, shape),
        "options": graph_digest(renamed, shape),
        "tables": graph_digest(longer, shape),
        "sizes": graph_digest(models[0].encoder, StepShape(CHUNK + 1, 23, NUM_FEATURES)),
    }
    assert found["same"] == graph_digest(golden_encoder(), shape)
    assert len(set(found.values())) == len(found)
