"""Every test has the markers that `make unit`, `make live` and `make slow` choose by."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import hypothesis
import pytest

from oasr_backend.serve.process import TritonServer, local_settings
from tests.conftest import MODEL_REPOSITORY, ROOT
from tests.markers import LIVE_FIXTURES, LIVE_FOLDER, SLOW_TIMEOUT_S, is_live


def test_what_lies_in_the_live_folder_or_uses_a_server_is_live() -> None:
    here = Path(__file__)
    assert is_live(LIVE_FOLDER / "test_chaos.py", frozenset())
    for fixture in LIVE_FIXTURES:
        assert is_live(here, frozenset({fixture, "tmp_path"}))
    assert not is_live(here, frozenset({"tmp_path"}))


def test_every_test_that_runs_has_its_marker(request: pytest.FixtureRequest) -> None:
    assert request.node in request.session.items
    for item in request.session.items:
        assert isinstance(item, pytest.Function | pytest.Item)
        fixtures = frozenset(getattr(item, "fixturenames", ()))
        if is_live(item.path, fixtures):
            assert item.get_closest_marker("live"), item.nodeid
        is_spread = item.get_closest_marker("xdist_group") is None
        assert is_spread == all(map(item.get_closest_marker, ("live", "slow"))), item.nodeid
        if item.get_closest_marker("slow"):
            limit = item.get_closest_marker("timeout")
            assert limit is not None
            assert limit.args == (SLOW_TIMEOUT_S,), item.nodeid


def test_a_test_without_the_marker_cannot_start_a_server() -> None:
    server = TritonServer(local_settings(MODEL_REPOSITORY))
    with pytest.raises(pytest.fail.Exception, match=r"mark it with pytest\.mark\.live"):
        server.start()
    assert not server.is_started


def test_every_test_is_chosen_by_exactly_one_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    chosen = re.findall(r'^(?:unit|live|slow):.*\n\t\$\(PYTEST\) -m "([^"]+)"', makefile, re.M)
    assert len(chosen) == 3
    for live, slow in product((False, True), repeat=2):
        marks = {"live": live, "slow": slow}
        assert sum(bool(eval(expression, marks)) for expression in chosen) == 1


def test_no_generated_example_has_a_deadline() -> None:
    assert hypothesis.settings().deadline is None


def test_the_slowest_tests_are_always_shown_and_every_marker_is_known(
    request: pytest.FixtureRequest,
) -> None:
    options = request.config.getini("addopts")
    assert "--durations=25" in options
    assert "--strict-markers" in options
