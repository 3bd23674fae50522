"""`fitserve completion`: shell completion, generated from the program's own parser."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from enum import Enum, StrEnum
from typing import Annotated, Any, NamedTuple

import typer

from gateway.cli.terminal import say

_PROGRAM = "fitserve"


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


class Option(NamedTuple):
    """An option.

    values: the values of an enumeration.
    has_value: whether a value follows.
    """

    names: tuple[str, ...]
    words: str
    values: tuple[str, ...]
    has_value: bool


class CommandNode(NamedTuple):
    """A command or a group of commands. path: its words, from the program's name on."""

    path: tuple[str, ...]
    commands: dict[str, str]
    options: tuple[Option, ...]

    @property
    def completions(self) -> list[str]:
        return [*self.commands, *(name for option in self.options for name in option.names)]


def completion(
    ctx: typer.Context, shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.")]
) -> None:
    """Print a completion script for SHELL. Add `source <(fitserve completion bash)` to ~/.bashrc,
    or `fitserve completion fish | source` to config.fish."""
    nodes = list(_command_nodes(ctx.find_root().command, (_PROGRAM,)))
    say({Shell.BASH: bash, Shell.ZSH: zsh, Shell.FISH: fish}[shell](nodes))


def _command_nodes(command: Any, path: tuple[str, ...]) -> Iterator[CommandNode]:
    subcommands = {
        name: subcommand
        for name, subcommand in getattr(command, "commands", {}).items()
        if not subcommand.hidden
    }
    yield CommandNode(
        path,
        {name: subcommand.get_short_help_str(80) for name, subcommand in subcommands.items()},
        tuple(_command_options(command)),
    )
    for name, subcommand in subcommands.items():
        yield from _command_nodes(subcommand, (*path, name))


def _command_options(command: Any) -> Iterator[Option]:
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            text = (parameter.help or "").partition("; ")[0].rstrip(".")
            yield Option(
                (*parameter.opts, *parameter.secondary_opts),
                text,
                _values_of(parameter),
                not (parameter.is_flag or parameter.count),
            )
    yield Option(("--help",), "Show this help", (), False)


def _values_of(option: Any) -> tuple[str, ...]:
    """The values of an option that is an enumeration."""
    enumeration = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    return (
        tuple(str(member.value) for member in enumeration)
        if isinstance(enumeration, type) and issubclass(enumeration, Enum)
        else ()
    )


def bash(nodes: list[CommandNode]) -> str:
    lines = [
        f"declare -A _fitserve_words=({_word_entries(nodes, '[{}]={}')})",
        f"declare -A _fitserve_values=({_value_entries(nodes, '[{}]={}')})",
    ]
    return "\n".join([*lines, _BASH])


def zsh(nodes: list[CommandNode]) -> str:
    lines = [
        f"typeset -gA _fitserve_words=({_word_entries(nodes, '{} {}')})",
        f"typeset -gA _fitserve_values=({_value_entries(nodes, '{} {}')})",
    ]
    return "\n".join(["#compdef fitserve", *lines, _ZSH])


def fish(nodes: list[CommandNode]) -> str:
    lines = [_FISH % " ".join(shlex.quote(" ".join(node.path)) for node in nodes)]
    for node in nodes:
        condition = f"__fitserve_at {shlex.quote(' '.join(node.path))}"
        complete = f"complete -c {_PROGRAM} -n {shlex.quote(condition)}"
        lines += [
            f"{complete} -f -a {name} -d {shlex.quote(words)}"
            for name, words in node.commands.items()
        ]
        for option in node.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            argument = " -r" if option.has_value else ""
            if option.values:
                argument = f" -x -a {shlex.quote(' '.join(option.values))}"
            lines.append(f"{complete} {names}{argument} -d {shlex.quote(option.words)}")
    return "\n".join(lines)


def _word_entries(nodes: list[CommandNode], form: str) -> str:
    return " ".join(
        form.format(shlex.quote(" ".join(node.path)), shlex.quote(" ".join(node.completions)))
        for node in nodes
    )


def _value_entries(nodes: list[CommandNode], form: str) -> str:
    entries = []
    for node in nodes:
        for option in (option for option in node.options if option.values):
            values = shlex.quote(" ".join(option.values))
            paths = (shlex.quote(" ".join((*node.path, name))) for name in option.names)
            entries += [form.format(path, values) for path in paths]
    return " ".join(entries)


# Each script follows the typed words down the commands. Without a match, files are completed.
_BASH = """_fitserve() {
    local path=fitserve word current i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="$path ${COMP_WORDS[i]}"
        [[ -n "${_fitserve_words[$word]+set}" ]] && path="$word"
    done
    word="$path ${COMP_WORDS[COMP_CWORD - 1]}"
    current="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=()
    if [[ -n "${_fitserve_values[$word]+set}" ]]; then
        mapfile -t COMPREPLY < <(compgen -W "${_fitserve_values[$word]}" -- "$current")
    else
        mapfile -t COMPREPLY < <(compgen -W "${_fitserve_words[$path]}" -- "$current")
    fi
}
complete -o default -F _fitserve fitserve"""
_ZSH = """_fitserve() {
    local place=fitserve word i
    for ((i = 2; i < CURRENT; i++)); do
        word="$place ${words[i]}"
        (( ${+_fitserve_words[$word]} )) && place="$word"
    done
    word="$place ${words[CURRENT - 1]}"
    if (( ${+_fitserve_values[$word]} )); then
        compadd -- ${=_fitserve_values[$word]}
    else
        compadd -- ${=_fitserve_words[$place]}
        _files
    fi
}
compdef _fitserve fitserve"""
_FISH = """set -g __fitserve_places %s
function __fitserve_at
    set -l place fitserve
    for word in (commandline -opc)[2..-1]
        contains -- "$place $word" $__fitserve_places; and set place "$place $word"
    end
    test "$place" = "$argv[1]"
end"""
