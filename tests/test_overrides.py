"""The variable that carries settings to the models of a server, and what each of them takes."""

from __future__ import annotations

import pytest

from oasr_backend.config import KEYS
from oasr_backend.errors import ConfigError
from oasr_backend.triton_backend.overrides import (
    OVERRIDES_VARIABLE,
    overrides_of,
    read_overrides,
    write_overrides,
)


def test_overrides_survive_the_environment() -> None:
    overrides = {"text": 'quotes " and \\ and ü', "max_streams": "8", "asr:device": "cpu"}
    assert read_overrides({OVERRIDES_VARIABLE: write_overrides(overrides)}) == overrides


def test_those_of_the_own_process_are_read_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDES_VARIABLE, raising=False)
    assert read_overrides() == {}
    monkeypatch.setenv(OVERRIDES_VARIABLE, '{"device": "cuda", "max_streams": 8}')
    assert read_overrides() == {"device": "cuda", "max_streams": "8"}


@pytest.mark.parametrize("text", ["{", "[1]", '"a"', '{"a": [1]}', '{"a": {"b": "c"}}'])
def test_a_variable_that_is_no_object_of_strings_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=OVERRIDES_VARIABLE):
        read_overrides({OVERRIDES_VARIABLE: text})


def test_a_model_takes_what_names_it_before_what_names_none() -> None:
    overrides = {"b:max_streams": "1", "max_streams": "2", "dtype": "bfloat16", "a:device": "cpu"}
    assert overrides_of("a", overrides, KEYS) == {
        "max_streams": "2",
        "dtype": "bfloat16",
        "device": "cpu",
    }
    assert overrides_of("b", overrides, KEYS) == {"max_streams": "1", "dtype": "bfloat16"}


def test_a_common_key_that_a_model_does_not_know_leaves_it_alone() -> None:
    overrides = {"load_delay_s": "3", "device": "cpu"}
    assert overrides_of("a", overrides, KEYS) == {"device": "cpu"}
    # One that names the model is its own to refuse.
    assert "delay" in overrides_of("a", {"a:delay": "3"}, KEYS)
