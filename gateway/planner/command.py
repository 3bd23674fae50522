"""The check of a command line and its environment against those of plans. Pure.

The reader does not trust the writer: the allow-list of flags, read backwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from gateway import variables
from gateway.diagnosis.facts.peers import P2P_OFF
from gateway.domain import Engine, Scalar
from gateway.domain.value import served_name
from gateway.domain.wish import NAME_PATTERN
from gateway.engines.common import engine_auth, expert_warmups
from gateway.engines.common.chat import template
from gateway.engines.common.lora.adapter_flags import LIST_FLAGS
from gateway.errors import BadFlag
from gateway.planner.flags import GATEWAY_FLAGS, check_text, check_value, quieted

# Flags that no user gives, and plans have.
_PLANNED = (
    "speculative-config",
    "is-embedding",
    template.FLAG,
    "dp-size",
    "enable-dp-attention",
)


def check_command(
    engine: Engine,
    argv: tuple[str, ...],
    env: Mapping[str, str],
    *,
    model: str,
    port: int,
    folder: str,
) -> None:
    """Raise BadFlag unless `argv` is a command line of plans.

    The engine's command in its container, flags that plans may have, and at the end the gateway's
    own: the weights below `folder`, the name, and the address. env: of the engine; it decides
    whether the engine needs authentication.
    """
    opened = engine_auth.needs_auth(env) and engine.sleeps
    program = (
        engine_auth.wrap_command(engine.container_command, engine.key_env)
        if opened
        else engine.container_command
    )
    own_names = {engine.spelling.get(name, name): name for name in GATEWAY_FLAGS}
    skipping = expert_warmups.wrap_command(program, engine, ",".join(engine.expert_warmups))
    program = skipping if argv[: len(skipping)] == skipping else program
    if argv[: len(program)] != program:
        raise BadFlag(f"The command is not that of {engine.ref}.", param="argv")
    arguments, quiet = argv[len(program) :], quieted(engine)
    flags, ends = (
        arguments[
            len(quiet) if quiet and arguments[: len(quiet)] == quiet else 0 : -len(own_names)
        ],
        arguments[-len(own_names) :],
    )
    flags = _without_adapters(engine, flags, folder)
    for item in flags:
        _check_flag(engine, item, own_names, folder)
    last = [_split(item) for item in ends]
    if [own_names.get(name) for name, _ in last] != [*GATEWAY_FLAGS]:
        raise BadFlag(
            f"The command of {engine.ref} does not end with the model, its name, and where it"
            " listens.",
            param="argv",
        )
    weights, name, host, listens = (value or "" for _, value in last)
    if (name, host, listens) != (served_name(model), "0.0.0.0", str(port)):
        raise BadFlag(
            f"The command of {engine.ref} has another name or address than its container.",
            param="argv",
        )
    check_text("--model", weights, param="argv")
    if not _is_below(weights, folder):
        raise BadFlag(f"The weights {weights[:80]!r} are not below {folder}.", param="argv")


def _without_adapters(engine: Engine, flags: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """The flags before those that name adapters, which come last. Raises BadFlag for an adapter
    that is not below `folder`."""
    at = next(
        (place for place, item in enumerate(flags) if item.removeprefix("--") in LIST_FLAGS), None
    )
    if at is None:
        return flags
    flag = flags[at].removeprefix("--")
    name, path = LIST_FLAGS[flag]
    if flag not in engine.flags:
        raise BadFlag(f"{engine.ref} has no flag {flag!r}.", param="argv")
    for item in flags[at + 1 :]:
        try:
            adapter = json.loads(item)
        except (ValueError, RecursionError):
            adapter = None
        if (
            not isinstance(adapter, dict)
            or adapter.keys() != {name, path}
            or not all(isinstance(value, str) for value in adapter.values())
        ):
            raise BadFlag(
                f"--{flag} of {engine.ref} names an adapter as no plan does: {item[:80]!r}.",
                param="argv",
            )
        check_text(f"--{flag}", item, param="argv")
        if re.fullmatch(NAME_PATTERN, adapter[name]) is None or not _is_below(
            adapter[path], folder
        ):
            raise BadFlag(
                f"The adapter {adapter[path][:80]!r} is not below {folder}.", param="argv"
            )
    return flags[:at]


def _is_below(path: str, folder: str) -> bool:
    return ".." not in path.split("/") and path.startswith(f"{folder}/")


def check_environment(engine: Engine, env: Mapping[str, str]) -> None:
    """Raises BadFlag for a variable that neither the engine's profile nor a plan sets, and that no
    user may."""
    for name, value in env.items():
        planned = (
            engine.env.get(name) == value
            or engine.eager_env.get(name) == value
            or (name, value) == P2P_OFF
        )
        # Its endpoints for development are behind a door then.
        planned |= (name, value) == engine_auth.DEV_MODE and engine.sleeps
        if not planned:
            variables.check(engine, name, value)


def _check_flag(engine: Engine, item: str, planned_args: Mapping[str, str], folder: str) -> None:
    name, text = _split(item)
    value: Scalar = True if text is None else text
    if text is None and name not in engine.flags:
        name, value = name.removeprefix("no-"), False
    if name not in engine.flags:
        raise BadFlag(f"{engine.ref} has no flag {item[:80]!r}.", param="argv")
    name = engine.flags[name].same_as or name
    planned = name in _PLANNED or name in engine.api_switches
    if name in planned_args or (engine.flags[name].ours and not planned):
        raise BadFlag(f"The flag --{name} is in no plan.", param="argv")
    if name == template.FLAG and not template.is_file_of(folder, text or ""):
        raise BadFlag(
            f"The chat template {(text or '')[:80]!r} is not a file below"
            f" {folder}/{template.FOLDER}.",
            param="argv",
        )
    check_value(engine, name, engine.flags[name], value)


def _split(item: str) -> tuple[str, str | None]:
    """The name of a flag and its value; a switch has none, and other items have no name."""
    name, equals, value = item.partition("=")
    return name[2:] if name.startswith("--") else "", value if equals else None
