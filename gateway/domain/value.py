"""Frozen values, the base of everything in this package, and the small types that several of its
modules need."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, ValidationError, core_schema

T = TypeVar("T")
Scalar = str | int | float | bool
Task = Literal["generate", "embed", "rerank"]
Grade = Literal["guess", "predicted", "checked", "verified", "failed"]
# More memory than any machine has: a reading beyond it is a mistake.
MOST_BYTES = 2**50


class Value(BaseModel):
    """A frozen value: unknown fields are errors, equality is by content."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def evolve(self, **changes: Any) -> Self:
        """A copy with `changes`, unvalidated: for our own code, never for input."""
        # What model_copy(update=changes) does for values, which have neither extra nor private
        # fields, in a third of its time.
        made = object.__new__(type(self))
        object.__setattr__(made, "__dict__", self.__dict__ | changes)
        object.__setattr__(
            made, "__pydantic_fields_set__", self.__pydantic_fields_set__ | changes.keys()
        )
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made


@dataclass(frozen=True)
class Form:
    """The form of a text, in an annotation of its type: the pattern for programs that read the
    schema, `words` for people.

    Not `Field(pattern=...)`: its library has each counted repetition of `\\w` in memory, all of
    Unicode for each time. 128 times are 7 MiB.
    """

    pattern: str
    words: str
    told: bool = True
    """An error repeats the text, which is no secret."""

    def check(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            said = repr(text[:80]) if self.told else "this"
            raise PydanticCustomError(
                "form", "{text} is not allowed here: {words}", {"text": said, "words": self.words}
            )
        return text

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "pattern": self.pattern}


class EngineRef(Value):
    """Names an engine version, and the container image that holds it. digest: which image exactly,
    whatever becomes of its name."""

    kind: str
    version: str
    image: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}=={self.version}"


def served_name(name: str) -> str:
    """What a model's own engines call it: SGLang takes what stands behind a colon for the name of a
    LoRA adapter
    (_parse_model_parameter in sglang/srt/entrypoints/openai/serving_base.py:40 of 0.5.10.post1)."""
    return name.replace(":", "-")


def first_problem(error: ValidationError) -> str:
    """The first problem of a validation error in a phrase: `gpus.0.uuid: Field required`."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    said = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
