"""Output without tracebacks, whatever encoding, full disk or closed pipe it meets."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

#: Each of these characters ends a line for some reader.
_LINE_BREAK = re.compile("[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]")
#: Bytes of a file's name that are no UTF-8, as Python has them, and other halves of characters.
_SURROGATE = re.compile("[\ud800-\udfff]")


class OutputError(Exception):
    """Nothing more can be written to stdout."""


def standard_output() -> TextIO:
    """Raises OutputError where stdout is closed."""
    if sys.stdout is None:
        raise OutputError("stdout is closed; redirect it into a file, or to /dev/null")
    return sys.stdout


@contextlib.contextmanager
def output_told() -> Iterator[None]:
    """Raises OutputError for a fault of stdout, and writes no more to it then."""
    try:
        yield
    except OSError as error:
        # Python flushes the rest when it ends, and would fail again.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(
            f"stdout cannot be written ({error.strerror}); free space there, or keep its reader"
        ) from error


def tell(words: str) -> None:
    """Writes a line to stderr, if stderr is open."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"oasr-client: {without_line_breaks(words)}\n")
        sys.stderr.flush()


def without_faults(out: TextIO, *, is_document: bool) -> TextIO:
    """`out`, taking any text and any file name.

    A document (JSON, captions) is UTF-8 whatever the locale. Plain text keeps the locale's
    encoding: names come out byte for byte where that is UTF-8, and what another one lacks becomes
    an escape.
    """
    if not isinstance(out, io.TextIOWrapper):
        return out
    if is_document:
        out.reconfigure(encoding="utf-8", errors="backslashreplace")
    else:
        is_utf8 = codecs.lookup(out.encoding).name == "utf-8"
        out.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
    return out


def json_line(fields: Mapping[str, Any]) -> str:
    r"""One line of JSON; a byte of a name that is no UTF-8 becomes the text \xff."""
    return _SURROGATE.sub(_escaped, json.dumps(fields, ensure_ascii=False)) + "\n"


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    is_byte = 0xDC80 <= code <= 0xDCFF
    # The backslash is escaped for JSON.
    return rf"\\x{code - 0xDC00:02x}" if is_byte else rf"\\u{code:04x}"


def without_line_breaks(text: str) -> str:
    """The text with all line breaks escaped."""
    return _LINE_BREAK.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
