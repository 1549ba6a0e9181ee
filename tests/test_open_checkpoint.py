"""The door for checkpoints: who opens what, and what is told before weights are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oasr_backend.checkpoints import Checkpoint, open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.errors import CheckpointError, ConfigError
from oasr_backend.streaming.assemble import load_engine
from tests.checkpoint_helpers import SOURCE, copy_golden, edit_config, edit_yaml
from tests.checkpoint_helpers import refusal as refused

READER = '''
from dataclasses import dataclass
from pathlib import Path

from oasr_backend.checkpoints import open_checkpoint


@dataclass(frozen=True)
class Opened:
    """Lends what another checkpoint holds."""

    path: Path

    @property
    def info(self):
        return open_checkpoint(self.path.read_text()).info

    def load(self):
        return open_checkpoint(self.path.read_text()).load()


class LinkReader:
    name = "Link"
    file_names = ("*.link",)

    def recognises(self, path):
        return path.suffix == ".link"

    def open(self, path):
        return Opened(path)


class GreedyReader(LinkReader):
    name = "Greedy"

    def recognises(self, path):
        return True


class UnsureReader(LinkReader):
    name = "Unsure"

    def recognises(self, path):
        raise KeyError("suffix")


class RaisingReader(LinkReader):
    name = "Raising"

    def open(self, path):
        raise OSError("no such share")


class EmptyReader(LinkReader):
    name = "Empty"

    def open(self, path):
        return None


class Unloadable(Opened):
    def load(self):
        raise RuntimeError("three layers, not four")


class UnloadableReader(LinkReader):
    name = "Unloadable"

    def open(self, path):
        return Unloadable(path)


class Loadless(Opened):
    def load(self):
        return None


class LoadlessReader(LinkReader):
    name = "Loadless"

    def open(self, path):
        return Loadless(path)


class Infoless(Opened):
    info = None


class InfolessReader(LinkReader):
    name = "Infoless"

    def open(self, path):
        return Infoless(path)
'''
Install = Callable[[str], None]


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return copy_golden(tmp_path)


@pytest.fixture(name="install")
def _install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package with the readers above, one of them as its entry point."""
    site = tmp_path / "site"

    def install(value: str) -> None:
        about = site / "toolkit-1.0.dist-info"
        about.mkdir(parents=True)
        (site / "toolkit_of_a_test.py").write_text(READER, encoding="utf-8")
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toolkit\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[oasr_backend.readers]\nours = {value}\n")
        monkeypatch.syspath_prepend(site)

    yield install
    monkeypatch.delitem(sys.modules, "toolkit_of_a_test", raising=False)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def test_what_is_known_before_the_weights_is_what_they_make(directory: Path) -> None:
    info = open_checkpoint(directory).info
    checkpoint = open_checkpoint(directory).load()
    assert info.encoder == checkpoint.model.spec
    assert info.frames == checkpoint.model.frontend.geometry
    assert info.vocab_size == checkpoint.tokenizer.vocab_size == 96
    assert list(info.searches) == list(checkpoint.searches) == ["greedy", "prefix_beam"]


def test_a_checkpoint_is_known_without_its_weights(directory: Path) -> None:
    (directory / "final.pt").unlink()
    opened = open_checkpoint(directory)
    assert opened.path == directory
    assert opened.info.encoder.model_dim == 64
    with pytest.raises(CheckpointError, match=r"final.pt does not exist; a WeNet checkpoint"):
        opened.load()


def test_two_models_of_one_open_checkpoint_share_no_tensor(directory: Path) -> None:
    opened = open_checkpoint(directory)
    first, second = opened.load().model, opened.load().model
    assert first.state_dict().keys() == second.state_dict().keys()
    shared = {t.data_ptr() for t in first.state_dict().values() if t.numel()}
    assert not shared & {t.data_ptr() for t in second.state_dict().values() if t.numel()}


def spoil_units(directory: Path) -> None:
    (directory / "units.txt").write_text("<blank> 0\nx 7\n")


@pytest.mark.parametrize("weights", [None, b"not a checkpoint"], ids=["missing", "garbage"])
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda d: edit_yaml(d, causal=False), "causal=False"),
        (lambda d: (d / "units.txt").unlink(), "units.txt does not exist"),
        (spoil_units, "units.txt"),
        (lambda d: (d / "global_cmvn").write_text("{}"), "global_cmvn"),
        (
            lambda d: edit_config(d, lambda c: c["dataset_conf"].update(feats_type="mfcc")),
            "feats_type='mfcc'",
        ),
        (lambda d: edit_config(d, lambda c: c.update(tokenizer="whisper")), "tokenizer='whisper'"),
    ],
)
def test_what_needs_no_weights_is_told_before_they_are_looked_at(
    directory: Path, spoil: Callable[[Path], object], told: str, weights: bytes | None
) -> None:
    (directory / "final.pt").unlink()
    if weights is not None:
        (directory / "final.pt").write_bytes(weights)
    spoil(directory)
    text = refusal(directory)
    assert told in text
    assert "final.pt does not exist" not in text


def test_a_chunk_size_that_was_not_trained_is_told_before_the_weights(directory: Path) -> None:
    edit_yaml(directory, static_chunk_size=8, use_dynamic_chunk=False)
    assert open_checkpoint(directory).load().model.spec.chunk_sizes == (8,)
    (directory / "final.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match=r"chunk_size=16, .*chunks of 8 frames"):
        load_engine(directory, ServingConfig(), device="cpu")


@pytest.mark.parametrize("size", [-1, 2.5, "many", True])
def test_a_static_chunk_that_is_no_size_is_refused_by_name(directory: Path, size: object) -> None:
    edit_yaml(directory, static_chunk_size=size, use_dynamic_chunk=False)
    assert f"static_chunk_size={size!r}" in refusal(directory)


def test_dynamic_training_leaves_the_chunk_size_free() -> None:
    assert open_checkpoint(SOURCE).info.encoder.chunk_sizes == ()


def test_what_no_reader_knows_is_told_with_what_is_there_and_what_is_looked_for(
    directory: Path,
) -> None:
    for name in ("train.yaml", "units.txt"):
        (directory / name).unlink()
    text = refusal(directory)
    assert f"{directory} is no checkpoint" in text
    held = ", ".join(sorted(path.name for path in directory.iterdir()))
    assert f"it holds {held}. " in text
    assert "A WeNet checkpoint holds train.yaml, final.pt, units.txt" in text


@pytest.mark.parametrize("name", ["train.yaml", "final.pt", "units.txt", "bpe.model"])
def test_a_link_to_nothing_and_a_folder_are_called_that(directory: Path, name: str) -> None:
    path = directory / name
    path.unlink(missing_ok=True)
    path.symlink_to("gone/file")
    refused(directory, f"{path} is a link to gone/file, which is not there; a WeNet checkpoint")
    path.unlink()
    path.mkdir()
    refused(directory, f"{path} is a folder; a WeNet checkpoint")


def test_without_its_settings_and_by_one_of_its_files_wenet_is_told_the_cause(
    directory: Path,
) -> None:
    told = f"is a file of a WeNet checkpoint; give its folder {directory}"
    for name in ("train.yaml", "final.pt", "units.txt"):
        assert refusal(directory / name).endswith(f"{name} {told}")
    (directory / "train.yaml").unlink()
    assert "train.yaml is missing beside final.pt; copy it there" in refusal(directory)


def test_a_path_without_files_is_called_what_it_is(tmp_path: Path) -> None:
    assert "it does not exist" in refusal(tmp_path / "nowhere")
    assert "it is an empty folder" in refusal(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"12345")
    assert "it is a file of 5 bytes" in refusal(tmp_path / "model.bin")
    for number in range(20):
        (tmp_path / f"{number:02}.wav").touch()
    assert "10.wav, 11.wav and 9 more" in refusal(tmp_path)


def test_an_installed_reader_opens_what_it_recognises(tmp_path: Path, install: Install) -> None:
    link = tmp_path / "small.link"
    link.write_text(str(SOURCE))
    assert "is no checkpoint" in refusal(link)
    install("toolkit_of_a_test:LinkReader")
    assert open_checkpoint(link).info.vocab_size == 96
    assert isinstance(open_checkpoint(str(link)).load(), Checkpoint)
    engine = load_engine(link, ServingConfig.of(max_streams=1), device="cpu")
    assert engine.is_healthy
    assert "A Link checkpoint holds *.link" in refusal(tmp_path)
    (tmp_path / "pretrained.pt").touch()
    assert "missing beside pretrained.pt" in refusal(tmp_path)
    assert "A Link checkpoint holds *.link" in refusal(tmp_path)


def test_a_checkpoint_of_two_readers_is_refused_with_both(
    directory: Path, install: Install
) -> None:
    install("toolkit_of_a_test:GreedyReader")
    assert "a checkpoint of WeNet and Greedy at once: it holds " in refusal(directory)


@pytest.mark.parametrize("value", ["no_such_module_of_a_test:Reader", "toolkit_of_a_test:Missing"])
def test_a_reader_that_cannot_be_used_is_named(
    directory: Path, install: Install, value: str
) -> None:
    install(value)
    text = refusal(directory)
    assert f"the reader 'ours' ({value}) is installed but cannot be used" in text
    assert "uninstall its package" in text


@pytest.mark.parametrize(
    ("reader", "told"),
    [
        ("Raising", "cannot open {path} (OSError: no such share)"),
        ("Empty", "cannot open {path} (TypeError: open() gave None"),
        ("Infoless", "cannot open {path} (TypeError: its info is None"),
        ("Unloadable", "cannot load {path} (RuntimeError: three layers, not four)"),
        ("Loadless", "cannot load {path} (load() gave None, no Checkpoint)"),
    ],
)
def test_what_an_installed_reader_raises_is_told_with_its_name(
    tmp_path: Path, install: Install, reader: str, told: str
) -> None:
    link = tmp_path / "small.link"
    link.write_text(str(SOURCE))
    install(f"toolkit_of_a_test:{reader}Reader")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(link).load()
    text = str(caught.value)
    assert f"the installed reader {reader!r} {told.format(path=link)}" in text
    assert text.endswith("mend or uninstall its package")


def test_a_reader_that_fails_to_look_leaves_the_others_their_checkpoints(
    tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("toolkit_of_a_test:UnsureReader")
    fault = "the installed reader 'Unsure' cannot tell whether it knows {} (KeyError: 'suffix')"
    with caplog.at_level("WARNING", "oasr_backend"):
        assert open_checkpoint(SOURCE).info.vocab_size == 96
    (message,) = caplog.messages
    assert fault.format(SOURCE) in message
    assert f"{fault.format(tmp_path)}; mend or uninstall its package" in refusal(tmp_path)
