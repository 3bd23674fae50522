"""`fitserve completion`: what a shell needs to complete commands and options, made of the program's
own parser."""

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
    """`values`: those that it may have, where they are few."""

    names: tuple[str, ...]
    words: str
    values: tuple[str, ...]
    takes: bool


class Place(NamedTuple):
    """A command, or a group of them: `path` is how it is called, from the program's name on."""

    path: tuple[str, ...]
    commands: dict[str, str]
    options: tuple[Option, ...]

    @property
    def words(self) -> list[str]:
        return [*self.commands, *(name for option in self.options for name in option.names)]


def completion(
    ctx: typer.Context, shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.")]
) -> None:
    """Print what SHELL needs to complete commands: `source <(fitserve completion bash)` in
    ~/.bashrc, `fitserve completion fish | source` in config.fish."""
    places = list(_places(ctx.find_root().command, (_PROGRAM,)))
    say({Shell.BASH: bash, Shell.ZSH: zsh, Shell.FISH: fish}[shell](places))


def _places(command: Any, path: tuple[str, ...]) -> Iterator[Place]:
    below = {name: one for name, one in getattr(command, "commands", {}).items() if not one.hidden}
    yield Place(
        path,
        {name: one.get_short_help_str(80) for name, one in below.items()},
        tuple(_options(command)),
    )
    for name, one in below.items():
        yield from _places(one, (*path, name))


def _options(command: Any) -> Iterator[Option]:
    for one in command.params:
        if one.param_type_name == "option" and not one.hidden:
            words = (one.help or "").partition("; ")[0].rstrip(".")
            yield Option(
                (*one.opts, *one.secondary_opts),
                words,
                _values_of(one),
                not (one.is_flag or one.count),
            )
    yield Option(("--help",), "Show what it does", (), False)


def _values_of(option: Any) -> tuple[str, ...]:
    """Of an option that is an enumeration."""
    kind = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    return (
        tuple(str(one.value) for one in kind)
        if isinstance(kind, type) and issubclass(kind, Enum)
        else ()
    )


def bash(places: list[Place]) -> str:
    lines = [
        f"declare -A _fitserve_words=({_pairs(places, '[{}]={}')})",
        f"declare -A _fitserve_values=({_values(places, '[{}]={}')})",
    ]
    return "\n".join([*lines, _BASH])


def zsh(places: list[Place]) -> str:
    lines = [
        f"typeset -gA _fitserve_words=({_pairs(places, '{} {}')})",
        f"typeset -gA _fitserve_values=({_values(places, '{} {}')})",
    ]
    return "\n".join(["#compdef fitserve", *lines, _ZSH])


def fish(places: list[Place]) -> str:
    lines = [_FISH % " ".join(shlex.quote(" ".join(place.path)) for place in places)]
    for place in places:
        asked = f"__fitserve_at {shlex.quote(' '.join(place.path))}"
        here = f"complete -c {_PROGRAM} -n {shlex.quote(asked)}"
        lines += [
            f"{here} -f -a {name} -d {shlex.quote(words)}" for name, words in place.commands.items()
        ]
        for option in place.options:
            named = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            given = (
                f" -x -a {shlex.quote(' '.join(option.values))}"
                if option.values
                else " -r"
                if option.takes
                else ""
            )
            lines.append(f"{here} {named}{given} -d {shlex.quote(option.words)}")
    return "\n".join(lines)


def _pairs(places: list[Place], form: str) -> str:
    return " ".join(
        form.format(shlex.quote(" ".join(place.path)), shlex.quote(" ".join(place.words)))
        for place in places
    )


def _values(places: list[Place], form: str) -> str:
    return " ".join(
        form.format(
            shlex.quote(" ".join((*place.path, name))), shlex.quote(" ".join(option.values))
        )
        for place in places
        for option in place.options
        if option.values
        for name in option.names
    )


# Each goes down from the program's name as far as the words before are commands. Where nothing
# fits, files are completed.
_BASH = """_fitserve() {
    local path=fitserve word i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="$path ${COMP_WORDS[i]}"
        [[ -n "${_fitserve_words[$word]+set}" ]] && path="$word"
    done
    word="$path ${COMP_WORDS[COMP_CWORD - 1]}"
    COMPREPLY=()
    if [[ -n "${_fitserve_values[$word]+set}" ]]; then
        mapfile -t COMPREPLY < <(compgen -W "${_fitserve_values[$word]}" -- "${COMP_WORDS[COMP_CWORD]}")
    else
        mapfile -t COMPREPLY < <(compgen -W "${_fitserve_words[$path]}" -- "${COMP_WORDS[COMP_CWORD]}")
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
