"""The syntax check of chat templates: Jinja as engines read it, compiled and never run."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import BadRequest


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the model's own text.

    Source: AssistantTracker in utils/chat_template_utils.py of transformers 5.14, which also has
    this environment.
    """

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


@lru_cache(maxsize=4)
def check(text: str, name: str) -> None:
    """Check a chat template. Raises BadRequest that names the line.

    A hostile template may cost time and memory, so callers run this where both have a limit.
    """
    title = name or "The chat template"
    hint = "Correct it, or leave it out: without it the model's own template is used."
    try:
        ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        ).from_string(text)
    except TemplateSyntaxError as error:
        message = f"{title} is not Jinja: {str(error.message).rstrip('.')}, in line {error.lineno}."
        raise BadRequest(message, hint=hint, param="chat_template") from None
    except (TemplateError, SyntaxError, ValueError, RecursionError) as error:
        raise BadRequest(
            f"{title} is not Jinja: {error}.", hint=hint, param="chat_template"
        ) from None
