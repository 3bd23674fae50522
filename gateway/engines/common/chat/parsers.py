"""Parsers for tool calls and reasoning, chosen by the model's chat template. Pure."""

from __future__ import annotations

from gateway.domain import Choice, Engine, ModelSpec, StrChoice, Value
from gateway.domain.base import Field
from gateway.domain.choice import NO_TEMPLATE
from gateway.domain.record import FrozenRecord, field
from gateway.engines.common.chat.repair import Repair

NO_PARSER = "none"
# The flags that name them, alike in all kinds of engines.
TOOLS_FLAG = "tool-call-parser"
REASONING_FLAG = "reasoning-parser"
# Where the generation prompt begins in a chat template.
_PROMPT = "add_generation_prompt"


class Dialect(Value):
    """One format of tool calls or reasoning: the text of a chat template that shows it, and its
    parsers."""

    required_texts: tuple[str, ...] = Field(
        (), description="all of these stand in the template", alias="holds"
    )
    forbidden_texts: tuple[str, ...] = Field(
        (), description="none of these stands in it", alias="lacks"
    )
    begins: str = Field("", description="stands in what the template writes before an answer")
    tokens: tuple[str, ...] = Field(
        (), description="the parsers work only where the tokenizer has these as tokens of their own"
    )
    types: tuple[str, ...] = Field(
        (), description="the model_type begins with one of these; empty: any"
    )
    parsers: tuple[str, ...] = Field(
        (), description="names of parsers, best first; the first that an engine has is taken"
    )
    why: str = Field("", description="why there is no parser")
    source: str

    def is_taught(self, spec: ModelSpec, template: str) -> bool:
        """Whether the model's template teaches this dialect."""
        return (
            all(text in template for text in self.required_texts)
            and not any(text in template for text in self.forbidden_texts)
            and self.begins in template[template.rfind(_PROMPT) :]
            and (not self.types or spec.model_type.startswith(self.types))
        )


class ParserTable(Value):
    """The dialects that are known (profiles/parsers.yaml). The first that a template teaches is the
    model's. `repairs` are of another file."""

    tools: tuple[Dialect, ...]
    reasoning: tuple[Dialect, ...]
    repairs: tuple[Repair, ...] = ()

    def writing(self, spec: ModelSpec) -> ModelDialect:
        """How the model writes: its template is searched here, once for all engines."""
        template = spec.chat_template
        if template is None:
            return ModelDialect(spec, None, None)
        tools, reasoning = (
            next((row for row in rows if row.is_taught(spec, template)), None)
            for rows in (self.tools, self.reasoning)
        )
        return ModelDialect(spec, tools, reasoning)


class ModelDialect(FrozenRecord, frozen=True, eq=False):
    """How one model writes. None: its template teaches no dialect that is known."""

    spec: ModelSpec
    tools: Dialect | None
    reasoning: Dialect | None
    # All plans of an engine version have the same.
    _choices: dict[tuple[str, str | None, str], Choice[str]] = field(default_factory=dict)

    def tool_parser(self, engine: Engine) -> Choice[str]:
        """The parser of tool calls, or "none" with the reason."""
        return self._parser(self.tools, engine, TOOLS_FLAG, "tool calls")

    def reasoning_parser(self, engine: Engine) -> Choice[str]:
        """The parser that separates reasoning from the answer, or "none" with the reason."""
        return self._parser(self.reasoning, engine, REASONING_FLAG, "thoughts")

    def _parser(
        self, dialect: Dialect | None, engine: Engine, flag: str, subject: str
    ) -> Choice[str]:
        key = engine.ref, engine.image, flag
        if key not in self._choices:
            self._choices[key] = self._parser_choice(dialect, engine, flag, subject)
        return self._choices[key]

    def _parser_choice(
        self, dialect: Dialect | None, engine: Engine, flag: str, subject: str
    ) -> Choice[str]:
        """The parser of a dialect of the chat template, or the reason why there is none."""
        spec = self.spec
        option = engine.flags.get(flag)
        if spec.task != "generate":
            return StrChoice(
                value=NO_PARSER,
                reason=f"the task of the model is {spec.task}",
                source=spec.sources.get("task", "not known"),
            )
        if spec.chat_template is None:
            return StrChoice(value=NO_PARSER, reason=NO_TEMPLATE, source="chat template")
        if dialect is None:
            reason = f"the chat template has no form of {subject} that is known"
            return StrChoice(value=NO_PARSER, reason=reason, source="chat template")
        if missing_tokens := [token for token in dialect.tokens if token not in spec.added_tokens]:
            reason = (
                f"the parser needs {missing_tokens[0]} as a token of its own, which the small files"
                " of the tokenizer do not name"
            )
            return StrChoice(value=NO_PARSER, reason=reason, source=dialect.source)
        if not dialect.parsers:
            return StrChoice(value=NO_PARSER, reason=dialect.why, source=dialect.source)
        names = option.choices or () if option else ()
        value = next((name for name in dialect.parsers if name in names), None)
        if value is None:
            reason = f"{engine.ref} has no parser {' or '.join(dialect.parsers)}"
            return StrChoice(value=NO_PARSER, reason=reason, source=f"profile {engine.ref}")
        marks = [*dialect.required_texts, *([dialect.begins] if dialect.begins else [])]
        example = " ".join(marks[:2]) or spec.model_type
        reason = f"the chat template marks {subject} with {example}"
        return StrChoice(value=value, reason=reason, source=dialect.source)
