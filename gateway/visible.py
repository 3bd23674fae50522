"""Text of engines, models and users, for a terminal: what would steer the terminal is shown, and
not sent. Pure.

A log line, a model's name or an error may hold escape sequences that recolour, hide or overwrite
what stands there, set the window's title or its clipboard, and characters that turn the order of
writing around.
"""

from __future__ import annotations

import re

# Control characters of ASCII but tab and the end of a line, those above ASCII (U+009B begins
# sequences as the escape does), directions of writing, line separators, and halves of surrogate
# pairs, which no terminal gets anyway.
_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


def visible(text: str) -> str:
    """`\\x1b` for an escape, `\\u202e` for a character above it: in JSON, which has no raw control
    characters, this changes no meaning."""
    return text if text.isascii() and text.isprintable() else _STEERS.sub(_shown, text)


def visible_line(text: object) -> str:
    """As `visible`, in one line."""
    return visible(str(text)).replace("\n", "\\x0a").replace("\t", " ")


def _shown(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x20 else f"\\u{number:04x}"
