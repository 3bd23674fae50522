"""Published chat templates that are known to be broken, and the edits that repair them
(profiles/chat_templates.yaml). Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.domain.base import Field
from gateway.domain.value import Value


class TemplateEdit(Value):
    find: str = Field(description="empty: the beginning of the template")
    replace: str

    def apply(self, text: str) -> str:
        return text.replace(self.find, self.replace) if self.find else self.replace + text


class Repair(Value):
    """One fault of published templates, with the edits that repair it. The rest of the text stays
    unchanged."""

    name: str
    about: str = Field(description="the models whose template has the fault")
    holds: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    edits: tuple[TemplateEdit, ...]
    why: str
    source: str

    def applies(self, text: str) -> bool:
        """Whether the template has the fault, and exactly the passages that are edited."""
        is_found = all(part in text for part in (*self.holds, *(edit.find for edit in self.edits)))
        return is_found and not any(part in text for part in self.lacks)

    def apply(self, text: str) -> str:
        for edit in self.edits:
            text = edit.apply(text)
        return text


class RepairTable(Value):
    repairs: tuple[Repair, ...] = ()


def repair_template(text: str, repairs: Iterable[Repair]) -> tuple[str, tuple[Repair, ...]]:
    """The template without the faults that are known of it, and those."""
    result = tuple(item for item in repairs if item.applies(text))
    for item in result:
        text = item.apply(text)
    return text, result
