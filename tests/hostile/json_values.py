"""Changes to values of JSON documents: texts of JSON in the place of a value, at any depth."""

from __future__ import annotations

import json
import random
from typing import Any

VALUES = (
    "null",
    "true",
    "false",
    "0",
    "-1",
    "1",
    "7",
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "0.5",
    str(2**31),
    str(2**63),
    str(2**64),
    str(2**200),
    "9" * 5000,
    "1e-300",
    '""',
    '"0"',
    '" "',
    "[]",
    "{}",
    "[[]]",
    '[{"a": []}]',
    '{"": null}',
    '"../../../etc/passwd"',
    '"/etc/hostname"',
    '"\\ud800"',
    '"\\u0000"',
    '"\\u001b[2J"',
    '"\\u202e"',
    '"' + "x" * 100_000 + '"',
    '"NaN"',
    "[" * 400 + "]" * 400,
    "[" * 200_000,
    '{"a":' * 400 + "1" + "}" * 400,
    "[1,2]" * 2,
    "",
    "[" + "0," * 50_000 + "0]",
    "[" + "{}," * 20_000 + "{}]",
    '["bfloat16"]',
    '{"type": []}',
)
"""JSON texts in the place of a value. Some are none."""
_MARK = "<<here>>"


def changed_json(
    random_: random.Random,
    document: Any,
    values: tuple[str, ...] = VALUES,
    new_keys: tuple[str, ...] = ("", "\ud800", "a" * 10_000),
) -> str:
    """The text of `document` with another text in the place of a value, or at a new key.

    `document` is changed. The text may have lone surrogates.
    """
    place: dict[str, Any] | list[Any] | None = None
    key: Any = None
    inner: Any = document
    while isinstance(inner, dict | list) and inner:
        place = inner
        key = random_.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
        inner = inner[key]
        if random_.random() < 0.4:
            break
    text = random_.choice(values)
    if place is None:
        return text
    if isinstance(place, dict) and random_.random() < 0.15:
        key = random_.choice(new_keys)
    place[key] = _MARK
    return json.dumps(document).replace(f'"{_MARK}"', text)
