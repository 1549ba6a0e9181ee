"""Captions, manifests and the microphone: the parts of the command."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oasr_client.errors import ClientError
from oasr_client.manifest import Reference, load_manifest
from oasr_client.microphone import microphone_chunks
from oasr_client.scripts import join_texts
from oasr_client.sources import Excerpt
from oasr_client.subtitles import srt, vtt
from oasr_client.words import word_errors


def test_words_become_captions_that_break_at_pauses_and_length() -> None:
    starts_s = [0.0, 1.0, 2.0, 13.0, 14.0]
    words = [
        {"word": f"w{number}", "start_s": start_s, "end_s": start_s + 0.5}
        for number, start_s in enumerate(starts_s)
    ]
    assert srt({"words": words[:3]}).count("-->") == 1
    assert srt({"words": words}).splitlines()[:7] == [
        "1",
        "00:00:00,000 --> 00:00:02,500",
        "w0 w1 w2",
        "",
        "2",
        "00:00:13,000 --> 00:00:14,500",
        "w3 w4",
    ]
    many = [{"word": "long", "start_s": i * 0.2, "end_s": i * 0.2 + 0.1} for i in range(3 * 31)]
    assert srt({"words": many}).count("-->") > 3


def test_segments_and_then_the_whole_text_stand_in_for_words() -> None:
    segments = [{"text": "a < b", "start_s": 3599.9996, "end_s": 3601.0}]
    assert vtt({"segments": segments, "text": "x"}) == (
        "WEBVTT\n\n01:00:00.000 --> 01:00:01.000\na &lt; b\n\n"
    )
    assert srt({"text": "all", "audio_s": 2.0}) == "1\n00:00:00,000 --> 00:00:02,000\nall\n\n"
    assert srt({"text": "", "audio_s": 2.0}) == ""


def words_document(words: list[str], **fields: Any) -> dict[str, Any]:
    times = [{"word": word, "start_s": i / 5, "end_s": (i + 1) / 5} for i, word in enumerate(words)]
    return {"words": times, "audio_s": 9.0, **fields}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (list("今天天气很好"), "今天天气很好"),
        (list("ラーメン"), "ラーメン"),
        (["你", "好，", "OK", "GO。"], "你好， OK GO。"),
        (["HELLO", "世", "A"], "HELLO世A"),
        (["ส", "วั", "ส", "ดี", "วัน"], "สวัสดี วัน"),
        (["TO", "BE"], "TO BE"),
    ],
)
def test_a_caption_has_the_spaces_of_the_text(words: list[str], text: str) -> None:
    assert srt(words_document(words, text=text)).splitlines()[2] == text


def test_words_without_their_text_are_joined_by_script() -> None:
    document = words_document(["今", "天", "OK", "GO", "ส", "วั"], text="something else")
    assert srt(document).splitlines()[2] == "今天 OK GO สวั"


def test_every_cue_has_a_text_and_a_length() -> None:
    blank, word = ({"text": t, "start_s": 5.0, "end_s": 5.0} for t in (" ", "HI"))
    assert srt({"segments": [blank, word]}) == "1\n00:00:05,000 --> 00:00:05,001\nHI\n\n"
    assert vtt({"words": [{**word, "word": "HI"}], "text": "HI"}).count("05.000 --> 00:00:05.001")
    assert srt({"text": "HI", "audio_s": 0.0}).startswith("1\n00:00:00,000 --> 00:00:00,001\n")
    assert vtt({"text": " ", "audio_s": 1.0}) == "WEBVTT\n\n"


@pytest.mark.parametrize(
    ("texts", "captions"),
    [
        (["HEL", "LO", "YOU"], ["HELLO", "YOU"]),
        (["HEL", "", "LO", "YOU"], ["HELLO", "YOU"]),
        (["今天", "天气", "好"], ["今天", "天气", "好"]),
        (["今天", "，好", "X"], ["今天，好", "X"]),
        (["สด", "ี", "X"], ["สดี", "X"]),
        (["世", "A", "X"], ["世A", "X"]),
    ],
)
def test_a_segment_that_goes_on_with_a_word_shares_its_cue(
    texts: list[str], captions: list[str]
) -> None:
    times = [
        {"text": text, "start_s": 2.0 * i, "end_s": 2.0 * i + 1} for i, text in enumerate(texts)
    ]
    joining = [{**part, "joins_previous": True} if part["text"] else part for part in times[1:-1]]
    cues = srt({"segments": [times[0], *joining, times[-1]]}).split("\n\n")[:-1]
    assert [cue.splitlines()[2] for cue in cues] == captions
    first_ends = (
        max(i for i, text in enumerate(texts) if text and captions[0].endswith(text)) * 2 + 1
    )
    assert cues[0].splitlines()[1] == f"00:00:00,000 --> 00:00:0{first_ends},000"


@pytest.mark.parametrize(
    ("earlier", "later", "joined"),
    [
        ("今天天气", "很好", "今天天气很好"),
        ("ラー", "メン", "ラーメン"),
        ("好。", "OK", "好。 OK"),
        ("OK", "好", "OK 好"),
        ("สวัส", "ดี", "สวัสดี"),
        ("한국", "어", "한국 어"),
        ("", "好", "好"),
        ("OK", "。好", "OK。好"),
        ("好「", "OK」", "好「OK」"),
        ("OK", "「好」", "OK 「好」"),
        ("OK", ", A", "OK , A"),
    ],
)
def test_parts_of_a_transcript_are_joined_as_their_script_is_written(
    earlier: str, later: str, joined: str
) -> None:
    assert join_texts(earlier, later) == joined


def test_manifests_are_lists_or_lines_with_any_usual_key(tmp_path: Path) -> None:
    entries = [{"wav": "a.wav", "text": "A"}, {"audio_filepath": "/b.wav", "text": "B"}]
    expected = [Reference(tmp_path / "a.wav", "A"), Reference(Path("/b.wav"), "B")]
    for name, content in (
        ("list.json", json.dumps(entries)),
        ("lines.jsonl", "\n".join(map(json.dumps, entries))),
    ):
        (tmp_path / name).write_text(content)
        assert load_manifest(tmp_path / name) == expected
    (tmp_path / "bad.json").write_text('[{"text": "no audio"}]')
    with pytest.raises(ClientError, match="entry 1"):
        load_manifest(tmp_path / "bad.json")


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\x1c"])
def test_lines_of_a_manifest_end_at_line_feeds_only(tmp_path: Path, character: str) -> None:
    path = tmp_path / "lines.jsonl"
    # JSON allows control characters in strings as escapes only.
    text = character if character >= "\u0080" else json.dumps(character)[1:-1]
    lines = [f'{{"audio": "a.wav", "text": "one{text}two"}}', '{"audio": "b.wav", "text": "three"}']
    path.write_text("\r\n".join(lines) + "\r\n\n", encoding="utf-8", newline="")
    assert [entry.text for entry in load_manifest(path)] == [f"one{character}two", "three"]


@pytest.mark.parametrize(
    "content", ['{"audio": "a", "text": "b"}', '[{"audio": "a", "text": "b"}]']
)
def test_a_byte_order_mark_is_no_part_of_a_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.json").write_text(content, encoding="utf-8-sig")
    assert load_manifest(tmp_path / "m.json") == [Reference(tmp_path / "a", "b")]


def test_offset_and_duration_cut_an_excerpt_out(tmp_path: Path) -> None:
    times: list[dict[str, Any]] = [{"offset": 0.0, "duration": 2}, {"offset": 2.5}]
    times += [{"duration": 3.0}, {"offset": None, "duration": None}]
    lines = [json.dumps({"audio_filepath": "a.wav", "text": "x", **entry}) for entry in times]
    (tmp_path / "m.json").write_text("\n".join(lines))
    path = tmp_path / "a.wav"
    expected = [Excerpt(path, 0.0, 2.0), Excerpt(path, 2.5, None), Excerpt(path, 0.0, 3.0), path]
    assert [entry.audio for entry in load_manifest(tmp_path / "m.json")] == expected


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"offset": -1}, "its offset is -1"),
        ({"offset": "2"}, "its offset is '2'"),
        ({"duration": True}, "its duration is True"),
        ({"duration": float("nan")}, "its duration is nan"),
        ({"duration": 0}, "its duration is 0 s"),
    ],
)
def test_times_that_cannot_be_meant_are_refused_by_entry(
    tmp_path: Path, entry: dict[str, Any], words: str
) -> None:
    (tmp_path / "m.json").write_text(json.dumps([{"audio": "a", "text": "b", **entry}]))
    with pytest.raises(ClientError, match=f"entry 1: {words}"):
        load_manifest(tmp_path / "m.json")


def test_word_errors_fold_case_and_count_words_heard_in_silence() -> None:
    references = [Reference(Path("a"), "One two"), Reference(Path("b"), "")]
    references.append(Reference(Path("failed"), "not counted"))
    errors = word_errors(references, {Path("a"): "ONE three", Path("b"): "ghost"})
    assert (errors.num_errors, errors.num_words, errors.num_files) == (2, 2, 2)
    assert errors.rate == 1.0


def test_the_microphone_names_the_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)

    async def listen() -> None:
        async for _ in microphone_chunks(100, asyncio.Event()):
            pass

    with pytest.raises(ClientError, match="pip install sounddevice"):
        asyncio.run(listen())


def test_the_microphone_hands_on_what_the_device_gives_until_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", sound_device())

    async def listen() -> list[np.ndarray]:
        stop, heard = asyncio.Event(), []
        async for chunk in microphone_chunks(10, stop):
            heard.append(chunk)
            if len(heard) == 3:
                stop.set()
        return heard

    heard = asyncio.run(asyncio.wait_for(listen(), 5))
    assert [chunk.size for chunk in heard[:3]] == [160, 160, 160]
    assert [float(chunk[0]) for chunk in heard[:3]] == [0.0, 1.0, 2.0]


def sound_device() -> types.ModuleType:
    """The interface of `sounddevice` for a machine without a microphone: it counts blocks."""

    class InputStream:
        def __init__(self, *, blocksize: int, callback: Any, **_settings: Any) -> None:
            self.blocks = [np.full((blocksize, 1), n, np.float32) for n in range(3)]
            self.callback = callback

        def __enter__(self) -> None:
            for block in self.blocks:
                self.callback(block, block.size, None, None)
                block[:] = np.nan

        def __exit__(self, *_exc: object) -> None:
            pass

    module = types.ModuleType("sounddevice")
    module.InputStream = InputStream  # type: ignore[attr-defined]
    module.PortAudioError = OSError  # type: ignore[attr-defined]
    return module
