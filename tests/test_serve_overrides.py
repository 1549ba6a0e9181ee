from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from oasr_backend.errors import ConfigError
from oasr_backend.serve.command import ServerSettings, build_environment, format_command
from oasr_backend.serve.embedded import TritonInstall
from oasr_backend.serve.overrides import collect_overrides
from oasr_backend.triton_backend.overrides import OVERRIDES_VARIABLE

CONTAINER_SERVER = TritonInstall(Path("/opt/tritonserver/bin/tritonserver"))


def _settings(**overrides: str) -> ServerSettings:
    return ServerSettings(model_repository=Path("repository"), overrides=overrides)


def test_the_last_value_of_a_repeated_key_counts() -> None:
    assert collect_overrides(["max_streams=4", "max_streams=8"]) == {"max_streams": "8"}


def test_a_value_may_hold_an_equals_sign_or_be_empty() -> None:
    assert collect_overrides(["a=b=c", "d="]) == {"a": "b=c", "d": ""}


@pytest.mark.parametrize("setting", ["max_streams", "=4", " =4", "", ":a=4", "asr:=4"])
def test_a_setting_that_is_not_key_value_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="is not KEY=VALUE"):
        collect_overrides([setting])


def test_a_relative_checkpoint_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = collect_overrides([], checkpoints=["mine"], device="cpu")
    assert overrides == {"checkpoint_dir": str(tmp_path / "mine"), "device": "cpu"}


def test_a_setting_may_name_its_model() -> None:
    found = collect_overrides(["asr:max_streams=4", "max_streams=8", "asr:max_streams=a:b=c"])
    assert found == {"asr:max_streams": "a:b=c", "max_streams": "8"}


def test_a_checkpoint_may_name_its_model_and_a_folder_may_hold_a_colon(tmp_path: Path) -> None:
    items = [f"asr:{tmp_path}/a:b", f"{tmp_path}/c:d"]
    assert collect_overrides([], checkpoints=items, models=["asr", "other"]) == {
        "asr:checkpoint_dir": f"{tmp_path}/a:b",
        "checkpoint_dir": f"{tmp_path}/c:d",
    }


def test_a_checkpoint_of_no_model_is_told_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no model is called 'asrr'.*did you mean 'asr:/a'\?"):
        collect_overrides([], checkpoints=["asrr:/a"], models=["asr", "other"])
    (tmp_path / "c:d").mkdir()
    found = collect_overrides([], checkpoints=["c:d"], models=["asr"])
    assert found == {"checkpoint_dir": str(tmp_path / "c:d")}


def test_one_setting_given_in_two_ways_is_refused() -> None:
    with pytest.raises(ConfigError, match="--checkpoint"):
        collect_overrides(["checkpoint_dir=a"], checkpoints=["b"])
    with pytest.raises(ConfigError, match="'asr:checkpoint_dir' is given by --set and by"):
        collect_overrides(["asr:checkpoint_dir=a"], checkpoints=["asr:b"], models=["asr"])
    with pytest.raises(ConfigError, match="--checkpoint gives 'checkpoint_dir' twice"):
        collect_overrides([], checkpoints=["a", "b"])
    with pytest.raises(ConfigError, match="--device"):
        collect_overrides(["device=cpu"], device="cuda")


def test_command_line_overrides_win_over_inherited_ones() -> None:
    inherited = {OVERRIDES_VARIABLE: '{"a": "1", "b": "2"}'}
    environment = build_environment(CONTAINER_SERVER, _settings(b="3"), inherited)
    assert json.loads(environment[OVERRIDES_VARIABLE]) == {"a": "1", "b": "3"}


def test_a_common_setting_wins_over_an_inherited_one_of_a_model() -> None:
    inherited = {OVERRIDES_VARIABLE: '{"asr:a": "1", "asr:c": "2", "d": "3"}'}
    environment = build_environment(
        CONTAINER_SERVER, _settings(**{"a": "4", "asr:d": "5"}), inherited
    )
    assert json.loads(environment[OVERRIDES_VARIABLE]) == {
        "a": "4", "asr:c": "2", "asr:d": "5", "d": "3",
    }  # fmt: skip


def test_the_variable_is_absent_when_nothing_is_overridden() -> None:
    assert OVERRIDES_VARIABLE not in build_environment(CONTAINER_SERVER, _settings(), {})


def test_the_running_python_comes_first_on_path() -> None:
    environment = build_environment(CONTAINER_SERVER, _settings(), {"PATH": "/usr/bin"})
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_a_printed_command_quotes_what_a_shell_would_split() -> None:
    environment = build_environment(CONTAINER_SERVER, _settings(name="two words"))
    line = format_command(["tritonserver", "--flag=a b"], environment)
    assert """OASR_BACKEND_OVERRIDES='{"name": "two words"}'""" in line
    assert line.endswith("tritonserver '--flag=a b'")
