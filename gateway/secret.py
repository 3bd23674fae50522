"""Texts that nothing shows: keys, tokens, passwords, and addresses that hold one.

A secret has no text of its own for formats, logs, JSON and tracebacks. `reveal` is called where the
text is needed, and `tests/unit/test_secret.py` lists these places.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from gateway.errors import hide_password, restore_passwords

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, SerializationInfo
    from pydantic_core import CoreSchema

    from gateway.domain.value import Scalar

MASK = "(hidden)"
# Context of `model_dump_json` for files that only the gateway reads and for its own processes.
REVEAL_CONTEXT = {"secrets": "revealed"}
# Characters in a row that a secret and a text share by chance only.
_PART = 8
# A shorter value is a part of too many words to be taken out of them.
_MIN_SECRET_CHARACTERS = 4
_SECRET_NAME = re.compile(
    r"(?:(?:^|[-_.])(?:(?:api)?keys?|token|auth)|passphrase|credentials?)$|secret|passw",
    re.IGNORECASE,
)
# A text in a JSON object, and its name.
_JSON_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:\s*)"((?:[^"\\]|\\.)*)"')


class Secret:
    """A text that only a call reveals. Equality takes the same time for all texts.

    A text of bytes that are not UTF-8, as in a variable, is revealed as these bytes.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str | bytes) -> None:
        self._text = text if isinstance(text, str) else text.decode(errors="surrogateescape")

    def reveal(self) -> str:
        return self._text

    def reveal_bytes(self) -> bytes:
        return self._text.encode(errors="surrogateescape")

    @property
    def is_short(self) -> bool:
        """Whether a text may have it by chance."""
        return len(self._text) < _PART

    def hidden_in(self, text: str, label: str = MASK) -> str:
        """The text with the label in the place of this secret, and of each part of it, however the
        text cuts or encodes it. A text with a short secret is withheld as a whole."""
        if self.is_short:
            return _hide_word(text, self._text, label)
        return _hide_parts(text, self._text, label)

    def __repr__(self) -> str:
        return MASK

    def __format__(self, _spec: str) -> str:
        return MASK

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self.reveal_bytes(), other.reveal_bytes())

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, _memo: object) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: GetCoreSchemaHandler) -> Any:
        from pydantic_core import core_schema

        text = core_schema.no_info_after_validator_function(cls, core_schema.str_schema())
        schema: CoreSchema = core_schema.json_or_python_schema(
            json_schema=text,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), text]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                _serialize, info_arg=True, when_used="json"
            ),
        )
        return schema


def _serialize(secret: Secret, info: SerializationInfo) -> str:
    return secret.reveal() if info.context == REVEAL_CONTEXT else MASK


def shown_address(text: str) -> str:
    """A text that should be an address, for messages: with nothing in front of an `@`."""
    front, _, address = text.rpartition("@")
    scheme, mark, _ = front.partition("://")
    return f"{scheme}{mark}{address}" if mark else address


def shown_setting(name: str, value: Scalar) -> Scalar:
    """The value of a flag or a variable, unless its name or a name in its JSON says that it is
    secret. Addresses have no password."""
    if isinstance(value, bool):
        return value
    if _SECRET_NAME.search(name):
        return MASK
    if not isinstance(value, str):
        return value
    return _JSON_TEXT.sub(_hide_json_text, hide_password(value))


def is_hidden(name: str, value: Scalar) -> bool:
    """Whether the value of a flag or a variable has the mask in the place of a secret."""
    if not isinstance(value, str) or MASK not in value:
        return False
    return bool(_SECRET_NAME.search(name)) or any(
        _is_secret_text(match) and MASK in match[0] for match in _JSON_TEXT.finditer(value)
    )


def restore_secrets(value: str, former_value: str) -> str:
    """A value that was edited as shown, with the secrets of the former one in the place of masks in
    its JSON, and of passwords in its addresses.

    A mask stays where the value has fewer or more texts of its name than the former one: nobody
    knows which is meant.
    """
    former_texts = _secret_texts(former_value)
    counts = {name: len(texts) for name, texts in _secret_texts(value).items()}

    def restore(match: re.Match[str]) -> str:
        texts = former_texts.get(match[1], [])
        if len(texts) != counts.get(match[1]):
            return match[0]
        positions[match[1]] += 1
        return texts[positions[match[1]] - 1] if match[3] == MASK else match[0]

    positions = dict.fromkeys(counts, 0)
    return restore_passwords(_JSON_TEXT.sub(restore, value), former_value)


def _secret_texts(value: str) -> dict[str, list[str]]:
    """The secret texts in JSON objects with their names, by name."""
    texts: dict[str, list[str]] = {}
    for match in _JSON_TEXT.finditer(value):
        if _is_secret_text(match):
            texts.setdefault(match[1], []).append(match[0])
    return texts


def _is_secret_text(match: re.Match[str]) -> bool:
    return bool(_SECRET_NAME.search(match[1]))


def _hide_json_text(match: re.Match[str]) -> str:
    name = match[1]
    return f'"{name}"{match[2]}"{MASK}"' if _is_secret_text(match) else match[0]


def secret_text(value: Any) -> str:
    """The text of a secret, for encoders of messages to the gateway's own processes. Raises
    TypeError."""
    if isinstance(value, Secret):
        return value.reveal()
    raise TypeError(f"{type(value).__name__} is not a secret")


def bearer_line(key: Secret | None) -> bytes:
    """The line of a request's head that shows the key; empty without one."""
    return b"authorization: Bearer %b\r\n" % key.reveal_bytes() if key is not None else b""


def _forms(value: str) -> set[str]:
    """The value as texts, JSON, Python, URLs and headers write it."""
    raw = value.encode(errors="surrogatepass")
    forms = {
        value,
        value.lower(),
        value.upper(),
        repr(value)[1:-1],
        quote(raw, safe=""),
        quote(raw, safe="/"),
    }
    forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    # The digits of base64 depend on the place of the first byte among three.
    for lead in range(3):
        digits = base64.b64encode(b"\0" * lead + raw).decode()
        whole_digits = digits[-(-lead * 8 // 6) : len(digits.rstrip("=")) - 1]
        forms |= {whole_digits, whole_digits.translate(_URL_SAFE)}
    return {*forms, raw.hex()} - {""}


_URL_SAFE = str.maketrans("+/", "-_")


def _hide_word(text: str, value: str, label: str) -> str:
    """The text, if the value is not a word of it; else the label in the value's place, or alone."""
    if not value:
        return text
    forms = {form.casefold() for form in (value, repr(value)[1:-1], quote(value, safe=""))}
    alternatives = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)", re.IGNORECASE)
    if len(value) >= _MIN_SECRET_CHARACTERS:
        return re.sub(alternatives, lambda _: label, text, flags=re.IGNORECASE)
    # The letters around a label would reveal a short value.
    return f"words with {label}, which are not shown" if pattern.search(text) else text


def _fold_case(text: str) -> str:
    """The text in one case, with as many letters."""
    folded = text.casefold()
    if len(folded) == len(text):
        return folded
    pairs = ((letter, letter.casefold()) for letter in text)
    return "".join(lower if len(lower) == 1 else letter for letter, lower in pairs)


def _hide_parts(text: str, value: str, label: str) -> str:
    """The text with the label for each run of characters that the value has too."""
    forms_text = "\n".join(map(_fold_case, _forms(value)))
    lower_text = _fold_case(text)
    lower_label = _fold_case(label)
    hidden = bytearray(len(text))
    for start in range(len(text) - _PART + 1):
        part = lower_text[start : start + _PART]
        if part in forms_text and part not in lower_label:
            hidden[start : start + _PART] = b"x" * _PART
    pieces = []
    position = 0
    for match in re.finditer(b"x+", hidden):
        pieces += [text[position : match.start()], label]
        position = match.end()
    return "".join([*pieces, text[position:]])
