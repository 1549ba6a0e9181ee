"""The rule for two ways to the results of one audio: some figures may differ, the rest not.

Another width of a batch, padding, thread count or instruction set is another order of float32
additions: a score or a confidence may differ by 1e-4. Texts, tokens, times and the order of the
n-best are the same, unless two candidates are closer than that: inputs of tests keep them apart.
`step_ms` is a measurement and stays out of the comparison.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

TOLERANCE = 1e-4
_NUMBERS = {"score", "scores", "confidence", "token_log_probs"}
_MEASURED = {"step_ms"}
#: A confidence has four digits; the difference of two such decimals is itself rounded in float64.
_DECIMALS = 1e-12


def assert_same_results(found: Any, expected: Any, *, tolerance: float = TOLERANCE) -> None:
    """Compares documents, hypotheses, decoder results, or lists of them; names what differs.

    `tolerance` is that of scores, confidences and log-probs, absolute.
    """
    differences = list(_differences(found, expected, "", tolerance))
    assert not differences, "\n".join(differences)


def _differences(found: Any, expected: Any, path: str, tolerance: float) -> Iterator[str]:
    found_parts, expected_parts = _parts(found), _parts(expected)
    if found_parts is None or expected_parts is None:
        if not _is_same(found, expected, path, tolerance):
            yield f"{path or 'the result'}: {found!r} where {expected!r} is expected"
    elif found_parts.keys() != expected_parts.keys():
        yield f"{path or 'the result'}: has {list(found_parts)}, not {list(expected_parts)}"
    else:
        for name in found_parts.keys() - _MEASURED:
            below = f"{path}.{name}" if path else str(name)
            yield from _differences(found_parts[name], expected_parts[name], below, tolerance)


def _parts(value: Any) -> Mapping[str, Any] | None:
    """Names or positions with their values; None for a plain value."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value):
        return vars(value)
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, list | tuple):
        return {str(position): one for position, one in enumerate(value)}
    return None


def _is_same(found: Any, expected: Any, path: str, tolerance: float) -> bool:
    if _NUMBERS.isdisjoint(path.split(".")):
        return bool(found == expected)
    return math.isclose(found, expected, rel_tol=0.0, abs_tol=tolerance + _DECIMALS)
