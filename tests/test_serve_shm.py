from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from oasr_backend.serve.shm import (
    leftover_regions,
    new_region_prefix,
    remove_orphaned_regions,
    remove_regions,
    unowned_region_prefix,
)


def _prefix_of_an_ended_process() -> str:
    code = "from oasr_backend.serve.shm import new_region_prefix; print(new_region_prefix())"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def test_two_servers_of_one_process_get_different_prefixes() -> None:
    assert new_region_prefix() != new_region_prefix()


def test_only_the_regions_of_the_prefix_are_removed(tmp_path: Path) -> None:
    mine, other = new_region_prefix(), new_region_prefix()
    (tmp_path / f"{mine}a").touch()
    (tmp_path / f"{mine}b").touch()
    (tmp_path / f"{other}a").touch()
    assert len(remove_regions(mine, tmp_path)) == 2
    assert leftover_regions(mine, tmp_path) == []
    assert len(leftover_regions(other, tmp_path)) == 1


def test_regions_of_an_ended_process_are_orphans_and_those_of_a_living_one_are_not(
    tmp_path: Path,
) -> None:
    dead = tmp_path / f"{_prefix_of_an_ended_process()}uuid"
    alive = tmp_path / f"{new_region_prefix()}uuid"
    unowned = tmp_path / f"{unowned_region_prefix()}uuid"
    foreign = tmp_path / "triton_python_backend_shm_region_1"
    for region in (dead, alive, unowned, foreign):
        region.touch()
    assert remove_orphaned_regions(tmp_path) == [dead]
    assert sorted(tmp_path.iterdir()) == sorted([alive, unowned, foreign])


def test_regions_of_another_process_namespace_are_left_alone(tmp_path: Path) -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino + 1
    region = tmp_path / f"oasr_{namespace}_999999999_abcd_uuid"
    region.touch()
    assert remove_orphaned_regions(tmp_path) == []


def test_a_machine_without_the_folder_has_no_regions(tmp_path: Path) -> None:
    assert remove_regions("oasr_", tmp_path / "absent") == []
