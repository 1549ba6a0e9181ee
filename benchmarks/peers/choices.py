"""What the command line of the comparison chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace

PARTS = ("throughput", "paced", "start")


@dataclass(frozen=True)
class Choices:
    """`is_quick`: little is measured, to show that the program runs.

    turn_s    how long one recogniser works in process before the next has its turn
    posts_s   seconds of audio in one message of a paced stream; each is measured
    speak_s   how long each paced stream of a turn speaks
    """

    parts: tuple[str, ...] = PARTS
    streams: tuple[int, ...] = (1, 8, 32, 128)
    paced_streams: tuple[int, ...] = (8, 32)
    rounds: int = 9
    is_quick: bool = False
    turn_s: float = 0.8
    posts_s: tuple[float, ...] = (0.64, 0.16)
    speak_s: float = 12.8

    @property
    def num_rounds(self) -> int:
        return 1 if self.is_quick else self.rounds

    @property
    def num_paced_rounds(self) -> int:
        """A turn of these is long, and holds many windows."""
        return max(1, self.num_rounds // 3)

    def quick(self) -> Choices:
        return replace(
            self,
            streams=self.streams[:2],
            paced_streams=(2,),
            posts_s=self.posts_s[-1:],
            is_quick=True,
            turn_s=0.1,
            speak_s=2.56,
        )
