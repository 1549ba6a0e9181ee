"""Texts whose bytes differ in number and in kind."""

TEXTS = ("", "hello", "ä語😀 ß", "x\0", "ñ" * 50_000)
