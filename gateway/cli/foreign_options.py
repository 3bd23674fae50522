"""Options of engines on our command line: `--kv-cache-dtype fp8` is `--arg kv-cache-dtype=fp8`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Options of engines and other programs that one of ours equals.
_EQUAL_OPTIONS = {
    "--max-model-len": "--context", "--context-length": "--context", "--num-ctx": "--context",
    "--ctx-size": "--context", "--tensor-parallel-size": "--tp", "--tp-size": "--tp",
    "--goal": "--for", "--objective": "--for",
}  # fmt: skip
# Options with a hint of their own, as the gateway has another way for them.
_HINTED_OPTIONS = {"--served-model-name", "--lora-modules"}


def translated_arguments(arguments: Sequence[str], error: Any) -> tuple[list[str], str] | None:
    """The arguments with our form of the unknown option of an error, and this form in words.

    None: the error is another one, the command starts no engine, or no engine has the option.
    error: a usage error of the library of commands.
    """
    option = getattr(error, "option_name", "")
    command = error.ctx.command if error.ctx is not None else None
    names = {name for parameter in command.params for name in parameter.opts} if command else set()
    place = next(
        (
            index
            for index, argument in enumerate(arguments)
            if argument == option or argument.startswith(f"{option}=")
        ),
        None,
    )
    if place is None or not option.startswith("--") or option in names or "--arg" not in names:
        return None
    _, separator, value = arguments[place].partition("=")
    earlier_arguments = list(arguments[:place])
    later_arguments = list(arguments[place + 1 :])
    if (equal_option := _EQUAL_OPTIONS.get(option)) in names and equal_option is not None:
        equal_arguments = [equal_option, value] if separator else [equal_option]
        return [*earlier_arguments, *equal_arguments, *later_arguments], equal_option
    flag = option.removeprefix("--")
    is_switch = _switches().get(flag)
    if is_switch is None or option in _HINTED_OPTIONS:
        return None
    if not separator and not is_switch:
        if not later_arguments or later_arguments[0].startswith("--"):
            return None
        value = later_arguments[0]
        later_arguments = later_arguments[1:]
    form_text = f"{flag}={value}" if value else flag
    # The value may be a secret, so the form does not repeat it.
    form = f"--arg {flag}=VALUE" if value else f"--arg {flag}"
    return [*earlier_arguments, "--arg", form_text, *later_arguments], form


def _switches() -> Mapping[str, bool]:
    """Whether a flag of the newest engines takes no value, by its name."""
    from gateway.profiles.profiles import Profiles  # only after a mistake
    from gateway.settings import load_settings

    settings = load_settings()
    data = settings.data
    profiles = Profiles(settings.profiles_dir, cache=data / "profiles.msgpack", data=data)
    engines = profiles.newest_of_each_kind()
    return {
        name: flag.type == "bool"
        for engine in reversed(engines)
        for name, flag in engine.flags.items()
    }
