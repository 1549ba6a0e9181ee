"""What the command line of the comparison chooses."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = ("throughput", "paced", "start")
_QUICK_STREAMS = (1, 2)


@dataclass(frozen=True)
class Choices:
    """`quick` measures little, to show that the program runs.

    post_s    seconds of audio in one message of a paced stream
    speak_s   how long a turn of paced streams lasts
    """

    parts: tuple[str, ...] = PARTS
    streams: tuple[int, ...] = (1, 8, 32, 128)
    paced_streams: tuple[int, ...] = (8, 32)
    rounds: int = 9
    is_quick: bool = False
    turn_s: float = 0.8
    post_s: float = 0.16
    speak_s: float = 12.8

    @property
    def num_rounds(self) -> int:
        return 1 if self.is_quick else self.rounds
