"""Request parameters from the command line: `key=value`, typed as JSON scalars are."""

from __future__ import annotations

import json
from collections.abc import Iterable

from oasr_client.errors import RequestRejectedError
from oasr_client.wire import OptionValue


def parse_options(pairs: Iterable[str]) -> dict[str, OptionValue]:
    """`true`, `3`, `0.5` and `"3"` are a bool, an int, a float and a string; other text is text."""
    options: dict[str, OptionValue] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise RequestRejectedError(
                f"option {pair!r} is not key=value; write for example nbest=3"
            )
        if key.strip() in options:
            raise RequestRejectedError(f"option {key.strip()} is given twice; leave one out")
        options[key.strip()] = _typed(value)
    return options


def _typed(value: str) -> OptionValue:
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, (bool, int, float, str)) else value
