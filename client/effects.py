"""Options that would change nothing: each is refused by name."""

from __future__ import annotations

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

#: What the command itself does to the samples.
_SENT = {"sample_rate": 16000, "encoding": "pcm", "channels": 1}


def check_effects(given: Iterable[str], values: Values, names: Mapping[str, str]) -> None:
    """Raises ClientError for the first of the options `given` that `values` leave idle.

    `names` are the options as they are written.
    """
    given = set(given)
    for rule in RULES:
        if rule.option in given and rule.is_idle(values):
            raise ClientError(f"{names[rule.option]} has no effect {rule.reason}; leave it out")


def check_request_options(options: Mapping[str, Any], *, form: str) -> None:
    """Raises ClientError for an option whose answer is not shown, or that would be untrue."""
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


def _forms_with(option: str) -> tuple[str, ...]:
    """The forms that show what the option asks for; it is in RESULT alone."""
    if option == "nbest":
        return ("json",)
    if option == "word_times" or option.startswith("endpoint"):
        return ("json", "srt", "vtt")
    return ("txt", "json", "srt", "vtt")
