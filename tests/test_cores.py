"""Cores by affinity and by a container's quota, and how an instance divides them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oasr_backend.config import ServingConfig
from oasr_backend.cores import usable_cores
from oasr_backend.triton_backend.load import MOST_STEPS, with_cores

V1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "3200000 100000"}, 8),
        ({"cpu.max": "nonsense"}, 8),
        (dict(zip(V1, ("300000", "100000"), strict=True)), 3),
        (dict(zip(V1, ("-1", "100000"), strict=True)), 8),
        (dict(zip(V1, ("300000", "0"), strict=True)), 8),
    ],
)
def test_a_quota_counts_where_it_is_below_the_affinity(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert usable_cores(tmp_path) == expected


def test_this_machine_has_cores() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cores", "instances", "given", "expected"),
    [
        (1, 1, {}, (1, 1)),
        (2, 1, {}, (2, 1)),
        (8, 2, {}, (4, 1)),
        (2, 4, {}, (1, 1)),
        (64, 1, {}, (MOST_STEPS, 64 // MOST_STEPS)),
        (8, 1, {"steps_at_once": 2}, (2, 4)),
        (8, 1, {"num_threads": 3}, (8, 3)),
        (2, 1, {"steps_at_once": 6, "num_threads": 5}, (6, 5)),
    ],
)
def test_an_instance_takes_a_step_for_each_of_its_cores_unless_told(
    cores: int, instances: int, given: dict[str, int], expected: tuple[int, int]
) -> None:
    config = with_cores(ServingConfig.of(**given), cores, num_instances=instances)
    assert (config.step.steps_at_once, config.model.num_threads) == expected
