"""Vocabularies of every kind that text rules differ for, with and without marks."""

from __future__ import annotations

import random

from oasr_backend.text.tokenizer import UnitTokenizer

_BYTES = [f"<0x{value:02X}>" for value in b"\xe4\xbd\xa0\xc3\xa9\xe0\xb8\xb1 A\xff\xef\xbf\xbd"]

SYMBOLS: dict[str, list[str]] = {
    "latin marked": ["▁THE", "RE", "'", "▁", "▁A", "▁▁B", ",", "▁-"],
    "latin without marks": ["THE", "C", "H", "IEF", "'", ",", "OF"],
    "a space unit": ["<space>", "a", "b", "\u3000", "c d", "你"],
    "byte fallback": [*dict.fromkeys(_BYTES), "▁THE", "A", "你", "好", "ก", "▁"],
    "han and marked latin": ["你", "好", "，", "「", "」", "今天", "▁OK", "GO", "▁", "ー", "ｶ", "ﾞ"],
    "marked han": ["▁贺", "▁生", "▁，", "▁OK", "，", "▁", "日", "▁「"],
    "han and latin words": ["你", "好", "，", "hello", "world", "U", "S", ".", "「", "x-ray"],
    "thai": [*dict.fromkeys("สวัสดีครับเไทย"), "▁วัน", "นี้", "▁", "▁ok", "ฯ", "๑"],
    "lao, khmer and burmese": [*dict.fromkeys("ສະບາຍດີເខ្ញុំស្តីမင်္ဂလာပါ။"), "▁ok", "ok"],
}  # fmt: skip
_CONTROL = ["<blank>", "<unk>", "<noise>", "<sos/eos>"]

TOKENIZERS = {name: UnitTokenizer([*_CONTROL, *symbols]) for name, symbols in SYMBOLS.items()}
TOKENIZERS["connected by spaces"] = UnitTokenizer(
    [*_CONTROL, "hello", "world", "你", "好", "▁A"], connect_symbol=" "
)


def vocabulary(kind: str, size: int) -> UnitTokenizer:
    """Units of that kind for the `size` outputs of a model, each as often as the others."""
    symbols = [*_CONTROL[1:], *SYMBOLS[kind], *SYMBOLS[kind]]
    chance = random.Random(7)
    return UnitTokenizer(["<blank>", *(chance.choice(symbols) for _ in range(size - 1))])
