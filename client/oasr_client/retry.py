"""When a client tries again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """How hard to try. The default repairs a lost stream and otherwise fails at once.

    `start_attempts`: how often START is sent while the server is overloaded or unreachable.
    `max_restarts`: how often one chunk may have the stream started again because the server
    lost it.
    `replay_limit_s`: a lost stream that has sent no more audio than this is sent again as a
    whole, and its text is replaced; a longer one goes on as a new part, from the first sample that
    was not decoded. With the option `partials` other than "every" it cannot, since the text of the
    old part was withheld.
    A stream that the server ended at its longest length always goes on as a new part, unless
    `max_restarts` is 0.
    `backoff_s` doubles with each attempt up to `max_backoff_s`.
    """

    start_attempts: int = 1
    max_restarts: int = 3
    replay_limit_s: float = 30.0
    backoff_s: float = 0.25
    max_backoff_s: float = 4.0

    def pause_s(self, attempt: int) -> float:
        return float(min(self.backoff_s * 2**attempt, self.max_backoff_s))
