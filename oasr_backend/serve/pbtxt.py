"""How many instances a config.pbtxt asks for, and its text with another number.

Protocol buffers' text format is read as far as that takes: names, values, nesting, comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_FIELD = "instance_group"
_TOKEN = re.compile(
    r"""\#[^\n]* | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | [][{}<>:,;] | [^][{}<>:,;"'\#\s]+""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """One group; `start` and `end` enclose, in the text, what another count takes the place of."""

    count: int
    start: int
    end: int
    # Whether the text has no count, so that its name has to be written too.
    is_implied: bool = False

    def with_count(self, text: str, count: int) -> str:
        """The text with that count in this group."""
        written = f" count: {count} " if self.is_implied else str(count)
        return text[: self.start] + written + text[self.end :]


def instance_groups(text: str) -> list[InstanceGroup]:
    """The groups of a config.pbtxt in their order; none where it leaves them to Triton."""
    found: list[InstanceGroup] = []
    for path, name, token in _walk(text):
        if path != [_FIELD]:
            continue
        if token[0] in ("{", "<"):
            found.append(InstanceGroup(1, token.end(), token.end(), is_implied=True))
        elif name == "count":
            count = int(token[0]) if token[0].isdecimal() else 1
            found[-1] = InstanceGroup(count, token.start(), token.end())
    return found


def with_instances(text: str, count: int) -> str:
    """A config.pbtxt of one group or none, with that many instances."""
    for group in instance_groups(text):
        return group.with_count(text, count)
    return f"{text.rstrip()}\n\n{_FIELD} [ {{ count: {count} }} ]\n"


def _walk(text: str) -> Iterator[tuple[list[str], str, re.Match[str]]]:
    """Each opening brace with the names of the messages open behind it, and each plain value.

    The name is that of the value's field. A list's further messages have the name of the first.
    """
    path: list[str] = []
    name, is_value = "", False
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word[0] == "#":
            continue
        if word in ("{", "<"):
            path.append(name)
            yield path, "", token
        elif word in ("}", ">"):
            name = path.pop() if path else ""
        elif is_value and word not in "[],;":
            yield path, name, token
        elif word not in ":[],;":
            name = word
        is_value = word == ":"
