"""docs/grafana_dashboard.json shows metrics that the server has, and all of them."""

from __future__ import annotations

import json
import re

from oasr_backend.metrics import heartbeat
from tests.conftest import ROOT
from tests.engine_helpers import golden_engine


def shown() -> set[str]:
    text = (ROOT / "docs" / "grafana_dashboard.json").read_text(encoding="utf-8")
    expressions = [
        target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]
    ]
    return set(re.findall(r"oasr_\w+", " ".join(expressions)))


def published() -> set[str]:
    engine = golden_engine()
    engine.parts.metrics.rejected["SomeError"] += 1
    engine.parts.metrics.finished["end"] += 1
    return {sample.name for sample in [heartbeat(), *engine.readings()]}


def test_every_metric_of_the_dashboard_is_published() -> None:
    assert shown() <= published()


def test_every_published_metric_is_on_the_dashboard() -> None:
    # A histogram's buckets tell all of it.
    parts = {name for name in published() if name.endswith(("_sum", "_count"))}
    assert published() - parts <= shown()
