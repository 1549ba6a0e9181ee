"""`final.pt` in every wrapping that training gives it, and other files under that name."""

from __future__ import annotations

import logging
import pickle
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.serialization import set_crc32_options

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.parity import stream_log_probs
from tests.checkpoint_helpers import SOURCE, copy_golden, read_weights, refusal, write_weights

Wrap = Callable[[dict[str, Tensor]], dict[str, Any]]


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return copy_golden(tmp_path)


@pytest.fixture(name="final")
def _final(directory: Path) -> Path:
    return directory / "final.pt"


def renamed(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in weights.items()}


def cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def spoilt(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor + 1 for name, tensor in weights.items()}


def log_probs(directory: Path) -> np.ndarray[Any, Any]:
    feats = np.random.default_rng(0).normal(10.0, 3.0, (80, 80)).astype(np.float32)
    return stream_log_probs(directory, feats, chunk_size=8, num_left_chunks=2)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda w: {"model": w, "epoch": 3}, ["under=model "]),
        (lambda w: {"state_dict": w, "lr": 0.1}, ["under=state_dict "]),
        (lambda w: {"model": None, "model_avg": w}, ["under=model_avg "]),
        (lambda w: {"model": {}, "model_avg": w}, ["under=model_avg "]),
        (lambda w: {"model": w, "model_avg": spoilt(w)}, ["under=model not_served=model_avg "]),
        (lambda w: {"state_dict": {"model": w}}, ["under=state_dict.model "]),
        (lambda w: renamed(w, "module."), ["prefix='module.'"]),
        (lambda w: renamed(w, "model."), ["prefix='model.'"]),
        (lambda w: renamed(w, "_orig_mod."), ["prefix='_orig_mod.'"]),
        (
            lambda w: {"model": renamed(w, "module.model."), "step": torch.ones(1)},
            ["under=model ", "prefix='module.model.'"],
        ),
        (lambda w: cast(w, torch.float64), ["dtypes=float64"]),
    ],
)
def test_what_training_wrapped_is_unwrapped_with_one_line_of_the_log(
    directory: Path, wrap: Wrap, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_weights(directory, wrap(read_weights()))
    with caplog.at_level(logging.INFO, "oasr_backend"):
        np.testing.assert_array_equal(log_probs(directory), log_probs(SOURCE))
    (line,) = [text for text in caplog.messages if "event=checkpoint_unwrapped" in text]
    for word in [str(directory / "final.pt"), *words]:
        assert word in line


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_are_served_as_the_values_that_they_hold(
    directory: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    halves = cast(read_weights(), dtype)
    write_weights(directory, halves)
    (tmp_path / "widened").mkdir()
    widened = copy_golden(tmp_path / "widened")
    write_weights(widened, cast(halves, torch.float32))
    # The file's statistics differ from rounded ones that claim to be float32.
    for one in (directory, widened):
        without = {n: t for n, t in read_weights(one).items() if "global_cmvn" not in n}
        write_weights(one, without)
    np.testing.assert_array_equal(log_probs(directory), log_probs(widened))


def test_a_plain_state_dict_is_no_matter_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "oasr_backend"):
        open_checkpoint(SOURCE).load()
    assert "event=checkpoint_unwrapped" not in caplog.text


def test_a_missing_tensor_is_named_as_the_file_would_name_it(directory: Path, final: Path) -> None:
    weights = read_weights()
    weights.pop("encoder.after_norm.weight")
    write_weights(directory, renamed(weights, "module."))
    refusal(directory, f"{final} has no tensor 'module.encoder.after_norm.weight'")


def test_another_prefix_is_named_and_refused(directory: Path, final: Path) -> None:
    write_weights(directory, renamed(read_weights(), "asr."))
    refusal(directory, str(final), "'asr.' ahead", "'module.'", "'model.'")


def test_a_name_with_and_without_the_prefix_is_refused(directory: Path) -> None:
    weights = renamed(read_weights(), "module.")
    weights["encoder.after_norm.bias"] = torch.zeros(64)
    write_weights(directory, weights)
    refusal(directory, "'encoder.after_norm.bias' twice", "'module.'")


@pytest.mark.parametrize(
    ("prefix", "other"), [("", "module."), ("module.", ""), ("module.", "module.model.")]
)
def test_two_prefixes_in_one_model_are_both_named(directory: Path, prefix: str, other: str) -> None:
    weights = read_weights()
    encoder = {name: it for name, it in weights.items() if name.startswith("encoder.")}
    head = {name: it for name, it in weights.items() if name.startswith("ctc.")}
    write_weights(directory, {**renamed(head, prefix), **renamed(encoder, other)})
    refusal(directory, f"'{other}encoder.", f"prefix {other!r}", f"with {prefix!r}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"epoch": 3, "optimizer": {"lr": 0.1}}, ["no tensors", "'epoch', 'optimizer'"]),
        ({}, ["no tensors, but nothing at all"]),
        ([torch.ones(2)], ["holds a list, no state dict"]),
        (torch.ones(2), ["holds a Tensor, no state dict"]),
        ({"a.weight": torch.ones(2)}, ["no tensor 'ctc.ctc_lo.weight'", "but 'a.weight'"]),
        ({f"t{n}": torch.ones(1) for n in range(7)}, ["'t4' and 2 more"]),
    ],
)
def test_a_file_that_holds_something_else_is_refused_by_what_it_holds(
    directory: Path, final: Path, content: Any, words: list[str]
) -> None:
    torch.save(content, final)
    refusal(directory, str(final), *words)


def test_a_tensor_of_whole_numbers_is_no_weight(directory: Path) -> None:
    weights = read_weights()
    weights["ctc.ctc_lo.bias"] = weights["ctc.ctc_lo.bias"].to(torch.int8)
    write_weights(directory, weights)
    refusal(directory, "'ctc.ctc_lo.bias' is of type torch.int8", "float16")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_eighth_of_a_weight_without_its_scale_is_no_weight(
    directory: Path, dtype: torch.dtype
) -> None:
    write_weights(directory, cast(read_weights(), dtype))
    refusal(directory, f"is of type {dtype}", "quantised")


@pytest.mark.parametrize(
    ("convert", "words"),
    [
        (lambda tensor: tensor.to_sparse(), ["torch.sparse_coo"]),
        (lambda tensor: tensor.to_sparse_csr(), ["torch.sparse_csr"]),
        (lambda tensor: tensor.to("meta"), ["device meta"]),
    ],
    ids=["sparse", "csr", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_tensor_that_is_not_dense_or_holds_no_values_is_refused_by_name(
    directory: Path, final: Path, convert: Callable[[Tensor], Tensor], words: list[str]
) -> None:
    name = "encoder.encoders.0.feed_forward.w_1.weight"
    weights = read_weights()
    weights[name] = convert(weights[name])
    write_weights(directory, weights)
    refusal(directory, str(final), repr(name), *words)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.float64(0.5), "numpy.core.multiarray.scalar"),
        (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (Path("x"), "pathlib.PosixPath"),
    ],
    ids=["numpy scalar", "module", "path"],
)
def test_what_is_pickled_is_named_and_never_run(
    directory: Path, final: Path, value: object, name: str, is_zip: bool
) -> None:
    content = {"model": read_weights(), "extra": value}
    torch.save(content, final, _use_new_zipfile_serialization=is_zip)
    refusal(directory, f"{final} pickles {name},", "state_dict()")


class _RunsWhenRead:
    """An object whose pickle copies a file."""

    def __init__(self, source: Path, target: Path) -> None:
        self._paths = str(source), str(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return shutil.copyfile, self._paths


def test_a_program_in_a_pickle_does_not_run(directory: Path, tmp_path: Path, final: Path) -> None:
    program = _RunsWhenRead(directory / "units.txt", tmp_path / "copied")
    torch.save({"model": read_weights(), "x": program}, final)
    refusal(directory, "pickles shutil.copyfile,")
    assert not (tmp_path / "copied").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("is_torchs", [True, False], ids=["torch.save", "pickle"])
def test_a_pickle_of_any_protocol_is_named_by_what_it_imports_and_does_not_run(
    directory: Path, tmp_path: Path, final: Path, protocol: int, is_torchs: bool
) -> None:
    program = _RunsWhenRead(directory / "units.txt", tmp_path / "copied")
    # The module's name stands in the pickle's memo, behind other names.
    content = {"shutil": OrderedDict(a=1), "b": "copyfile", "x": program}
    with final.open("wb") as file:
        if is_torchs:
            torch.save(content, file, pickle_protocol=protocol)
        else:
            pickle.dump(content, file, protocol=protocol)
    refusal(directory, f"{final} pickles shutil.copyfile,")
    assert not (tmp_path / "copied").exists()


def test_a_text_that_reads_like_a_pickle_is_not_taken_for_one(directory: Path, final: Path) -> None:
    final.write_text("cheque for\nsome body\n")
    refusal(directory, f"cannot read {final} (21 bytes)")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_tensors_pickled_in_another_way_are_to_be_saved_again(directory: Path, final: Path) -> None:
    torch.save(read_weights(), final, pickle_protocol=4)
    refusal(directory, f"{final} is pickled in another way", "torch.save(")


def members(path: Path) -> dict[str, tuple[int, int]]:
    """First byte and size of what each member of the archive holds."""
    with zipfile.ZipFile(path) as archive:
        found = {}
        for member in archive.infolist():
            head = path.read_bytes()[member.header_offset :][:30]
            # The local header ends in the lengths of the name and of what stands behind it.
            lengths = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
            start = member.header_offset + 30 + sum(lengths)
            found[member.filename] = start, member.file_size
        return found


@pytest.mark.parametrize("name", ["data.pkl", "data/0", "data/7"])
def test_a_byte_that_differs_from_the_checksum_is_refused_by_its_member(
    directory: Path, final: Path, name: str
) -> None:
    torch.save(read_weights(), final)
    (member,) = [key for key in members(final) if key.endswith(f"/{name}")]
    start, size = members(final)[member]
    content = bytearray(final.read_bytes())
    content[start + size // 2] ^= 1
    final.write_bytes(content)
    refusal(directory, f"{final} is damaged", f"member {member} ")


def test_a_file_saved_without_checksums_is_read(directory: Path) -> None:
    set_crc32_options(compute_crc32=False)
    try:
        write_weights(directory, read_weights())
    finally:
        set_crc32_options(compute_crc32=True)
    np.testing.assert_array_equal(log_probs(directory), log_probs(SOURCE))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_torchscript_archive_is_called_that(directory: Path, final: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), str(final))
    refusal(directory, f"{final} is a TorchScript archive", "state dict that it was exported from")


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.999])
def test_a_truncated_file_is_called_that(
    directory: Path, final: Path, is_zip: bool, part: float
) -> None:
    torch.save(read_weights(), final, _use_new_zipfile_serialization=is_zip)
    content = final.read_bytes()
    kept = int(len(content) * part)
    final.write_bytes(content[:kept])
    refusal(directory, f"{final} ({kept} bytes) is truncated")


@pytest.mark.parametrize("name", ["train.yaml", "final.pt", "units.txt", "global_cmvn"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab12\nsize 28519284\n",
            ["is a Git LFS pointer", "git lfs pull"],
        ),
        (b"<!DOCTYPE html>\n<html><body>404</body></html>", ["is a web page"]),
        (b"\x1f\x8b\x08\x00" + bytes(60), ["is a gzip archive"]),
    ],
    ids=["lfs", "html", "gzip"],
)
def test_a_file_that_stands_for_another_is_called_what_it_is(
    directory: Path, name: str, content: bytes, words: list[str]
) -> None:
    (directory / name).write_bytes(content)
    refusal(directory, str(directory / name), *words)


def test_a_file_without_weights_is_refused_by_path_and_size(directory: Path, final: Path) -> None:
    final.write_bytes(b"not a checkpoint")
    refusal(directory, f"cannot read {final} (16 bytes)")
    final.write_bytes(b"")
    refusal(directory, f"cannot read {final} (0 bytes)")
