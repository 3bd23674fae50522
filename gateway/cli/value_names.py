"""Names of values in `--help`: nouns in capitals, such as `--gpu GPU` and `[FILE]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Names of texts whose parameter does not say their form.
_TEXTS = {
    "arg": "FLAG=VALUE",
    "by": "COLUMNS",
    "context": "TOKENS",
    "drafter": "MODEL",
    "endpoint": "URL",
    "endpoint_key": "PLACE",
    "env": "NAME=VALUE",
    "first": "DATE",
    "keep_alive": "DURATION",
    "last": "DATE",
    "lora": "NAME=SOURCE",
    "max_context": "TOKENS",
    "min_context": "TOKENS",
    "speculative": "METHOD",
    "system": "MESSAGE",
    "timeout": "DURATION",
    "unset": "OPTION",
    "wheels": "FOLDER",
}


def value_name(param: Any) -> str:
    """The name of an option's or argument's value."""
    choices = param.type_descriptor.choices
    kind = param.type_descriptor.annotation
    if choices:
        return "|".join(str(choice.value) for choice in choices)
    if kind in (int, float, list[int]):
        return "NUMBER"
    if kind is Path and param.name not in _TEXTS:
        return "FILE"
    name: str = param.name
    return _TEXTS.get(name, name.upper())


def name_values(params: list[Any]) -> None:
    """Give each option with a value the name of its value."""
    for param in params:
        if not is_argument(param) and not param.is_flag:
            param.metavar = value_name(param)


def argument_form(param: Any) -> str:
    """An argument as the first line of the help shows it: `NAME`, `[FILE]`, `MODELS...`."""
    name = param.name.upper()
    return f"{name if param.required else f'[{name}]'}{'...' if param.nargs != 1 else ''}"


def is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


class NamedValues:
    """The help of a command, with these names in place of Python's types."""

    # The base class names the parameters `ctx` and `formatter`.
    def collect_usage_pieces(self: Any, ctx: Any) -> list[str]:
        forms = [argument_form(param) for param in self.get_params(ctx) if is_argument(param)]
        return [self.options_metavar, *forms]

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        name_values(self.get_params(ctx))
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is None:
                continue
            if is_argument(param):
                text = record[1].removesuffix("[required]").rstrip()
                rows["Arguments"].append((param.name.upper(), text))
            else:
                rows.setdefault(param.rich_help_panel or "Options", []).append(record)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
