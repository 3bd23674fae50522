"""Whether a command line and its environment are such as plans have: the allow-list of flags, read backwards. Pure.

For a reader of command lines that does not trust their writer.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core import variables
from gateway.core.facts.peers import P2P_OFF
from gateway.core.planner.flags import OWN, check_text, check_value
from gateway.domain import Engine, Scalar
from gateway.domain.value import served_name
from gateway.errors import BadFlag

# Flags that no user gives, and plans have.
_PLANNED = ("speculative-config", "is-embedding")


def check_command(engine: Engine, argv: tuple[str, ...], *, model: str, port: int, folder: str) -> None:
    """Raises BadFlag unless `argv` is the engine's command in its container, flags that plans may have, and at the end the
    gateway's own: the model's weights below `folder`, its name, and where the engine listens."""
    program = engine.container_command
    own = {engine.spelling.get(name, name): name for name in OWN}
    if argv[: len(program)] != program:
        raise BadFlag(f"The command is not that of {engine.ref}.", param="argv")
    flags, ends = argv[len(program) : -len(own)], argv[len(program) :][-len(own) :]
    for item in flags:
        _check_flag(engine, item, own)
    given = [_split(item) for item in ends]
    if [own.get(name) for name, _ in given] != [*OWN]:
        raise BadFlag(f"The command of {engine.ref} does not end with the model, its name, and where it listens.", param="argv")
    weights, name, host, listens = (value or "" for _, value in given)
    if (name, host, listens) != (served_name(model), "0.0.0.0", str(port)):
        raise BadFlag(f"The command of {engine.ref} has another name or address than its container.", param="argv")
    check_text("--model", weights, param="argv")
    if ".." in weights.split("/") or not weights.startswith(f"{folder}/"):
        raise BadFlag(f"The weights {weights[:80]!r} are not below {folder}.", param="argv")


def check_environment(engine: Engine, env: Mapping[str, str]) -> None:
    """Raises BadFlag for a variable that neither the engine's profile nor a plan sets, and that no user may."""
    for name, value in env.items():
        planned = engine.env.get(name) == value or engine.eager_env.get(name) == value or (name, value) == P2P_OFF
        if not planned:
            variables.check(engine, name, value)


def _check_flag(engine: Engine, item: str, own: Mapping[str, str]) -> None:
    name, text = _split(item)
    value: Scalar = True if text is None else text
    if text is None and name not in engine.flags:
        name, value = name.removeprefix("no-"), False
    if name not in engine.flags:
        raise BadFlag(f"{engine.ref} has no flag {item[:80]!r}.", param="argv")
    name = engine.flags[name].same_as or name
    if name in own or (engine.flags[name].ours and name not in _PLANNED):
        raise BadFlag(f"The flag --{name} is in no plan.", param="argv")
    check_value(engine, name, engine.flags[name], value)


def _split(item: str) -> tuple[str, str | None]:
    """The name of a flag and its value, which a switch has none of. What is no flag has no name that is known."""
    name, equals, value = item.partition("=")
    return name[2:] if name.startswith("--") else "", value if equals else None
