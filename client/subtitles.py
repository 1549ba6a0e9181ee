"""SubRip and WebVTT from the RESULT document's words or segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_CUE_S = 6.0
MAX_CUE_CHARACTERS = 80
MAX_PAUSE_S = 0.8


@dataclass(frozen=True)
class Cue:
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
    """Words with times, grouped; else one cue per segment; else one for the whole recording."""
    words = [_cue(word, "word") for word in result.get("words") or () if _has_times(word)]
    if words:
        return [_merge(group) for group in _groups(words)]
    segments = [_cue(part, "text") for part in result.get("segments") or () if _has_times(part)]
    if segments:
        return segments
    text = str(result.get("text", ""))
    return [Cue(0.0, float(result.get("audio_s", 0.0)), text)] if text else []


def _groups(words: Iterable[Cue]) -> list[list[Cue]]:
    groups: list[list[Cue]] = []
    for word in words:
        if groups and _fits(groups[-1], word):
            groups[-1].append(word)
        else:
            groups.append([word])
    return groups


def _fits(group: list[Cue], word: Cue) -> bool:
    num_characters = sum(len(other.text) + 1 for other in group) + len(word.text)
    return (
        word.start_s - group[-1].end_s <= MAX_PAUSE_S
        and word.end_s - group[0].start_s <= MAX_CUE_S
        and num_characters <= MAX_CUE_CHARACTERS
    )


def _merge(group: list[Cue]) -> Cue:
    return Cue(group[0].start_s, group[-1].end_s, " ".join(word.text for word in group))


def _has_times(part: Mapping[str, Any]) -> bool:
    return part.get("start_s") is not None and part.get("end_s") is not None


def _cue(part: Mapping[str, Any], text_key: str) -> Cue:
    return Cue(float(part["start_s"]), float(part["end_s"]), str(part[text_key]))


def _times(cue: Cue, decimal_mark: str) -> str:
    return f"{_clock(cue.start_s, decimal_mark)} --> {_clock(cue.end_s, decimal_mark)}"


def _clock(time_s: float, decimal_mark: str) -> str:
    seconds, milliseconds = divmod(round(time_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{decimal_mark}{milliseconds:03d}"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
