"""The id of a stream, and the options that its START carries."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from oasr_client.errors import RequestRejectedError, StreamStateError
from oasr_client.wire import OptionValue, SequenceId

MAX_SEQUENCE_ID = 2**63 - 1


def check_sequence_id(sequence_id: SequenceId) -> None:
    if isinstance(sequence_id, str):
        is_good = bool(sequence_id)
    else:
        is_good = not isinstance(sequence_id, bool) and 0 < sequence_id <= MAX_SEQUENCE_ID
    if not is_good:
        raise StreamStateError(
            f"sequence_id {sequence_id!r} cannot name a stream; "
            f"use 1..{MAX_SEQUENCE_ID} or a non-empty string"
        )


def check_options(options: Mapping[str, OptionValue]) -> None:
    for name, value in options.items():
        if not isinstance(value, (bool, int, float, str)):
            raise RequestRejectedError(
                f"option {name} is {type(value).__name__}; use a bool, int, float or string"
            )


def random_id() -> int:
    """A positive 63-bit id: gRPC carries Triton's ids as signed 64-bit integers."""
    return secrets.randbelow(MAX_SEQUENCE_ID) + 1
