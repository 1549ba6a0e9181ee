"""A part that the server hears as one stream: how much the client sent, how much it decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oasr_client.wire import Reply


@dataclass
class Part:
    """Positions are samples of the whole stream. `rate_hz` is a guess until there is an answer."""

    begin: int
    rate_hz: float
    # The next sample to send.
    next: int
    # Where a further part would begin.
    decoded: int
    reply: Reply | None = None

    @classmethod
    def starting(cls, begin: int, rate_hz: float) -> Part:
        return cls(begin, rate_hz, begin, begin)

    def following(self) -> Part:
        """The part that begins where this one has not decoded."""
        return Part.starting(self.decoded, self.rate_hz)

    @property
    def num_sent(self) -> int:
        return self.next - self.begin

    @property
    def text(self) -> str:
        return self.reply.text if self.reply else ""

    @property
    def document(self) -> dict[str, Any]:
        """The last RESULT, empty where there is none."""
        return (self.reply and self.reply.result) or {}

    @property
    def is_at_length(self) -> bool:
        """Whether the server has ended it at its longest length."""
        return self.document.get("finish_reason") == "length"

    def heard(self, reply: Reply, num_samples: int) -> None:
        """Notes an answer to so many more samples. One without RESULT counts as all decoded."""
        self.reply = reply
        self.next += num_samples
        self.decoded = self.next
        audio_s, decoded_s = (self.document.get(name) for name in ("audio_s", "decoded_s"))
        if audio_s:
            # The server's own setting may tell how many samples a second has.
            self.rate_hz = self.num_sent / audio_s
        if audio_s and decoded_s is not None:
            self.decoded = self.begin + round(min(decoded_s / audio_s, 1.0) * self.num_sent)
