"""What the documents of a live stream leave out, so that they cost the same however old it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oasr_backend.text.unit_text import Word
from oasr_backend.types import Hypothesis

#: What ended longer ago than this is left out, once a document has told it for good.
RECENT_S = 10.0


@dataclass(slots=True)
class Told:
    """How many first tokens, words and segments of a stream the next document leaves out.

    A document held each of them after it could no longer change. The tokens left out are those of
    the words left out.
    """

    num_tokens: int = 0
    num_words: int = 0
    num_segments: int = 0

    def leave_out_words(
        self, rest: Hypothesis, words: Sequence[Word], *, num_settled: int, before_frame: int
    ) -> None:
        """Of the `words` of `rest`, all of them just told, those that came before that frame.

        `rest` is what was not left out so far, and its first `num_settled` tokens cannot change. A
        word cannot change either once a token behind it is settled that starts another one.
        """
        for number in range(len(words) - 1, 0, -1):
            last, first = words[number - 1].last_token, words[number].first_token
            if last < first < num_settled and rest.times[last] < before_frame:
                self.num_tokens += first
                self.num_words += number
                return
