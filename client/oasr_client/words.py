"""The word error rate."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from oasr_client.errors import ClientError
from oasr_client.sources import AudioSource, Excerpt

#: Quotation marks, modifier letters, accents and primes that stand for an apostrophe.
_APOSTROPHES = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201b\u02bc\u02b9\uff07\u00b4\u0060\u2032", "'")
)
#: Scripts without spaces between words: a "word" is what a reader takes for one character.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\u30fc"
_WORD = rf"(?=[{_UNSPACED}])\X\p{{M}}*|[^\s\u200b{_UNSPACED}]+"


class Scored(Protocol):
    """A source, and the text that a speaker says in it."""

    @property
    def audio(self) -> AudioSource: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class WordErrors:
    """`num_files` counts references: a file with two of them is scored against each."""

    num_errors: int
    num_words: int
    num_files: int

    @property
    def rate(self) -> float:
        return self.num_errors / self.num_words if self.num_words else float(self.num_errors > 0)


def word_errors(references: Sequence[Scored], texts: Mapping[AudioSource, str]) -> WordErrors:
    """Over the references whose source has a text.

    Raises ClientError when a package is missing, or when there is a text of a whole file where
    references are to excerpts of it alone.
    """
    _check_excerpts(references, texts)
    num_errors = num_words = num_files = 0
    for entry in references:
        if entry.audio not in texts:
            continue
        reference = split_words(entry.text)
        num_files += 1
        num_words += len(reference)
        num_errors += _num_errors(reference, split_words(texts[entry.audio]))
    return WordErrors(num_errors, num_words, num_files)


def split_words(text: str) -> list[str]:
    """The units that count: words between spaces, and characters where words have none.

    Both sides are compared in Unicode's NFKC form with its full case folding and one apostrophe.
    Raises ClientError when the package regex is missing.
    """
    try:
        import regex
    except ImportError as error:
        raise _missing("regex") from error
    return list(regex.findall(_WORD, _folded(text)))


def check_scoring() -> None:
    """Raises ClientError unless errors can be counted here."""
    split_words("")
    _num_errors(["a"], [])


def _folded(text: str) -> str:
    """One form for every way to write the same."""
    text = unicodedata.normalize("NFKC", text.translate(_APOSTROPHES)).casefold()
    # Lower case of the dotted capital I keeps a second dot, which texts leave out.
    return unicodedata.normalize("NFKC", text).replace("i\u0307", "i")


def _num_errors(reference: list[str], heard: list[str]) -> int:
    try:
        import jiwer
    except ImportError as error:
        raise _missing("jiwer") from error
    if not reference:
        # jiwer refuses an empty reference: every word heard there is an insertion.
        return len(heard)
    counts = jiwer.process_words(" ".join(reference), " ".join(heard))
    return int(counts.substitutions + counts.deletions + counts.insertions)


def _missing(package: str) -> ClientError:
    return ClientError(f"the word error rate needs the package {package}; pip install jiwer regex")


def _check_excerpts(references: Sequence[Scored], texts: Mapping[AudioSource, str]) -> None:
    sources = {entry.audio for entry in references}
    for source in sources:
        if isinstance(source, Excerpt) and source.path in texts and source.path not in sources:
            raise ClientError(
                f"{source}: the reference is to an excerpt, and the text that of the whole file; "
                "transcribe the excerpt"
            )
