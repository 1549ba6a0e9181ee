"""Cores for the model's instances alone: what the option takes, and what the server is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oasr_backend.errors import ConfigError
from oasr_backend.serve.cores import (
    count_gpus,
    elsewhere,
    format_cores,
    host_policies,
    parse_instance_cores,
)

USABLE = frozenset({0, 1, 2, 3, 8, 9})


@pytest.mark.parametrize(
    ("text", "cores"), [("0", [0]), ("1-3", [1, 2, 3]), (" 8-9 ", [8, 9]), ("2-2", [2])]
)
def test_a_number_or_a_range_names_cores(text: str, cores: list[int]) -> None:
    assert list(parse_instance_cores(text, USABLE)) == cores


@pytest.mark.parametrize(
    "text", ["", "x", "3-1", "-1", "1-", "0,2", "0-3-5", "1.5", "٠", 5000 * "1"]
)
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"name no cores; give one, as 0, or some, as 0-3"):
        parse_instance_cores(text, USABLE)


@pytest.mark.parametrize("text", ["7", "3-8", "9-10", "0-999999"])
def test_cores_that_may_not_be_used_are_refused_with_those_that_may(text: str) -> None:
    with pytest.raises(ConfigError, match=r"may be used, 0-3,8-9; choose from those"):
        parse_instance_cores(text, USABLE)


def test_the_server_keeps_a_core_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"leave tritonserver none of 4-5; give fewer"):
        parse_instance_cores("4-5", {4, 5})


def test_every_device_an_instance_may_have_gets_the_cores() -> None:
    assert host_policies(range(2, 4), num_gpus=2) == [
        "--host-policy=cpu,cpu-cores=2-3",
        "--host-policy=gpu_0,cpu-cores=2-3",
        "--host-policy=gpu_1,cpu-cores=2-3",
    ]
    assert host_policies(range(1), num_gpus=0) == ["--host-policy=cpu,cpu-cores=0-0"]


def test_the_rest_of_the_server_runs_on_the_other_cores() -> None:
    usable = os.sched_getaffinity(0)
    first = min(usable)
    words = elsewhere(range(first, first + 1))
    assert words == ["taskset", "--cpu-list", format_cores(usable - {first})]


@pytest.mark.parametrize(
    ("cores", "text"),
    [({0}, "0"), ({0, 1}, "0-1"), ({5, 3, 4, 0, 9}, "0,3-5,9"), (set(range(16)), "0-15")],
)
def test_cores_are_written_as_taskset_reads_them(cores: set[int], text: str) -> None:
    assert format_cores(cores) == text


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2
