"""A model's number of instances: what is asked and refused, and what the server is given."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

from oasr_backend.errors import ConfigError, ServerError
from oasr_backend.serve import instances as under_test
from oasr_backend.serve.app import app
from oasr_backend.serve.checks import find_problems, shared_memory_need_bytes
from oasr_backend.serve.command import ServerSettings, build_environment
from oasr_backend.serve.derived import prepare_repository, with_own_paths
from oasr_backend.serve.embedded import TritonInstall
from oasr_backend.serve.instances import (
    CORES_AN_INSTANCE,
    choose_instances,
    instances_for,
    is_cpu,
    parse_instances,
)
from oasr_backend.serve.pbtxt import instance_groups, with_instances
from oasr_backend.serve.ports import find_free_ports
from oasr_backend.serve.repository import read_model_config, read_models
from oasr_backend.triton_backend.load import MOST_STEPS
from oasr_backend.triton_backend.overrides import OVERRIDES_VARIABLE
from tests.conftest import MODEL_REPOSITORY

SHIPPED = MODEL_REPOSITORY / "oasr_streaming"
ECHO = Path(__file__).parent / "data" / "echo_repository" / "echo_sequence"
CONTAINER_SERVER = TritonInstall(Path("/opt/tritonserver/bin/tritonserver"))
TWO_GROUPS = "instance_group [ { count: 1 gpus: [ 0 ] }, { count: 2 gpus: [ 1 ] } ]"


@pytest.fixture(name="repository")
def _repository(tmp_path: Path) -> Path:
    """The models `asr` and `other` of this backend, and one of another."""
    root = tmp_path / "repository"
    for name in ("asr", "other"):
        (root / name / "1").mkdir(parents=True)
        for part in ("config.pbtxt", "1/model.py"):
            shutil.copy(SHIPPED / part, root / name / part)
        (root / name / "demo_en").symlink_to(SHIPPED / "demo_en")
    shutil.copytree(ECHO, root / "echo")
    return root


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _counts(text: str) -> list[int]:
    """The counts of instance_group, as Triton reads them."""
    return [
        group.count
        for group in text_format.Parse(text, model_config_pb2.ModelConfig()).instance_group
    ]


def _on(monkeypatch: pytest.MonkeyPatch, *, cores: int, gpus: int = 0) -> None:
    monkeypatch.setattr(under_test, "usable_cores", lambda: cores)
    monkeypatch.setattr(under_test, "count_gpus", lambda: gpus)


GROUPS = {
    "shipped": ((SHIPPED / "config.pbtxt").read_text(), [1]),
    "none": ('name: "a" parameters { key: "count" value { string_value: "9" } }', []),
    "empty": ("instance_group [ { } ]", [1]),
    "empty list": ("instance_group [ ]", []),
    "of a kind": ("instance_group { kind: KIND_CPU }", [1]),
    "with a colon": ("instance_group: [ { kind: KIND_CPU, count: 3 } ]", [3]),
    "angles": ("instance_group < count: 4 >", [4]),
    "comments": ("# instance_group [ { count: 7 } ]\ninstance_group [ { count: # 8 }\n 5 } ]", [5]),
    "resources": (
        'instance_group { rate_limiter { resources [ { name: "count" count: 6 } ] } count: 2 }',
        [2],
    ),
    "resources alone": (
        'instance_group { rate_limiter { resources [ { name: "}" count: 6 } ] } }',
        [1],
    ),
    "a quote": ("""parameters { key: "a\\"{" value { string_value: '{"' } }
        instance_group { count: 2 name: "count: 4" }""", [2]),
    "two": (TWO_GROUPS, [1, 2]),
    "two fields": ("instance_group { count: 1 } dynamic_batching { } instance_group { }", [1, 1]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "counts"), GROUPS.values(), ids=GROUPS)
def test_the_groups_are_those_that_triton_reads(text: str, counts: list[int]) -> None:
    assert [group.count for group in instance_groups(text)] == counts
    # 0 stands for no count there, with which Triton makes one.
    assert [count or 1 for count in _counts(text)] == counts


@pytest.mark.parametrize("name", [name for name, (_, counts) in GROUPS.items() if len(counts) < 2])
def test_another_number_changes_nothing_else(name: str) -> None:
    text, _ = GROUPS[name]
    before, after = (
        text_format.Parse(one, model_config_pb2.ModelConfig())
        for one in (text, with_instances(text, 12))
    )
    assert [group.count for group in after.instance_group] == [12]
    if not before.instance_group:
        before.instance_group.add()
    before.instance_group[0].count = 12
    assert before == after


def test_the_shipped_text_differs_in_the_count_alone() -> None:
    text = (SHIPPED / "config.pbtxt").read_text()
    assert with_instances(text, 12) == text.replace("[ { count: 1 } ]", "[ { count: 12 } ]")


def test_a_number_may_count_for_all_our_models_or_for_one(repository: Path) -> None:
    configs = read_models(repository)
    assert parse_instances([], configs) == {}
    assert parse_instances(["2"], configs) == {"asr": 2, "other": 2}
    assert parse_instances(["2", "other:3"], configs) == {"asr": 2, "other": 3}
    assert parse_instances(["other:3"], configs) == {"other": 3}


@pytest.mark.parametrize(
    ("items", "told"),
    [
        (["x"], "--instances 'x' is not N or MODEL:N; write e.g. --instances 2"),
        ([""], "is not N or MODEL:N"),
        (["1.5"], "is not N or MODEL:N"),
        ([":2"], "is not N or MODEL:N"),
        (["asr:"], "is not N or MODEL:N"),
        (["asr=2"], "is not N or MODEL:N"),
        ([5000 * "1"], "is not N or MODEL:N"),
        (["0"], "--instances '0' is below 1; give 1 or more"),
        (["asr:-1"], "--instances 'asr:-1' is below 1; give 1 or more"),
        (["2", "3"], "--instances '3' is the second for all models; give it once"),
        (["asr:2", "asr:2"], "--instances 'asr:2' is the second for the model asr; give it once"),
        (["ase:2"], "no model is called 'ase'; write asr:2 for the nearest"),
        (["echo:2"], "the model echo is none of this backend; write count: 2 into instance_group"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_remedy(
    repository: Path, items: list[str], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_instances(items, read_models(repository))
    assert told in str(caught.value)


def test_a_number_for_no_model_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"echo_sequence is none of this backend; write count: 2"):
        parse_instances(["2"], [read_model_config(ECHO)])


def test_several_groups_have_no_single_count(repository: Path) -> None:
    config = repository / "asr" / "config.pbtxt"
    config.write_text(config.read_text().replace("instance_group [ { count: 1 } ]", TWO_GROUPS))
    configs = read_models(repository)
    assert parse_instances(["other:2"], configs) == {"other": 2}
    for item in ("2", "asr:2"):
        with pytest.raises(ConfigError, match=r"asr/config.pbtxt has 2 groups in instance_group"):
            parse_instances([item], configs)
    assert configs[0].instance_count == 3


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, 1), (2, 1), (8, 1), (9, 2), (16, 2), (17, 3), (64, 8)]
)
def test_eight_cores_take_an_instance(
    cores: int, expected: int, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(monkeypatch, cores=cores)
    assert instances_for(cores) == expected
    chosen = choose_instances([], ServerSettings(repository))
    assert chosen == ({} if expected == 1 else {"asr": expected, "other": expected})


def test_an_instance_has_as_many_cores_as_it_has_steps() -> None:
    assert CORES_AN_INSTANCE == MOST_STEPS


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [("cpu", 0, True), ("cpu", 2, True), ("auto", 0, True), ("auto", 1, False), ("cuda", 0, False)],
)
def test_only_models_on_the_cpu_take_more(
    device: str, gpus: int, expected: bool, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(monkeypatch, cores=16, gpus=gpus)
    assert is_cpu(device, num_gpus=gpus) is expected
    settings = ServerSettings(repository, overrides={"asr:device": device, "other:device": "cuda"})
    assert choose_instances([], settings) == ({"asr": 2} if expected else {})
    monkeypatch.setenv(OVERRIDES_VARIABLE, json.dumps(dict(settings.overrides)))
    inherited = choose_instances([], replace(settings, overrides={}))
    assert inherited == ({"asr": 2} if expected else {})


def test_a_count_of_the_config_stays_unless_another_is_given(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = repository / "asr" / "config.pbtxt"
    config.write_text(with_instances(config.read_text(), 3))
    _on(monkeypatch, cores=16)
    settings = ServerSettings(repository)
    assert choose_instances([], settings) == {"other": 2}
    assert choose_instances(["1"], settings) == {"asr": 1}
    assert choose_instances(["3"], settings) == {"other": 3}
    assert choose_instances(["asr:3"], settings) == {"other": 2}


def test_instances_that_have_cores_of_their_own_count_those(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(monkeypatch, cores=32)
    settings = ServerSettings(repository, instance_cores=range(8))
    assert choose_instances([], settings) == {}
    settings = replace(settings, instance_cores=range(17))
    assert choose_instances([], settings) == {"asr": 3, "other": 3}


def test_a_config_that_is_read_again_later_keeps_its_count(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(monkeypatch, cores=16)
    settings = ServerSettings(repository, extra_flags=["--model-control-mode=poll"])
    assert choose_instances([], settings) == {}
    with pytest.raises(
        ConfigError, match=r"--model-control-mode reads it again later; write count"
    ):
        choose_instances(["2"], settings)


def test_a_repository_without_models_is_left_to_its_check(tmp_path: Path) -> None:
    settings = ServerSettings(tmp_path / "absent")
    assert choose_instances(["asr:2"], settings) == {}
    assert "model-repository" in {one.name for one in find_problems(CONTAINER_SERVER, settings)}


def test_the_checks_count_the_instances_that_are_started(repository: Path) -> None:
    one, three = (shared_memory_need_bytes(read_models(repository, {"asr": n})) for n in (1, 3))
    assert three - one == 2 * (one - shared_memory_need_bytes(read_models(repository)[1:]))
    settings = ServerSettings(
        repository, instances={"asr": 3}, instance_cores=range(4), host="127.0.0.1"
    )
    (problem,) = [it for it in find_problems(CONTAINER_SERVER, settings) if it.name == "cores"]
    assert "too few cores for 5 instances: 4" in problem.message
    assert "have fewer by --instances" in problem.remedy


def test_a_trial_load_is_told_the_number(repository: Path) -> None:
    (asr, *_) = read_models(repository, {"asr": 3})
    assert json.loads(asr.triton_arguments["model_config"])["instance_group"] == [{"count": 3}]


def _files(folder: Path) -> set[str]:
    return {
        str((Path(where) / name).relative_to(folder))
        for where, folders, files in os.walk(folder, followlinks=True)
        for name in (*folders, *files)
    }


def test_the_served_folder_is_the_repository_but_for_the_count(repository: Path) -> None:
    (repository / "notes.txt").write_text("text")
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    served = prepare_repository(repository, {"asr": 4})
    assert _files(served) == _files(repository)
    assert _counts((served / "asr" / "config.pbtxt").read_text()) == [4]
    for name in ("other", "echo", "notes.txt", "asr/1", "asr/demo_en"):
        assert (served / name).is_symlink()
    assert (served / "other").resolve() == repository / "other"
    assert before == {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}


def test_without_another_number_the_repository_itself_is_served(repository: Path) -> None:
    assert prepare_repository(repository, {}) == repository


def test_edits_of_a_models_files_are_seen_at_once(repository: Path) -> None:
    served = prepare_repository(repository, {"asr": 4})
    (repository / "asr" / "1" / "model.py").write_text("changed")
    (repository / "other" / "config.pbtxt").write_text("changed")
    assert (served / "asr" / "1" / "model.py").read_text() == "changed"
    assert (served / "other" / "config.pbtxt").read_text() == "changed"


def test_the_folder_is_used_again_until_the_config_or_the_files_change(repository: Path) -> None:
    def prepare(count: int = 4) -> Path:
        return prepare_repository(repository, {"asr": count})

    first = prepare()
    written = first.stat().st_mtime_ns
    assert prepare() == first
    assert first.stat().st_mtime_ns == written
    others = [prepare(5)]
    (repository / "asr" / "2").mkdir()
    others.append(prepare())
    with (repository / "asr" / "config.pbtxt").open("a") as config:
        config.write("# more\n")
    others.append(prepare())
    assert len({first, *others}) == 4


@pytest.mark.parametrize("part", ["asr/config.pbtxt", "asr/1"])
def test_a_damaged_folder_is_built_again(repository: Path, part: str) -> None:
    served = prepare_repository(repository, {"asr": 4})
    (served / part).unlink()
    (served / part).write_text("damaged")
    assert prepare_repository(repository, {"asr": 4}) == served
    assert (served / "asr" / "1" / "model.py").read_text()
    assert _counts((served / "asr" / "config.pbtxt").read_text()) == [4]
    assert [path.name for path in served.parent.iterdir()] == [served.name]


def test_concurrent_starts_share_one_folder(repository: Path) -> None:
    barrier = threading.Barrier(8)
    found: list[Path] = []

    def prepare() -> None:
        barrier.wait()
        found.append(prepare_repository(repository, {"asr": 4}))

    threads = [threading.Thread(target=prepare) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert list(found[0].parent.iterdir()) == [found[0]]


def test_a_folder_that_cannot_be_written_is_told_with_the_way_without_it(
    repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match=r"Not a directory; .* write count of instance_group in"):
        prepare_repository(repository, {"asr": 4}, root=tmp_path / "file")


def test_messages_name_the_users_files(repository: Path) -> None:
    served = prepare_repository(repository, {"asr": 4})
    told = with_own_paths(f"cannot read {served}/asr/config.pbtxt", repository, {"asr": 4})
    assert told == f"cannot read {repository}/asr/config.pbtxt"
    assert with_own_paths(str(served), repository, {}) == str(served)
    shutil.rmtree(repository)
    assert with_own_paths(str(served), repository, {"asr": 4}) == str(served)


@pytest.mark.parametrize(
    ("inherited", "overrides", "folder"),
    [
        ({}, {}, "asr/demo_en"),
        ({}, {"checkpoint_dir": "../../mine"}, "asr/../../mine"),
        ({"asr:checkpoint_dir": "theirs"}, {}, "asr/theirs"),
        ({"checkpoint_dir": "/theirs"}, {"asr:checkpoint_dir": "mine"}, "asr/mine"),
        ({"checkpoint_dir": "/theirs"}, {}, "/theirs"),
    ],
)
def test_a_relative_checkpoint_starts_at_the_users_folder(
    repository: Path, inherited: dict[str, str], overrides: dict[str, str], folder: str
) -> None:
    settings = ServerSettings(repository, overrides=overrides, instances={"asr": 4})
    variables = {OVERRIDES_VARIABLE: json.dumps(inherited)}
    environment = build_environment(CONTAINER_SERVER, settings, variables)
    told = json.loads(environment[OVERRIDES_VARIABLE])
    assert told["asr:checkpoint_dir"] == str(repository / folder)
    assert "other:checkpoint_dir" not in told


def _invoke(repository: Path, *more: str) -> tuple[int, str, str]:
    flags = ("--http-port", "--grpc-port", "--metrics-port")
    ports = [f"{flag}={port}" for flag, port in zip(flags, find_free_ports(3), strict=True)]
    command = ["--model-repository", str(repository), "--host", "127.0.0.1", *ports, *more]
    result = CliRunner().invoke(app, command)
    return result.exit_code, result.stdout, result.stderr


def _served_by(command_line: str) -> Path:
    (flag,) = [one for one in shlex.split(command_line) if one.startswith("--model-repository=")]
    return Path(flag.partition("=")[2])


def _asked(repository: Path, names: Sequence[str] = ("asr", "other", "echo")) -> dict[str, int]:
    return {name: sum(_counts((repository / name / "config.pbtxt").read_text())) for name in names}


def test_the_printed_command_serves_the_number_that_is_asked(repository: Path) -> None:
    status, line, _ = _invoke(repository, "--print-command", "--instances", "asr:2")
    assert status == 0
    assert _asked(_served_by(line)) == {"asr": 2, "other": 1, "echo": 1}
    assert f'"asr:checkpoint_dir": "{repository / "asr" / "demo_en"}"' in line
    status, line, _ = _invoke(repository, "--print-command", "--instances", "1")
    assert status == 0
    assert _served_by(line) == repository
    assert OVERRIDES_VARIABLE not in line


def test_the_printed_command_serves_an_instance_for_eight_cores(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(monkeypatch, cores=17)
    _, line, _ = _invoke(repository, "--print-command", "--set", "other:device=cuda")
    assert _asked(_served_by(line)) == {"asr": 3, "other": 1, "echo": 1}


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ("0", "error: --instances '0' is below 1; give 1 or more"),
        ("many", "error: --instances 'many' is not N or MODEL:N; write e.g. --instances 2"),
        (
            "asd:2",
            "error: --instances asd:2: no model is called 'asd'; write asr:2 for the nearest",
        ),
    ],
)
def test_a_refusal_is_one_line_with_status_2(repository: Path, item: str, told: str) -> None:
    assert _invoke(repository, "--check-only", "--instances", item) == (2, "", f"{told}\n")


def test_more_instances_than_shared_memory_holds_are_a_problem(repository: Path) -> None:
    status, _, errors = _invoke(repository, "--check-only", "--instances", "99999999")
    assert status == 2
    assert errors.startswith("shm: ")


def test_check_only_names_the_users_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "asr").symlink_to(SHIPPED)
    status, line, _ = _invoke(tmp_path, "--check-only", "--instances", "2")
    assert status == 0
    assert f"loaded asr with {tmp_path / 'asr' / 'demo_en'};" in line
