"""Percentiles of many samples."""

from __future__ import annotations

from array import array

import numpy as np

PERCENTILES = (50, 90, 95, 99)


def summary_ms(samples_s: array[float]) -> dict[str, float]:
    """p50 to p99, the maximum and the count; of no samples only the count."""
    if not samples_s:
        return {"count": 0}
    values_ms = np.asarray(samples_s) * 1000.0
    quantiles = np.percentile(values_ms, PERCENTILES)
    named = {f"p{p}": round(float(v), 2) for p, v in zip(PERCENTILES, quantiles, strict=True)}
    return {**named, "max": round(float(values_ms.max()), 2), "count": len(samples_s)}
