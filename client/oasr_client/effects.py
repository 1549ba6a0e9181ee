"""Refuses, by name, each option that would change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from oasr_client.errors import ClientError

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """`option` has no effect where `is_idle` says so of all options' values."""

    option: str
    is_idle: Callable[[Values], bool]
    reason: str


def _hears_microphone(values: Values) -> bool:
    return bool(values["microphone"])


def _writes_lines(values: Values) -> bool:
    return bool(values["as_json"])


RULES = (
    Rule("raw_rate", lambda values: values["raw"] is None, "without --raw"),
    Rule("raw", _hears_microphone, "with --microphone"),
    Rule("parallel", _hears_microphone, "with --microphone, which is one stream"),
    Rule("realtime", _hears_microphone, "with --microphone, which has its own pace"),
    Rule("output_dir", _writes_lines, "with --json, which writes lines to stdout"),
    Rule(
        "form",
        lambda values: _writes_lines(values) and values["form"] != "json",
        "with --json, unless it is json",
    ),
)

#: The command itself does this to the samples.
_SENT = {"sample_rate": 16000, "encoding": "pcm", "channels": 1}


#: What each of these options turns off by its value, as far as it is sent: what the server has by
#: default, the client cannot know.
_TURNED_OFF = (
    ("decoder", "greedy", ("beam_size", "hotword_boost")),
    ("decoder", "transducer_greedy", ("beam_size", "hotword_boost")),
    ("hotwords", "", ("hotword_boost",)),
    (
        "endpoint",
        False,
        ("endpoint_silence_s", "endpoint_silence_start_s", "endpoint_max_s"),
    ),
)


def check_effects(given: Iterable[str], values: Values, names: Mapping[str, str]) -> None:
    """Raises ClientError for the first of the options `given` that `values` leave idle.

    `names` are the options as they are written.
    """
    given = set(given)
    for rule in RULES:
        if rule.option in given and rule.is_idle(values):
            raise ClientError(f"{names[rule.option]} has no effect {rule.reason}; leave it out")


def check_request_options(options: Mapping[str, Any], *, form: str) -> None:
    """Raises ClientError for an option without effect, or one whose outcome would be untrue.

    An option has no effect where its answer is not shown, or where another turns its subject off.
    """
    _check_turned_off(options)
    for name, value in options.items():
        if name in _SENT and value != _SENT[name]:
            raise ClientError(
                f"--option {name}={value}: what is sent has {name}={_SENT[name]} whatever the "
                "file holds; leave it out"
            )
        forms = _forms_with(name)
        if form not in forms:
            raise ClientError(
                f"--option {name} has no effect with --format {form}; leave it out, or add "
                f"--format {' or '.join(forms)}"
            )


def _check_turned_off(options: Mapping[str, Any]) -> None:
    for name, value, idle in _TURNED_OFF:
        if name in options and options[name] == value:
            for option in sorted(set(idle) & set(options)):
                shown = json.dumps(value).strip('"')
                raise ClientError(
                    f"--option {option} has no effect with {name}={shown}; leave it out"
                )


def _forms_with(option: str) -> tuple[str, ...]:
    """These forms show what the option asks for, which stands in RESULT alone."""
    if option == "nbest":
        return ("json",)
    if option == "word_times" or option.startswith("endpoint"):
        return ("json", "srt", "vtt")
    return ("txt", "json", "srt", "vtt")
