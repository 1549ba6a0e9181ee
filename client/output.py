"""What is written never ends in an encoding's fault."""

from __future__ import annotations

import codecs
import io
import re
from typing import TextIO


def without_faults(out: TextIO, *, is_document: bool) -> TextIO:
    """`out`, taking any text and any file name.

    A document (JSON, captions) is UTF-8 whatever the locale, and a byte of a name that is none
    becomes JSON's own escape of it. Plain text keeps the locale's encoding: names come out byte for
    byte where that is UTF-8, and what another one lacks becomes an escape.
    """
    if not isinstance(out, io.TextIOWrapper):
        return out
    if is_document:
        out.reconfigure(encoding="utf-8", errors="backslashreplace")
    else:
        is_utf8 = codecs.lookup(out.encoding).name == "utf-8"
        out.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
    return out


def without_line_breaks(name: str) -> str:
    """A name that may stand in a line of its own."""
    return re.sub(r"[\r\n]", lambda found: {"\r": r"\r", "\n": r"\n"}[found[0]], name)
