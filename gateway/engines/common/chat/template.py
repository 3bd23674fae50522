"""The chat template of a model: the user's, or its own, repaired if it is known to be broken.
Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from gateway.domain import ChatTemplate, Choice, ModelSpec, StrChoice
from gateway.engines.common.chat.repair import Repair, repair_template

# The flag that names its file, alike in all kinds of engines.
FLAG = "chat-template"
# The folder of such files, below one that engines see.
FOLDER = "chat-templates"
_FILE = re.compile(r"([0-9a-f]{64})\.jinja")


class ChosenTemplate(NamedTuple):
    """A chat template. text: for the choice of parsers; None: there is no template.

    digest: the digest of the text that the engine is given; None: the engine uses the model's own.
    """

    choice: Choice[str]
    text: str | None
    digest: str | None = None


def choose_template(
    spec: ModelSpec, user_template: ChatTemplate | None, repairs: Iterable[Repair] = ()
) -> ChosenTemplate:
    """The chat template: the user's, or the model's own with repairs of known faults."""
    if user_template is not None:
        return ChosenTemplate(
            StrChoice(value=str(user_template), reason="set by the user", source="user"),
            user_template.text,
            user_template.digest,
        )
    if spec.chat_template is None:
        return ChosenTemplate(
            StrChoice(
                value="none", reason="the model comes without one", source="files of the model"
            ),
            None,
        )
    text, faults = repair_template(spec.chat_template, repairs)
    if faults:
        mended = ChatTemplate(text=text, name="repaired")
        reason = (
            f"the published one is known to be broken: {'; '.join(fault.why for fault in faults)}"
        )
        return ChosenTemplate(
            StrChoice(value=str(mended), reason=reason, source=faults[0].source),
            text,
            mended.digest,
        )
    source_words = "the one that comes with the model"
    return ChosenTemplate(
        StrChoice(value="published", reason=source_words, source="files of the model"),
        spec.chat_template,
    )


def file_name(digest: str) -> str:
    """The file's name in a plan; the launch adds the folder.

    Both kinds of engines recognise Jinja by the suffix (sglang 0.5.23
    srt/managers/template_manager.py: _load_explicit_chat_template).
    """
    return f"{digest}.jinja"


def digest_in(argv: Iterable[str]) -> str | None:
    """The digest of the template that a plan's engine is given."""
    values = (argument.partition("=")[2] for argument in argv if argument.startswith(f"--{FLAG}="))
    result = next((_FILE.fullmatch(value) for value in values), None)
    return result[1] if result else None


def is_file_of(folder: str, path: str) -> bool:
    """Whether the path is that of such a file below the folder."""
    head, _, name = path.rpartition("/")
    return head == f"{folder}/{FOLDER}" and _FILE.fullmatch(name) is not None
