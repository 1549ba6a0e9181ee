"""SubRip and WebVTT from the RESULT document's words or segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oasr_client.scripts import is_inside_word, separators

MAX_CUE_S = 6.0
MAX_CUE_CHARACTERS = 80
MAX_PAUSE_S = 0.8
#: Players drop a cue that has no length.
MIN_CUE_S = 0.001


@dataclass(frozen=True)
class Cue:
    """A caption, or a part of one, whose `text` then begins with the space before it, if any."""

    start_s: float
    end_s: float
    text: str


def srt(result: Mapping[str, Any]) -> str:
    cues = enumerate(make_cues(result), 1)
    return "".join(f"{number}\n{_times(cue, ',')}\n{cue.text}\n\n" for number, cue in cues)


def vtt(result: Mapping[str, Any]) -> str:
    cues = make_cues(result)
    return "WEBVTT\n\n" + "".join(f"{_times(cue, '.')}\n{_escape(cue.text)}\n\n" for cue in cues)


def make_cues(result: Mapping[str, Any]) -> list[Cue]:
    """Cues of grouped words with times; else one for each segment; else one for the recording.

    A blank text has no cue. A segment that goes on with a word shares that word's cue.
    """
    words = _parts(result, "words", "word")
    if words:
        texts = [str(word["word"]) for word in words]
        spaces = separators(texts, str(result.get("text", "")))
        return [_merge(group) for group in _groups(map(_cue, words, spaces, texts))]
    segments = _parts(result, "segments", "text")
    if segments:
        return [_merge(group) for group in _by_word(segments)]
    text = str(result.get("text", ""))
    return [_merge([Cue(0.0, float(result.get("audio_s", 0.0)), text)])] if text.strip() else []


def _by_word(segments: Sequence[Mapping[str, Any]]) -> list[list[Cue]]:
    groups: list[list[Cue]] = []
    for segment in segments:
        cue = _cue(segment, "", str(segment["text"]))
        if (
            groups
            and segment.get("joins_previous")
            and is_inside_word(groups[-1][-1].text, cue.text)
        ):
            groups[-1].append(cue)
        else:
            groups.append([cue])
    return groups


def _groups(words: Iterable[Cue]) -> list[list[Cue]]:
    groups: list[list[Cue]] = []
    for word in words:
        if groups and _fits(groups[-1], word):
            groups[-1].append(word)
        else:
            groups.append([word])
    return groups


def _fits(group: list[Cue], word: Cue) -> bool:
    num_characters = sum(len(part.text) for part in [*group, word])
    return (
        word.start_s - group[-1].end_s <= MAX_PAUSE_S
        and word.end_s - group[0].start_s <= MAX_CUE_S
        and num_characters <= MAX_CUE_CHARACTERS
    )


def _merge(parts: Sequence[Cue]) -> Cue:
    start_s, end_s = parts[0].start_s, parts[-1].end_s
    text = "".join(part.text for part in parts)
    return Cue(start_s, max(end_s, start_s + MIN_CUE_S), text.strip())


def _parts(result: Mapping[str, Any], name: str, text_key: str) -> list[Mapping[str, Any]]:
    """The entries of a list that have times and are not blank."""
    entries = result.get(name) or ()
    return [entry for entry in entries if _has_times(entry) and str(entry[text_key]).strip()]


def _has_times(part: Mapping[str, Any]) -> bool:
    return part.get("start_s") is not None and part.get("end_s") is not None


def _cue(part: Mapping[str, Any], space: str, text: str) -> Cue:
    return Cue(float(part["start_s"]), float(part["end_s"]), space + text)


def _times(cue: Cue, decimal_mark: str) -> str:
    return f"{_clock(cue.start_s, decimal_mark)} --> {_clock(cue.end_s, decimal_mark)}"


def _clock(time_s: float, decimal_mark: str) -> str:
    seconds, milliseconds = divmod(round(time_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{decimal_mark}{milliseconds:03d}"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
