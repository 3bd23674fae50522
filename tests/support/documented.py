"""The commands that README.md, CONTRIBUTING.md and docs/ show, and those that messages and comments
mention."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from typer.main import get_command

from tests.support.paths import ROOT
from tests.support.program import app

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_SHOWN = re.compile(r"\s*(?:\w+=\S+ )*(fitserve\b(?!:).*)")
_MENTIONED = re.compile(r"`(fitserve [^`\n]*)`")
# Words that stand for a number.
_NUMBERS = {"N": "8"}


class ShownCommand(NamedTuple):
    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


@cache
def program() -> Any:
    """The parser of all commands."""
    return get_command(app)


def commands_of_block() -> list[ShownCommand]:
    """Every command of a block of code, without `fitserve`; of alternatives each."""
    return [
        ShownCommand(page.name, line, words)
        for page in PAGES
        for line, text in _blocks(page)
        for words in commands(text)
    ]


def foreign_commands() -> list[ShownCommand]:
    """Every command of another program, in fenced blocks of README.md and docs/: `sh`, or without a
    language and beginning as `curl` does. Lines that go
    on are one."""
    commands = []
    for page in PAGES:
        language, text, began = None, "", 0
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if line.lstrip().startswith("```"):
                language = line.strip()[3:] if language is None else None
            elif language is not None and page.name != "CONTRIBUTING.md":
                began, text = began if text else number, text + line.removesuffix("\\")
                if line.endswith("\\"):
                    continue
                if (
                    not _SHOWN.fullmatch(text)
                    and (language == "sh" or text.startswith(_PROGRAMS))
                    and text.strip()
                ):
                    commands.append(
                        ShownCommand(page.name, began, tuple(shlex.split(text, comments=True)))
                    )
                text = ""
    return commands


# Programs of other projects with which a block without a language may begin.
_PROGRAMS = ("curl ", "docker ", "systemctl ", "pip ", "python ")


def mentioned_commands() -> list[ShownCommand]:
    """Every command between backticks, in documents and in code, as the commands of hints must
    exist."""
    files = [
        *PAGES,
        *(
            path
            for folder in ("gateway", "profiles")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".yaml")
        ),
    ]
    command_list = []
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for text in _MENTIONED.findall(line):
                command_list += [
                    ShownCommand(str(path.relative_to(ROOT)), number, words)
                    for words in commands(text)
                ]
    return command_list


def commands(text: str) -> Iterator[tuple[str, ...]]:
    """The words of each command in a line, without `fitserve`. Brackets are around optional words,
    `|` is between alternatives."""
    plain = re.sub(r"\{[^}]*\}", "X", text.replace("[[", "").replace("]]", ""))
    plain = re.split(r"\s{2,}|\s#|\s>|\|\s*source", plain.strip())[0]
    for part in re.split(r"\s\|\s|;\s*", plain.replace("...", "")):
        words = [
            _NUMBERS.get(word, word)
            for word in shlex.split(part.replace("[", " ").replace("]", " "))
        ]
        words = words[1:] if words[:1] == ["fitserve"] else words
        choices = [
            word.split("|") if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+|[A-Z]+\|\S+", word) else [word]
            for word in words
        ]
        for number in range(max(map(len, choices), default=0)):
            yield tuple(choice[min(number, len(choice) - 1)] for choice in choices)


def parse(words: tuple[str, ...]) -> None:
    """Parse the words as the program does, without running the command. Raises the parser's
    errors."""
    command, name, rest = program(), "fitserve", list(words)
    parent = None
    while True:
        context = command.make_context(name, rest, parent=parent)
        if not hasattr(command, "commands"):
            return
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        name, below, rest = command.resolve_command(context, rest)
        command, parent = below, context


def unknown_word(words: tuple[str, ...]) -> str | None:
    """The first word of a mention that the program does not know: a command, or an option of the
    command."""
    command, rest = program(), list(words)
    while hasattr(command, "commands"):
        # An option of the program itself goes with its value.
        while rest and rest[0] in _options(command):
            rest = rest[2:] if rest[0] not in ("--help", "--version") else []
        if not rest or not re.fullmatch(r"[a-z-]+", rest[0]):
            return None
        if rest[0] not in command.commands:
            return rest[0]
        command, rest = command.commands[rest[0]], rest[1:]
    if getattr(command, "context_settings", {}).get("ignore_unknown_options"):
        return None
    return next(
        (
            word
            for word in rest
            if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in _options(command)
        ),
        None,
    )


def _options(command: Any) -> set[str]:
    params = {
        name
        for param in command.params
        if param.param_type_name == "option"
        for name in (*param.opts, *param.secondary_opts)
    }
    return params | {"--help"}


def _blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Lines of blocks of code that are commands of ours."""
    is_fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif (is_fenced or line.startswith("    ")) and (match := _SHOWN.fullmatch(line)):
            yield number, match[1]
