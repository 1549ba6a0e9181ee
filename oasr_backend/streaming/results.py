"""What a request is told: the text, and the RESULT document where one was asked for.

docs/result.md describes the document for its readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oasr_backend.decoders.base import Tail
from oasr_backend.decoders.group import DecoderGroup
from oasr_backend.streaming.streams import Stream
from oasr_backend.text.alignment import Timing, token_entries, word_entries
from oasr_backend.text.endpointing import EndpointRules
from oasr_backend.text.segments import Heard, Segments
from oasr_backend.text.tokenizer import Tokenizer
from oasr_backend.text.told import RECENT_S, Told
from oasr_backend.text.unit_text import Word
from oasr_backend.types import Hypothesis

#: Grows by one with every change that a reader could notice.
RESULT_VERSION = 2


class ResultBuilder:
    """Reads the decoders; an answer costs what is new or can still change, not the whole stream."""

    def __init__(self, tokenizer: Tokenizer, decoders: DecoderGroup, *, frame_s: float) -> None:
        """`frame_s` is the length of an encoder frame."""
        self._tokenizer = tokenizer
        self._decoders = decoders
        self._frame_s = frame_s

    def texts(self, streams: Sequence[Stream]) -> list[str]:
        """The text of each stream so far, as far as its `partials` shows it."""
        shown = [stream for stream in streams if not _is_hidden(stream)]
        tails = self._decoders.tails(
            [stream.slot for stream in shown],
            [stream.settled.num_tokens for stream in shown],
        )
        found = [self._text(one, tail) for one, tail in zip(shown, tails, strict=True)]
        if len(found) == len(streams):
            return found
        texts = iter(found)
        return ["" if _is_hidden(stream) else next(texts) for stream in streams]

    def document(self, text: str, stream: Stream) -> dict[str, Any]:
        """JSON-ready; only what the stream's options ask for is computed."""
        document: dict[str, Any] = {
            "version": RESULT_VERSION,
            "text": text,
            "is_final": stream.finish_reason is not None,
            "finish_reason": stream.finish_reason,
            "audio_s": round(stream.audio_s, 3),
            "decoded_s": round(self._decoded_s(stream), 3),
            "num_frames": stream.num_encoder_frames,
            "step_ms": round(stream.step_ms, 3),
        }
        options, is_shown = stream.options, not _is_hidden(stream)
        if options.rescoring:
            document["rescored"] = self._decoders.is_rescored(stream.slot)
        with_nbest = options.nbest > 1 and is_shown and not _is_cut(stream)
        if with_nbest or (options.word_times and is_shown):
            document |= self._hypotheses(stream, with_nbest=with_nbest)
        if options.endpoint:
            document |= self._recent_segments(stream)
        return document

    def _text(self, stream: Stream, tail: Tail) -> str:
        """`tail` follows the stream's settled tokens; what is stable now moves over to them."""
        settled, tokens = stream.settled, tail.tokens
        num_stable = tail.num_stable - settled.num_tokens
        if num_stable and tokens:
            stable = tokens[:num_stable]
            text, joint = self._tokenizer.joined(stable, settled.joint)
            settled.add(text, joint, num_tokens=len(stable))
            tokens = tokens[num_stable:]
        if not tokens or _is_cut(stream):
            return settled.text
        return settled.text + self._tokenizer.joined(tokens, settled.joint)[0]

    def _hypotheses(self, stream: Stream, *, with_nbest: bool) -> dict[str, Any]:
        """What follows the words that are left out; at the end that is all."""
        is_final, has_words = stream.finish_reason is not None, stream.options.word_times
        told = Told() if is_final else stream.told
        found: dict[str, Any] = {"num_tokens_before": told.num_tokens}
        (best,) = self._decoders.best([stream.slot], skips=[told.num_tokens])
        words = self._tokenizer.words(best.tokens)
        if has_words:
            shown = self._shown(stream, best)
            shown_words = words if shown is best else self._tokenizer.words(shown.tokens)
            found["num_words_before"] = told.num_words
            found |= self._alignment(stream, shown, shown_words)
        if with_nbest:
            found["nbest"] = self._nbest(stream, skip=told.num_tokens)
        if not is_final:
            self._leave_out_words(stream, best, words)
        return found

    def _shown(self, stream: Stream, best: Hypothesis) -> Hypothesis:
        """`best` follows what is left out; partials may hold no more of it than is stable."""
        if not _is_cut(stream):
            return best
        return best.first(self._decoders.num_stable(stream.slot) - stream.told.num_tokens)

    def _leave_out_words(self, stream: Stream, best: Hypothesis, words: Sequence[Word]) -> None:
        stream.told.leave_out_words(
            best,
            words,
            num_settled=stream.settled.num_tokens - stream.told.num_tokens,
            before_frame=round((stream.audio_s - RECENT_S) / self._frame_s),
        )

    def _alignment(
        self, stream: Stream, hypothesis: Hypothesis, words: Sequence[Word]
    ) -> dict[str, Any]:
        timing = self._timing(stream)
        return {
            "tokens": token_entries(hypothesis, self._tokenizer, timing),
            "words": word_entries(words, hypothesis, timing),
        }

    def _nbest(self, stream: Stream, *, skip: int) -> list[dict[str, Any]]:
        found = self._decoders.nbest(stream.slot, stream.options.nbest, skip=skip)
        return [
            {
                "text": self._tokenizer.decode(hypothesis.tokens),
                "score": hypothesis.score,
                "tokens": list(hypothesis.tokens),
            }
            for hypothesis in found
        ]

    def _recent_segments(self, stream: Stream) -> dict[str, Any]:
        """What follows the segments that are left out; at the end that is all."""
        segments, told = self._segments(stream), stream.told
        if stream.finish_reason is not None:
            return {"num_segments_before": 0, "segments": segments}
        found = {"num_segments_before": told.num_segments, "segments": segments}
        if stream.segments is not None:
            told.num_segments += stream.segments.leave_out(before_s=stream.audio_s - RECENT_S)
        return found

    def _segments(self, stream: Stream) -> list[dict[str, Any]]:
        """Closed segments as they were told first; at the end all of them from the final tokens.

        So the last document's segments spell its text, whatever a beam has changed since.
        """
        if stream.segments is None or stream.finish_reason is not None:
            rules = EndpointRules.from_options(stream.options, frame_s=self._frame_s)
            stream.segments = Segments(rules, self._tokenizer)
        (rest,) = self._decoders.best([stream.slot], skips=[stream.segments.num_closed_tokens])
        heard = Heard(self._timing(stream), self._heard_frames(stream), stream.finish_reason)
        tells_open = not (_is_hidden(stream) or _is_cut(stream))
        return stream.segments.told(rest, heard, tells_open=tells_open)

    def _decoded_s(self, stream: Stream) -> float:
        """Where a new stream would go on if this one ended now."""
        return min(stream.num_encoder_frames * self._frame_s, stream.audio_s)

    def _heard_frames(self, stream: Stream) -> int:
        """Without the silence that pads the end: it is no pause of a speaker."""
        return min(stream.num_encoder_frames, round(stream.audio_s / self._frame_s))

    def _timing(self, stream: Stream) -> Timing:
        return Timing(frame_s=self._frame_s, audio_s=stream.audio_s)


def _is_hidden(stream: Stream) -> bool:
    return stream.options.partials == "off" and stream.finish_reason is None


def _is_cut(stream: Stream) -> bool:
    return stream.options.partials == "stable" and stream.finish_reason is None
