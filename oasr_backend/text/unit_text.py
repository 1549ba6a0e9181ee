"""Units as text: what each unit adds, where spaces stand, and where words begin.

A text can be made in parts. A `Joint` says where it goes on, so that the parts together are the
text of the whole, wherever they were cut.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from oasr_backend.errors import StreamStateError
from oasr_backend.text.scripts import (
    CJK,
    CJK_LEADING,
    CJK_TRAILING,
    COMBINING,
    UNSPACED,
    extends_cluster,
    is_leading,
    is_trailing,
    is_unspaced,
    is_word_border,
    script_of,
)

#: What SentencePiece puts before the first unit of a word.
WORD_START = "\u2581"
REPLACEMENT = "\ufffd"

_SPACES = frozenset({"<space>", "<SPACE>"})
_CONTROL = re.compile(r"<[^<>\s]+>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HAS_UNSPACED = re.compile(f"[{UNSPACED}]")
_BLANK = re.compile(rf"[\s{WORD_START}]")
_REPLACEMENTS = re.compile(f"{REPLACEMENT}+")
_SPACE_RUN = re.compile("  +")
# Between two characters of Chinese or Japanese, between their punctuation and its word in whatever
# script, and before what combines with the last letter.
_SPACE_IN_SCRIPT = re.compile(
    f" (?:(?<=[{CJK}] )(?=[{CJK}])|(?<=[{CJK_LEADING}] )|(?=[{CJK_TRAILING}{COMBINING}]))"
)
# A word that brings its own spaces has none before a mark that follows it.
_SPACE_BEFORE_MARK = re.compile(r" (?=[^\w\s])")
# Of the first bytes of UTF-8 characters those that hardly stand for anything but Han and kana.
_CJK_LEAD_BYTES = range(0xE3, 0xEA)
_CONTINUATION_BYTES = range(0x80, 0xC0)


class Joint(NamedTuple):
    """Where a text goes on.

    `tail` is the last character and, if one is due, a space; "" before the first character.
    `open_bytes` are the first of a UTF-8 character that is not complete.
    """

    tail: str = ""
    open_bytes: bytes = b""


START = Joint()


class Word(NamedTuple):
    """A word and the range of token positions it was made of, both ends included."""

    text: str
    first_token: int
    last_token: int


class _Span(NamedTuple):
    """Text of one token, or of the byte tokens that make one character together."""

    text: str
    first: int
    last: int


class UnitText:
    """The text of id sequences. Facts about a unit are found once, at load."""

    def __init__(
        self,
        symbols: Sequence[str],
        *,
        silent: Collection[str] = (),
        connect_symbol: str = "",
        keeps_spaces: bool = False,
    ) -> None:
        """`silent` symbols add nothing, as `<...>` do; `connect_symbol` is WeNet's, "" or " ".

        `keeps_spaces`: each mark is a space, so that two may follow each other within a text.
        """
        self._keeps_spaces = keeps_spaces
        self._bytes = tuple(map(byte_of, symbols))
        self._byte_ids = frozenset(
            token_id for token_id, value in enumerate(self._bytes) if value is not None
        )
        surfaces = ["" if symbol in silent else surface_of(symbol) for symbol in symbols]
        self._has_word_starts = any(WORD_START in surface for surface in surfaces)
        is_unspaced_too = any(map(_HAS_UNSPACED.search, surfaces))
        # Beside units of unspaced scripts, words that no unit marks are units of their own.
        has_own_spaces = is_unspaced_too and not any(map(marks_spaced_word, surfaces))
        self._texts = tuple(
            _text_of(surface, connect_symbol, has_own_spaces=has_own_spaces) for surface in surfaces
        )
        self._dropped_spaces = [_SPACE_IN_SCRIPT] * (is_unspaced_too or bool(self._byte_ids))
        self._dropped_spaces += [_SPACE_BEFORE_MARK] * has_own_spaces
        self._starts_word = tuple(map(self._is_word_start, range(len(symbols))))
        firsts = {text.lstrip(" ")[:1] for text in self._texts}
        self._extended = {script_of(first) for first in firsts if first and extends_cluster(first)}
        self._goes_on = tuple(map(self._is_going_on, range(len(symbols))))

    def joined(self, ids: Sequence[int], after: Joint = START) -> tuple[str, Joint]:
        """What `ids` add to a text that ended at `after`, and where it ends now.

        It begins with a space where one parts it from the text before, and never ends with one.
        Bytes of a character that is not complete wait in the joint; bytes that never make one
        are a single U+FFFD.
        """
        self.check(ids)
        tail = after.tail
        if self._byte_ids and self._has_bytes(ids, after):
            spans, open_bytes = self._spans(ids, after)
            added = "".join([span.text for span in spans])
        else:
            texts, open_bytes = self._texts, b""
            added = "".join([texts[token_id] for token_id in ids])
        whole = tail + added if tail else added.lstrip(" ")
        if self._dropped_spaces or ("  " in whole and not self._keeps_spaces):
            whole = self._spaced(whole)
        text = whole.rstrip(" ")
        return text[1:] if tail else text, Joint(whole[len(text) - 1 :], open_bytes)

    def words(self, ids: Sequence[int]) -> list[Word]:
        """The words of the text in order, cut at its spaces and at units where a word may end."""
        text, _ = self.joined(ids)
        words: list[Word] = []
        at = 0
        for span in self._spans(ids)[0]:
            for part in span.text.split():
                is_parted = text.startswith(" ", at)
                while text.startswith(" ", at):
                    at += 1
                if is_parted or not at or is_word_border(text[at - 1], part[0]):
                    words.append(Word(part, span.first, span.last))
                else:
                    words[-1] = Word(words[-1].text + part, words[-1].first_token, span.last)
                at += len(part)
        return words

    def starts_word(self, token_id: int) -> bool:
        """Whether the unit can only be the first of a word, or words have no marks."""
        return self._starts_word[token_id]

    def may_part(self, before: int, after: int) -> bool:
        """Whether a segment may end between the two units: not within a cluster or before a mark.

        Of a silent unit among clusters that is unknown, and so it stays with what is before it.
        """
        return not (self._goes_on[after] or self._holds_next(before))

    def awaits_next(self, token_id: int) -> bool:
        """Whether a unit may follow that makes a grapheme cluster, or one character, with this."""
        value, text = self._bytes[token_id], self._texts[token_id].rstrip(" ")
        if value is not None:
            return not chr(value).isascii()
        if not text:
            return bool(self._extended)
        is_extended = script_of(text[-1]) in self._extended
        takes_marks = text[-1].isalpha() and "COMBINING" in self._extended
        return is_extended or takes_marks or self._holds_next(token_id)

    def check(self, ids: Sequence[int]) -> None:
        """Raises StreamStateError for an id outside the vocabulary."""
        if ids and not 0 <= (lowest := min(ids)) <= (highest := max(ids)) < len(self._texts):
            raise StreamStateError(
                f"token id {lowest if lowest < 0 else highest} is outside "
                f"0..{len(self._texts) - 1}; use the units.txt of this model"
            )

    def _has_bytes(self, ids: Sequence[int], after: Joint = START) -> bool:
        return bool(after.open_bytes) or not self._byte_ids.isdisjoint(ids)

    def _spaced(self, text: str) -> str:
        """`text` without the spaces that no text has."""
        if "  " in text and not self._keeps_spaces:
            text = _SPACE_RUN.sub(" ", text)
        for pattern in self._dropped_spaces:
            text = pattern.sub("", text)
        return text

    def _spans(self, ids: Sequence[int], after: Joint = START) -> tuple[list[_Span], bytes]:
        """Texts in order, silent tokens left out, and the bytes that are still open."""
        if not self._has_bytes(ids, after):
            texts = [(self._texts[token_id], index) for index, token_id in enumerate(ids)]
            return [_Span(text, index, index) for text, index in texts if text], b""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(after.open_bytes)
        spans: list[_Span] = []
        is_open, first, last = bool(after.open_bytes), 0, after.tail[-1:]
        for index, token_id in enumerate(ids):
            value, text = self._bytes[token_id], self._texts[token_id]
            first = first if is_open else index
            if value is not None:
                decoded = decoder.decode(bytes((value,)))
                text = _plain(decoded, last)
                if decoded and not text:
                    # What waited is no character: what comes does not begin with it.
                    first = index
            elif is_open:
                broken = _plain(decoder.decode(b"", final=True), last)
                if broken:
                    spans.append(_Span(broken, first, index - 1))
                    last = REPLACEMENT
                first = index
            if text:
                spans.append(_Span(text, first, index))
                first, last = index, text[-1]
            is_open = value is not None and bool(decoder.getstate()[0])
        return spans, decoder.getstate()[0]

    def _holds_next(self, token_id: int) -> bool:
        text = self._texts[token_id]
        return bool(text) and is_leading(text[-1])

    def _is_going_on(self, token_id: int) -> bool:
        value, text = self._bytes[token_id], self._texts[token_id]
        if value is not None:
            return not chr(value).isascii() and value not in _CJK_LEAD_BYTES
        if not text.strip(" "):
            return not text and bool(self._extended)
        keeps_space = self._spaced(f"x{text}").startswith("x ")
        return is_trailing(text.lstrip(" ")[0]) and not keeps_space

    def _is_word_start(self, token_id: int) -> bool:
        value, text = self._bytes[token_id], self._texts[token_id]
        if value is not None:
            is_first = value not in _CONTINUATION_BYTES
            return is_first and (value in _CJK_LEAD_BYTES or not self._has_word_starts)
        if not text or text.startswith(" "):
            return bool(text) or not self._has_word_starts
        may_begin = is_unspaced(text[0]) or not self._has_word_starts
        return may_begin and not is_trailing(text[0])


def surface_of(symbol: str) -> str:
    """What a symbol adds to the text, `WORD_START` for a space; empty for silent ones."""
    if symbol in _SPACES:
        return WORD_START
    if _CONTROL.fullmatch(symbol):
        return ""
    return "".join(WORD_START if character.isspace() else character for character in symbol)


def byte_of(symbol: str) -> int | None:
    """The value of a SentencePiece byte-fallback piece such as `<0xE4>`."""
    match = _BYTE.fullmatch(symbol)
    return int(match[1], 16) if match else None


def marks_spaced_word(surface: str) -> bool:
    """Whether the unit's mark stands before a word of a script with spaces, or alone."""
    first = surface.lstrip(WORD_START)[:1]
    return WORD_START in surface and not (first and is_unspaced(first))


def _text_of(surface: str, connect_symbol: str, *, has_own_spaces: bool) -> str:
    text = surface.replace(WORD_START, " ")
    if has_own_spaces and _is_spaced_word(text):
        return f" {text} "
    return connect_symbol + text if text else ""


def _is_spaced_word(text: str) -> bool:
    """Two or more letters or digits, as of English words; a single letter may be spelt out."""
    is_spaced = len(text) > 1 and not text.isdigit() and not _HAS_UNSPACED.search(text)
    return is_spaced and text[0].isalnum() and text[-1].isalnum()


def _plain(decoded: str, last: str) -> str:
    """Decoded bytes after the character `last`: spaces are spaces, and one U+FFFD is enough."""
    if decoded.isalnum():
        return decoded
    text = _BLANK.sub(" ", _REPLACEMENTS.sub(REPLACEMENT, decoded))
    return text.removeprefix(REPLACEMENT) if last == REPLACEMENT else text
