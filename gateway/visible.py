"""Text of engines, models and users made safe for a terminal. Pure.

A log line, a model's name or an error may hold escape sequences. Escapes could recolour, hide or
overwrite text, or set the window's title or clipboard. Other characters reverse the direction of
writing. All of them are shown as escapes.
"""

from __future__ import annotations

import re

# Control characters except tab and newline (U+009B begins sequences like an escape), directions of
# writing, line separators, and halves of surrogate pairs.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


def visible(text: str) -> str:
    """The text with `\\x1b` for an escape, `\\u202e` for a character beyond ASCII.

    JSON keeps its meaning, as it has no raw control characters.
    """
    return text if text.isascii() and text.isprintable() else _CONTROL.sub(_escaped_character, text)


def visible_line(text: object) -> str:
    """The text as by `visible`, in one line."""
    return visible(str(text)).replace("\n", "\\x0a").replace("\t", " ")


def _escaped_character(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x20 else f"\\u{number:04x}"
