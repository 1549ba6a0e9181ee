"""A thousand streams join and leave at random, and no stream's text changes."""

from __future__ import annotations

import pytest

from tests import churn
from tests.churn import Churn, texts_alone
from tests.engine_helpers import assert_all_is_free, golden_engine, noise


def test_a_thousand_random_joins_and_leaves_change_no_text() -> None:
    recordings = [noise(seed, seconds=0.2 + 0.1 * seed) for seed in range(12)]
    engine = golden_engine(max_streams=24, max_step_streams=7)
    texts = texts_alone(golden_engine(), recordings)
    visits = Churn(engine, recordings, texts, seed=3, most_guests=24)
    visits.run(1000)
    assert_all_is_free(engine)
    assert visits.num_finished > 700
    assert engine.parts.metrics.step_width.counts[1] > 0, "some steps hold more than one stream"
    assert not visits.wrong
    assert len(set(texts)) > 6, "the recordings tell a mix-up"


def test_a_differing_text_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--joins", "3", "--guests", "2", "--clips", "4"]
    assert churn.main(few) == 0
    monkeypatch.setattr(churn, "texts_alone", lambda _engine, recordings: [""] * len(recordings))
    assert churn.main(few) == 1
    assert "expected ''" in capsys.readouterr().out
