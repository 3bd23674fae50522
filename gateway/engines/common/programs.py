"""Programs of engines: the commands that packages install next to their Python. Pure."""

from __future__ import annotations


def replace_program(
    argv: tuple[str, ...], modules: tuple[tuple[str, ...], ...], program: tuple[str, ...]
) -> tuple[str, ...]:
    """The command with a program in place of `PYTHON -m MODULE`; another command as it is.

    modules: words after `-m` that start the same as the program.
    program: its name and subcommand. It is in the folder of PYTHON, if that is a path.
    """
    python, *arguments = argv
    for module in modules:
        length = 1 + len(module)
        if tuple(arguments[:length]) == ("-m", *module):
            folder, slash, _ = python.rpartition("/")
            return f"{folder}{slash}{program[0]}", *program[1:], *arguments[length:]
    return argv
