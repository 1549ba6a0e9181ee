"""Tensors that no module took: on a reader's list of what changes no result, or refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from oasr_backend.checkpoints.weights import Weights
from oasr_backend.errors import CheckpointError

logger = logging.getLogger(__name__)

#: Kinds of tensors that change no result, each with the pattern that their names hold.
Kinds = Sequence[tuple[str, re.Pattern[str]]]


def kind_of(name: str, kinds: Kinds) -> str | None:
    """The first kind that fits the name; None for none."""
    return next((kind for kind, pattern in kinds if pattern.search(name)), None)


def account_for_rest(weights: Weights, kinds: Kinds, *, why: str) -> None:
    """Logs in one line what is not taken and of one of the `kinds`.

    Raises CheckpointError naming the first tensor that is neither; `why` says why that is no
    detail, and what to do.
    """
    found: dict[str, list[str]] = {}
    strays: list[str] = []
    for name in weights.left:
        kind = kind_of(name, kinds)
        (strays if kind is None else found.setdefault(kind, [])).append(name)
    if strays:
        raise CheckpointError(
            f"{weights.path}: {unused([weights.name_in_file(name) for name in strays], why=why)}"
        )
    if found:
        groups = [f"{kind}={len(names)} ({names[0]})" for kind, names in found.items()]
        logger.info("event=tensors_ignored file=%s %s", weights.path, " ".join(groups))


def unused(names: Sequence[str], *, why: str) -> str:
    """That the first of the names, and how many more, would have no use."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more} would be unused: {why}"
