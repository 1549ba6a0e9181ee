"""One stream for a long time: flat memory, constant blocks, and no loss of words.

`python -m benchmarks.long_stream --hours 2` is the same for two hours.
"""

from __future__ import annotations

import pytest

from benchmarks.long_stream import LapResult, complaints, make_lap, play
from oasr_backend.config import ServingConfig

pytestmark = pytest.mark.slow
LAP_S = 240.0


@pytest.fixture(scope="module", name="laps")
def _laps() -> list[LapResult]:
    """Twelve minutes; positions are re-based every 13 s."""
    config = ServingConfig.of(max_streams=1, position_limit_frames=400)
    return play(config, lap_s=LAP_S, num_laps=3)


def test_twelve_minutes_pass_without_a_complaint(laps: list[LapResult]) -> None:
    assert complaints(laps) == []


def test_positions_were_rebased_many_times(laps: list[LapResult]) -> None:
    """A re-base leaves 64 frames of history, so one comes every 336 frames or 21 steps."""
    assert [lap.num_rebases for lap in laps] == pytest.approx([LAP_S / 13.44] * 3, abs=1)


def test_the_last_lap_is_heard_as_well_as_the_first(laps: list[LapResult]) -> None:
    rates = [lap.word_error_rate for lap in laps]
    assert 0.05 < rates[0] < 0.2
    assert rates[-1] == pytest.approx(rates[0], abs=0.01)


def test_a_lap_ends_in_silence_so_that_its_text_stands_alone() -> None:
    lap = make_lap(30.0)
    assert lap.samples_S.size == 30 * 16_000
    assert not lap.samples_S[-24_000:].any()
    assert 40 < len(lap.text.split()) < 120


def lap_result(**changes: object) -> LapResult:
    fields: dict[str, object] = {
        "word_error_rate": 0.2, "resident_mib": 300.0, "block_counts": frozenset({4}),
        "num_rebases": 1, "seconds": 1.0,
    }  # fmt: skip
    return LapResult(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"word_error_rate": 0.211}, "word error rate moved by"),
        ({"resident_mib": 317.0}, "memory grew by 17.0 MiB"),
        ({"block_counts": frozenset({4, 5})}, "blocks held varies"),
    ],
)
def test_what_changes_with_time_is_complained_of(changes: dict[str, object], words: str) -> None:
    (complaint,) = complaints([lap_result(), lap_result(**changes)])
    assert words in complaint


def test_a_run_that_never_rebased_proves_nothing() -> None:
    (complaint,) = complaints([lap_result(num_rebases=0)] * 2)
    assert "re-based" in complaint
