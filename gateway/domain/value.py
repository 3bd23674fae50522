"""Frozen values, the base of all data in this package, and small types that several modules use."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

from gateway.domain.base import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    bare,
    is_lean,
)
from gateway.domain.units import duration, token_count
from gateway.errors import MUST_BE, hide_typed_password, near_name_hint, plain_problem

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

T = TypeVar("T")
Scalar = str | int | float | bool
Task = Literal["generate", "transcribe", "embed", "rerank", "classify"]
Grade = Literal["guess", "predicted", "checked", "verified", "failed"]
Duration = Annotated[
    float,
    BeforeValidator(duration),
    Field(json_schema_extra={"examples": ["5m", "1h30m", 300, 0, -1]}),
]
Tokens = Annotated[
    int, BeforeValidator(token_count), Field(json_schema_extra={"examples": [8192, "32k"]})
]
# More memory than any machine has: a reading beyond it is a mistake.
MAX_BYTES = 2**50
# Key of the validation context: tests have validated the data, so rules need no second look.
TRUSTED_KEY = "trusted"


class Value(BaseModel):
    """A frozen value: unknown fields are errors, equality is by content."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,
        hide_input_in_errors=True,
        # Stored data and profiles have the alias of a field that has another name here.
        populate_by_name=True,
        serialize_by_alias=True,
    )

    if TYPE_CHECKING or not is_lean():

        @classmethod
        def trust_data(cls, data: Any) -> Self:
            """A value of data that tests have validated."""
            return cls.model_validate(data, context={TRUSTED_KEY: True})

        def evolve(self, **changes: Any) -> Self:
            """A copy with `changes`, unvalidated: for our own code, never for input."""
            if unknown_names := changes.keys() - type(self).__pydantic_fields__.keys():
                raise TypeError(f"{type(self).__name__} has no fields {sorted(unknown_names)}")
            names = self.__pydantic_fields_set__ | changes.keys()
            copy: Self = bare(type(self), self.__dict__ | changes, names)
            return copy


@dataclass(frozen=True)
class TextForm:
    """The form of a text, as an annotation of its type.

    pattern: the regular expression for programs that read the schema.
    words: the description for people.

    `Field(pattern=...)` is not an alternative: pydantic's regex library keeps all of Unicode in
    memory for each counted repetition of `\\w`; 128 repetitions take 7 MiB.
    """

    pattern: str
    words: str
    is_secret: bool = False
    """Errors do not repeat the text."""

    def check(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            from pydantic_core import PydanticCustomError

            label = "this" if self.is_secret else repr(text[:80])
            raise PydanticCustomError(
                "form", "{text} is not allowed here: {words}", {"text": label, "words": self.words}
            )
        return text

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "pattern": self.pattern}


class EngineRef(Value):
    """The name of an engine version, and its container image. digest: the exact image."""

    kind: str
    version: str
    image: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}=={self.version}"


def served_name(name: str) -> str:
    """The name of a model inside its own engines, without colons.

    SGLang takes the part after a colon for the name of a LoRA adapter (_parse_model_parameter in
    sglang/srt/entrypoints/openai/serving_base.py:40 of 0.5.10.post1).
    """
    return name.replace(":", "-")


_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


def first_problem(error: ValidationError, fields: Mapping[str, Any] = _NO_FIELDS) -> str:
    """The first problem of a validation error in a phrase: `gpus.0.uuid: is missing`.

    fields: the fields that exist (`model_fields`), of which a near one is proposed.
    """
    field, message = first_field_problem(error.errors(include_url=False), fields)
    return hide_typed_password(f"{field}: {message}" if field else message)


def first_field_problem(
    problems: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] = _NO_FIELDS
) -> tuple[str, str]:
    """The field and the words of the first of pydantic's problems. A field is refused once, also
    where it may have several types."""
    first = problems[0]
    location = problem_location(first["loc"])
    field = ".".join(location)
    if first["loc"][-1:] == ("[key]",) and isinstance(first["input"], int | float):
        # YAML reads 8.9 as a number, and capabilities of GPUs are texts.
        message = f'the key {first["input"]} is a number. Write it in quotes: "{first["input"]}"'
    elif first["type"] == "extra_forbidden":
        message = unknown_field_words(location[-1], _fields_at(fields, location[:-1]))
    else:
        is_union = len(location) < len(first["loc"])
        message = value_problem(
            [
                problem
                for problem in problems
                if is_union and problem_location(problem["loc"])[:1] == location[:1]
            ]
            or [first]
        )
    return hide_typed_password(field), hide_typed_password(message)


def _fields_at(fields: Mapping[str, Any], location: Iterable[str]) -> Mapping[str, Any]:
    """The fields of the value at a location below these fields; empty: they are not known."""
    for name in location:
        annotation = getattr(fields.get(name), "annotation", None)
        kinds = (annotation, *get_args(annotation))
        fields = next((kind.model_fields for kind in kinds if hasattr(kind, "model_fields")), {})
    return fields


def value_problem(problems: Sequence[Mapping[str, Any]]) -> str:
    """The words of pydantic's problems with one value. Each member of a union has a problem of its
    own."""
    messages = [plain_problem(problem["msg"]) for problem in problems]
    first = problems[0]
    if len(messages) > 1 and all(text.startswith(MUST_BE) for text in messages):
        return MUST_BE + " or ".join(text.removeprefix(MUST_BE) for text in messages)
    if first["type"] != "literal_error":
        return messages[0]
    words = re.findall(r"'([^']*)'", str(first.get("ctx", {}).get("expected", "")))
    input_text = str(first.get("input", ""))[:80]
    equal = _VALUE_BY_FOREIGN_NAME.get(input_text.lower(), "")
    hint = f" (did you mean {equal}?)" if equal in words else near_name_hint(input_text, words)
    return messages[0] + hint


# Values of fields by the names that engines and PyTorch give them.
_VALUE_BY_FOREIGN_NAME = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}


# Fields of a wish by the names that engines and other programs give them.
FIELD_BY_FOREIGN_NAME = {
    "max_model_len": "context",
    "context_length": "context",
    "context_size": "context",
    "ctx_size": "context",
    "num_ctx": "context",
    "n_ctx": "context",
    "tensor_parallel_size": "tensor_parallel",
    "tp": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "data_parallel_size": "data_parallel",
    "dp_size": "data_parallel",
    "max_num_seqs": "concurrency",
    "max_running_requests": "concurrency",
    "num_parallel": "concurrency",
    "num_replicas": "replicas",
    "lora_modules": "loras",
    "lora_paths": "loras",
    "backend": "engines",
    "backend_version": "engines",
    "engine": "engines",
    "model": "source",
    "model_path": "source",
    "model_name": "source",
    "repo_id": "source",
    "huggingface_repo_id": "source",
    "local_path": "source",
    "alias": "aliases",
    "backend_parameters": "args",
    "extra_args": "args",
}


def equal_field(name: str, fields: Collection[str]) -> str:
    """The field of these with the meaning of another program's name; "": none."""
    field = FIELD_BY_FOREIGN_NAME.get(name.replace("-", "_"), "")
    return field if field in fields else ""


def unknown_field_words(field: str, fields: Iterable[str]) -> str:
    """The refusal of a field, with the one of these that has its meaning or a near name."""
    field_names = list(fields)
    equal = equal_field(field, field_names)
    suggestion = f" (did you mean {equal}?)" if equal else near_name_hint(field, field_names)
    return f"there is no such field{suggestion}"


def problem_location(parts: Iterable[str | int]) -> list[str]:
    """The names and numbers of a place, without pydantic's names of a union's members."""
    return [str(part) for part in parts if part not in _MEMBERS and "[" not in str(part)]


_MEMBERS = {"int", "constrained-int", "float", "constrained-float", "str", "bool"}
