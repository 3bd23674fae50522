"""Whether a text is a chat template as engines read them: Jinja in a sandbox, compiled here and
never run."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import BadRequest


class _Generation(Extension):
    """`{% generation %}` marks what the model writes. Source: transformers 5.14
    utils/chat_template_utils.py: AssistantTracker, whose environment this is."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


@lru_cache(maxsize=4)
def check(text: str, name: str) -> None:
    """Raises BadRequest that names the line. Hostile text may take time and memory: this runs where
    both have a limit."""
    shown = name or "The chat template"
    hint = "Correct it, or leave it out: then the one that comes with the model is taken."
    try:
        ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        ).from_string(text)
    except TemplateSyntaxError as error:
        message = f"{shown} is not Jinja: {str(error.message).rstrip('.')}, in line {error.lineno}."
        raise BadRequest(message, hint=hint, param="chat_template") from None
    except (TemplateError, SyntaxError, ValueError, RecursionError) as error:
        raise BadRequest(
            f"{shown} is not Jinja: {error}.", hint=hint, param="chat_template"
        ) from None
