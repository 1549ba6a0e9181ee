from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.checkpoints.installed import ENTRY_POINTS
from oasr_backend.errors import CheckpointError
from oasr_backend.serve.checks import (
    CHECKPOINT_FILES,
    check_checkpoints,
    check_libpython,
    check_model_repository,
    check_numpy,
    check_package,
    check_ports,
    check_settings,
    check_shared_memory,
    check_stub,
    check_torch,
    find_problems,
    shared_memory_need_bytes,
)
from oasr_backend.serve.command import ServerSettings
from oasr_backend.serve.embedded import TritonInstall, find_triton
from oasr_backend.serve.ports import find_free_ports
from oasr_backend.serve.repository import ModelConfig, read_model_config
from oasr_backend.triton_backend.overrides import OVERRIDES_VARIABLE
from tests.conftest import GOLDEN_DIR

ECHO_REPOSITORY = Path(__file__).parent / "data" / "echo_repository"
CONTAINER_SERVER = TritonInstall(Path("/opt/tritonserver/bin/tritonserver"))
DOCKER_DEFAULT_SHM_BYTES = 64 << 20


def _model(folder: Path, *, max_batch_size: int = 1024, checkpoint: str = "mine") -> ModelConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(
        f"""
        # max_batch_size: 1
        max_batch_size: {max_batch_size}
        instance_group [ {{ kind: KIND_CPU count: 2 }} ]
        parameters {{ key: "checkpoint_dir" value {{ string_value: "{checkpoint}" }} }}
        parameters: {{ key: "device", value: {{ string_value: "cpu" }} }}
        """
    )
    return read_model_config(folder)


def _subsets(*names: str) -> Iterator[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from combinations(names, size)


def _checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in CHECKPOINT_FILES:
        (folder / name).write_text("content")
    return folder


def _embedded_at(root: Path) -> TritonInstall:
    return TritonInstall(root / "bin" / "tritonserver", wheel_root=root)


def test_this_machine_passes_every_check() -> None:
    http_port, grpc_port, metrics_port = find_free_ports(3)
    settings = ServerSettings(
        ECHO_REPOSITORY, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port
    )
    assert find_problems(find_triton(), settings) == []


def test_all_problems_are_found_in_one_go(tmp_path: Path) -> None:
    _model(tmp_path / "repository" / "asr")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = ServerSettings(
            tmp_path / "repository",
            http_port=listener.getsockname()[1],
            overrides={"checkpoint_dir": str(tmp_path / "none")},
        )
        problems = find_problems(_embedded_at(tmp_path), settings)
    names = {problem.name for problem in problems}
    assert {"stub", "port", "model-repository", "checkpoint"} <= names
    assert all("\n" not in problem.message + problem.remedy for problem in problems)


@pytest.mark.parametrize("version", ["2.0.0", "2.3.1", "10.0"])
def test_numpy_2_is_a_problem(version: str) -> None:
    (problem,) = check_numpy(version)
    assert version in problem.message
    assert "numpy<2" in problem.remedy


def test_numpy_1_is_no_problem() -> None:
    assert check_numpy("1.26.4") == []


def test_missing_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (problem,) = check_torch()
    assert "pip install 'torch" in problem.remedy


def test_a_package_that_is_not_installed_is_a_problem() -> None:
    (problem,) = check_package("oasr-backend-of-nobody")
    assert "pip install -e ." in problem.remedy
    assert check_package() == []


def test_a_python_without_its_shared_library_is_a_problem_of_the_embedded_server_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oasr_backend.serve.embedded.LIBPYTHON_NAME", "libpython0.0.so.1.0")
    (problem,) = check_libpython(_embedded_at(tmp_path))
    assert "--enable-shared" in problem.remedy
    assert check_libpython(CONTAINER_SERVER) == []


def test_a_python_without_a_stub_is_told_which_versions_have_one(tmp_path: Path) -> None:
    for version in ("3.0", "3.1"):
        (tmp_path / "python_backend_stubs" / version).mkdir(parents=True)
    (problem,) = check_stub(_embedded_at(tmp_path))
    assert "3.0, 3.1" in problem.message
    assert check_stub(CONTAINER_SERVER) == []


def test_a_busy_port_names_the_port_and_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (problem,) = check_ports("127.0.0.1", {"--grpc-port": port})
    assert f"127.0.0.1:{port}" in problem.message
    assert "--grpc-port" in problem.remedy


def test_a_port_taken_on_every_address_is_busy_on_loopback_too() -> None:
    with socket.create_server(("", 0)) as listener:
        problems = check_ports("127.0.0.1", {"--http-port": listener.getsockname()[1]})
    assert [problem.name for problem in problems] == ["port"]


def test_one_port_for_two_services_is_a_problem() -> None:
    (port,) = find_free_ports(1)
    (problem,) = check_ports("127.0.0.1", {"--http-port": port, "--grpc-port": port})
    assert f"port {port} is given 2 times" in problem.message


def test_an_address_of_another_machine_is_a_problem() -> None:
    (problem,) = check_ports("192.0.2.1", {"--http-port": 8000})
    assert "--host" in problem.remedy


def test_a_repository_that_is_no_folder_or_holds_no_model_is_a_problem(tmp_path: Path) -> None:
    (missing,) = check_model_repository(tmp_path / "absent")
    assert "is not a folder" in missing.message
    (empty,) = check_model_repository(tmp_path)
    assert "no model" in empty.message
    assert check_model_repository(ECHO_REPOSITORY) == []


def test_a_model_without_its_code_is_a_problem(tmp_path: Path) -> None:
    shutil.copytree(ECHO_REPOSITORY, tmp_path / "repository")
    (tmp_path / "repository" / "echo_sequence" / "1" / "model.py").unlink()
    (problem,) = check_model_repository(tmp_path / "repository")
    assert "echo_sequence" in problem.message


def test_the_config_is_read_without_its_comments(tmp_path: Path) -> None:
    config = _model(tmp_path / "asr", max_batch_size=12)
    assert (config.name, config.max_batch_size, config.instance_count) == ("asr", 12, 2)
    assert [config.num_instances(num_gpus) for num_gpus in (0, 1, 4)] == [2, 2, 2]
    of_any_kind = replace(config, is_cpu_only=False)
    assert [of_any_kind.num_instances(num_gpus) for num_gpus in (0, 1, 4)] == [2, 2, 8]
    assert config.parameters == {"checkpoint_dir": "mine", "device": "cpu"}


def test_a_key_that_no_model_knows_is_told_with_the_nearest(tmp_path: Path) -> None:
    echo = read_model_config(ECHO_REPOSITORY / "echo_sequence")
    models = [_model(tmp_path / "asr"), echo]
    known = {"max_streams": "4", "load_delay_s": "0", "asr:dtype": "float32"}
    assert check_settings(models, {**known, "echo_sequence:load_delay_s": "1"}) == []
    unknown = {"load_delay": "1", "max_stream": "4", "asr:load_delay_s": "0", "arr:dtype": "a"}
    told = [(one.message, one.remedy) for one in check_settings(models, unknown)]
    assert told == [
        ("no model knows the parameter 'load_delay'", "did you mean 'load_delay_s'?"),
        ("no model knows the parameter 'max_stream'", "did you mean 'max_streams'?"),
        ("the model asr knows no parameter 'load_delay_s'", "did you mean 'asr:dead_after_s'?"),
        ("no model is called 'arr'", "write asr:dtype for the nearest"),
    ]
    assert check_settings([], unknown) == []


def test_a_bad_override_of_the_environment_names_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model(tmp_path / "asr")
    inherited = (
        '{"asr:chunk_size": "wide", "max_stream": "4", "asr:nbest": "0", "dtype": "float16"}'
    )
    monkeypatch.setenv(OVERRIDES_VARIABLE, inherited)

    def told(**overrides: str) -> list[str]:
        problems = find_problems(
            _embedded_at(tmp_path), ServerSettings(tmp_path, overrides=overrides)
        )
        return [problem.message for problem in problems if problem.name == "setting"]

    messages = told()
    assert all(message.startswith(f"{OVERRIDES_VARIABLE} of the env") for message in messages)
    for words in ("the parameter 'max_stream'", "nbest=0 is outside", "chunk_size='wide' is not"):
        assert sum(words in message for message in messages) == 1
    assert len(messages) == 3
    won = told(chunk_size="8", nbest="1", max_streem="4")
    assert [message.startswith(OVERRIDES_VARIABLE) for message in won] == [False, True]


def test_each_model_may_have_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    models = [_model(tmp_path / name, checkpoint="none") for name in ("a", "b")]
    good = str(_checkpoint(tmp_path / "good"))
    (problem,) = check_checkpoints(models, {"a:checkpoint_dir": good})
    assert str(tmp_path / "b" / "none") in problem.message
    assert check_checkpoints(models, {"a:checkpoint_dir": good, "checkpoint_dir": good}) == []


def test_a_checkpoint_of_another_layout_is_left_to_its_reader(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    config = _model(tmp_path / "asr", checkpoint=str(folder))
    (problem,) = check_checkpoints([config], {})
    assert problem.message == f"the checkpoint folder {folder} is empty"
    assert problem.remedy == (
        "give a folder with train.yaml, final.pt, units.txt, or one with pretrained.pt, "
        "tokens.txt by --checkpoint"
    )
    (folder / "weights.safetensors").write_text("content")
    assert check_checkpoints([config], {}) == []
    archive = _model(tmp_path / "other", checkpoint=str(folder / "weights.safetensors"))
    assert check_checkpoints([archive], {}) == []


def test_a_checkpoint_with_names_of_ours_is_left_to_an_installed_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "units.txt").write_text("a 0\n")
    config = _model(tmp_path / "asr", checkpoint=str(folder))
    assert "lacks train.yaml" in check_checkpoints([config], {})[0].message
    about = tmp_path / "site" / "toolkit-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toolkit\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nours = toolkit:Reader\n")
    monkeypatch.syspath_prepend(about.parent)
    assert check_checkpoints([config], {}) == []
    (folder / "train.yaml").write_text("a: 1\n")
    assert check_checkpoints([config], {}) == []
    for path in (tmp_path / "empty", tmp_path / "absent"):
        if path.name == "empty":
            path.mkdir()
        (problem,) = check_checkpoints([config], {"checkpoint_dir": str(path)})
        assert problem.remedy == (
            "give a folder with train.yaml, final.pt, units.txt, or one with pretrained.pt, "
            "tokens.txt, or a checkpoint of an installed reader (ours), by --checkpoint"
        )


def test_the_checkpoint_of_the_config_lies_in_the_model_folder(tmp_path: Path) -> None:
    config = _model(tmp_path / "asr")
    (problem,) = check_checkpoints([config], {})
    assert str(tmp_path / "asr" / "mine") in problem.message
    _checkpoint(tmp_path / "asr" / "mine")
    assert check_checkpoints([config], {}) == []


def test_an_overridden_checkpoint_is_checked_instead_of_that_of_the_config(tmp_path: Path) -> None:
    good = _checkpoint(tmp_path / "good")
    assert check_checkpoints([_model(tmp_path / "asr")], {"checkpoint_dir": str(good)}) == []


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_an_absent_or_empty_checkpoint_file_is_named(tmp_path: Path, name: str) -> None:
    folder = _checkpoint(tmp_path / "good")
    (folder / name).write_text("")
    config = _model(tmp_path / "asr", checkpoint=str(folder))
    (empty,) = check_checkpoints([config], {})
    (folder / name).unlink()
    (absent,) = check_checkpoints([config], {})
    assert name in empty.message
    assert empty == absent


def test_a_link_to_nothing_is_told_with_what_it_names(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "good")
    config = _model(tmp_path / "asr", checkpoint=str(folder))
    (folder / "final.pt").unlink()
    (folder / "final.pt").symlink_to("gone.pt")
    (problem,) = check_checkpoints([config], {})
    assert "lacks final.pt (final.pt is a link to gone.pt, which is not there)" in problem.message
    (tmp_path / "elsewhere").symlink_to("nowhere")
    (problem,) = check_checkpoints([config], {"checkpoint_dir": str(tmp_path / "elsewhere")})
    assert problem.message.endswith("elsewhere is a link to nowhere, which is not there")


def _opens(path: Path) -> bool:
    try:
        open_checkpoint(path).load()
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize("icefall", list(_subsets("pretrained.pt", "epoch-1.pt", "tokens.txt")))
def test_what_a_reader_opens_has_no_problem(tmp_path: Path, icefall: tuple[str, ...]) -> None:
    for number, wenet in enumerate(_subsets(*CHECKPOINT_FILES)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("global_cmvn", *wenet):
            (folder / name).symlink_to(GOLDEN_DIR / "wenet_small" / name)
        for name in ("train_args.json", *icefall):
            source = "pretrained.pt" if name.endswith(".pt") else name
            (folder / name).symlink_to(GOLDEN_DIR / "zip_ctc_small" / source)
        config = _model(tmp_path / f"asr{number}", checkpoint=str(folder))
        if _opens(folder):
            assert check_checkpoints([config], {}) == [], sorted(folder.iterdir())


def test_the_default_shared_memory_of_a_container_is_too_small_for_full_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_bytes = shared_memory_need_bytes([_model(tmp_path / "asr")])
    assert need_bytes > DOCKER_DEFAULT_SHM_BYTES
    status = os.statvfs(tmp_path)
    blocks = DOCKER_DEFAULT_SHM_BYTES // status.f_frsize
    fields = list(status)
    fields[4] = blocks
    monkeypatch.setattr("os.statvfs", lambda _path: os.statvfs_result(fields))
    (problem,) = check_shared_memory(need_bytes, directory=tmp_path)
    assert "64 MiB free, full batches need 157 MiB" in problem.message
    assert "--shm-size" in problem.remedy


def test_more_shared_memory_than_the_machine_has_is_a_problem() -> None:
    assert [problem.name for problem in check_shared_memory(1 << 60)] == ["shm"]
    assert check_shared_memory(1) == []


def test_the_need_of_shared_memory_grows_with_batch_and_instances(tmp_path: Path) -> None:
    small = _model(tmp_path / "asr", max_batch_size=1)
    large = replace(small, max_batch_size=100)
    assert shared_memory_need_bytes([large]) > shared_memory_need_bytes([small])
    doubled = replace(small, instance_count=2 * small.instance_count)
    assert shared_memory_need_bytes([doubled]) == 2 * shared_memory_need_bytes([small])


def test_a_machine_without_shared_memory_is_a_problem(tmp_path: Path) -> None:
    (problem,) = check_shared_memory(1, directory=tmp_path / "absent")
    assert "does not exist" in problem.message
