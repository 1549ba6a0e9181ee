"""Tells when a server that has to stop has answered everything it will ever answer.

Triton waits for the END of every open sequence until its exit time-out, although most callers send
none. It serves them until then, so a stream that is still fed may end in that time.
"""

from __future__ import annotations

import re

QUIET_S = 2.0
# Name, labels and value. A heartbeat changes whether or not anything is done.
_LINE = re.compile(
    r"^((?:nv_inference_(?:request|pending)|oasr_(?!heartbeat_))\w+)\{(.*)\} (\S+)$",
    re.MULTILINE,
)
_Page = list[tuple[str, str, str]]
_MODEL = re.compile(r'\bmodel="([^"]*)"')
_PENDING = "nv_inference_pending_request_count"
_OPEN = "oasr_active_streams"


class Drain:
    """Reads one metrics page after another; `is_over` once none has changed for QUIET_S.

    Every request and every step of a model of ours counts something, so only a step longer than
    QUIET_S could be missed. A model of another kind may work unseen: then the answer stays no. So
    it does without open streams, since such a server ends by itself, after unloading its models.
    """

    def __init__(self, now_s: float) -> None:
        self._page: _Page | None = None
        self._changed_s = now_s

    def is_over(self, metrics: str, now_s: float) -> bool:
        page: _Page = _LINE.findall(metrics)
        if page != self._page:
            self._page, self._changed_s = page, now_s
        is_quiet = now_s - self._changed_s >= QUIET_S
        return is_quiet and _is_known(page) and _sum(page, _OPEN) > 0 and _sum(page, _PENDING) == 0


def _is_known(page: _Page) -> bool:
    return _models(page, _PENDING) <= _models(page, _OPEN)


def _models(page: _Page, name: str) -> set[str]:
    return {model for found, labels, _ in page if found == name for model in _MODEL.findall(labels)}


def _sum(page: _Page, name: str) -> float:
    return sum(float(value) for found, _, value in page if found == name)
