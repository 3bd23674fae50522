"""The check of a command line and its environment against those of plans. Pure.

The reader does not trust the writer: the allow-list of flags, read backwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from gateway import variables
from gateway.diagnosis.facts.peers import P2P_SWITCH
from gateway.domain import Engine, Scalar
from gateway.domain.value import served_name
from gateway.domain.wish import NAME_PATTERN
from gateway.engines.common import engine_auth, expert_warmups, media_hosts_flag
from gateway.engines.common.chat import template
from gateway.engines.common.lora.adapter_flags import LIST_FLAGS
from gateway.engines.common.span import Rendezvous
from gateway.engines.common.trace_flags import SERVICE_VARIABLE
from gateway.engines.registry import engine_kind
from gateway.errors import BadFlag
from gateway.planner.flags import GATEWAY_FLAGS, check_text, check_value, quiet_flags

# Flags that no user gives, and plans have.
_PLAN_FLAGS = (
    "speculative-config",
    "speculative-algorithm",
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
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
    peers: Collection[str] = (),
) -> None:
    """Raise BadFlag unless `argv` is a command line of plans.

    The engine's command in its container, flags that plans may have, and at the end three of
    the gateway: the weights below `folder`, the name, and the address.

    env: the environment of the engine; it decides whether the engine needs authentication.
    peers: addresses of first nodes that ranks of an engine over several nodes may meet; any process
        that answers there can run code in the engine.
    """
    arguments = _arguments(engine, argv, env)
    own_names = {engine.spelling.get(name, name): name for name in GATEWAY_FLAGS}
    flags = arguments[: -len(own_names)]
    own_flags = arguments[-len(own_names) :]
    flags = _drop_adapter_flags(engine, _drop_node_flags(engine, flags, peers), folder)
    flags = _drop_media_hosts(engine, flags)
    for flag in flags:
        _check_flag(engine, flag, own_names, folder)
    _check_own_flags(engine, own_flags, own_names, (served_name(model), "0.0.0.0", str(port)))
    _check_weights(_split_flag(own_flags[0])[1] or "", folder)


def _arguments(engine: Engine, argv: tuple[str, ...], env: Mapping[str, str]) -> tuple[str, ...]:
    """The arguments after the engine's program and its quiet flags. Raises BadFlag for another
    program."""
    program = _expected_program(engine, argv, env)
    skipping = expert_warmups.wrap_command(program, engine, ",".join(engine.expert_warmups))
    program = skipping if argv[: len(skipping)] == skipping else program
    if argv[: len(program)] != program:
        raise BadFlag(f"The command is not that of {engine.ref}.", param="argv")
    arguments = argv[len(program) :]
    quiet_arguments = quiet_flags(engine)
    return (
        arguments[len(quiet_arguments) :]
        if arguments[: len(quiet_arguments)] == quiet_arguments
        else arguments
    )


def _check_own_flags(
    engine: Engine,
    own_flags: tuple[str, ...],
    own_names: Mapping[str, str],
    address: tuple[str, str, str],
) -> None:
    """Raise BadFlag unless a command ends with the gateway's own flags.

    own_names: their names by the engine's spelling.
    address: name, host and port of the engine.
    """
    pairs = [_split_flag(flag) for flag in own_flags]
    if [own_names.get(name) for name, _ in pairs] != [*GATEWAY_FLAGS]:
        raise BadFlag(
            f"The command of {engine.ref} does not end with the model, its name, and where it"
            " listens.",
            param="argv",
        )
    _, *repeated_values = (value or "" for _, value in pairs)
    if tuple(repeated_values) != address:
        raise BadFlag(
            f"The command of {engine.ref} has another name or address than its container.",
            param="argv",
        )


def _check_weights(weights: str, folder: str) -> None:
    """Raise BadFlag unless the path of the weights is below a folder."""
    check_text("--model", weights, param="argv")
    if not _is_below(weights, folder):
        raise BadFlag(f"The weights {weights[:80]!r} are not below {folder}.", param="argv")


def _expected_program(
    engine: Engine, argv: tuple[str, ...], env: Mapping[str, str]
) -> tuple[str, ...]:
    if "--headless" in argv:
        return engine_kind(engine.kind).rank_command(engine.container_command)
    if engine_auth.needs_auth(env) and engine.has_sleep_mode:
        return engine_auth.wrap_command(engine.container_command, engine.key_env)
    return engine.container_command


def _drop_node_flags(
    engine: Engine, flags: tuple[str, ...], peers: Collection[str]
) -> tuple[str, ...]:
    """The flags without those of one of several nodes, which are all there or none. Raises BadFlag
    where they are not such a set, or name another address than one of `peers`."""
    forms = _node_forms(engine, peers)
    node_flags = set().union(*forms)
    items = [
        (argument, name) for argument in flags if (name := _split_flag(argument)[0]) in node_flags
    ]
    if not items:
        return flags
    names = {name for _, name in items}
    form = next((form for form in forms if form.keys() == names), None)
    if form is None or len(items) > len(names) or names - engine.flags.keys():
        raise BadFlag(
            f"The flags of {engine.ref} for one of several nodes are not those of a plan.",
            param="argv",
        )
    for argument, name in items:
        if re.fullmatch(form[name], argument) is None:
            raise BadFlag(
                f"{argument[:80]!r} names no machine that engines of this one may meet.",
                param="argv",
            )
    return tuple(argument for argument in flags if _split_flag(argument)[0] not in names)


def _node_forms(engine: Engine, peers: Collection[str]) -> list[dict[str, str]]:
    """The sets of flags that one of several nodes may have: name -> pattern of the item."""
    kind = engine_kind(engine.kind)
    hosts = [re.escape(host) for peer in peers for host in (peer, f"[{peer}]")]
    address = f"({'|'.join(hosts)})" if hosts else "(?!)"
    return [
        {
            name: re.sub(
                r"\d+", r"\\d{1,5}", f"--{name}" if value is True else f"--{name}={value}"
            ).replace("PEER", address)
            for name, value in kind.node_flags(
                Rendezvous(2, groups, "PEER", 1, 1), node_rank
            ).items()
        }
        for groups in (1, 2)
        for node_rank in (0, 1)
    ]


def _drop_adapter_flags(engine: Engine, flags: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """The flags before those that name adapters, which come last. Raises BadFlag for an adapter
    that is not below `folder`."""
    at = next(
        (
            position
            for position, argument in enumerate(flags)
            if argument.removeprefix("--") in LIST_FLAGS
        ),
        None,
    )
    if at is None:
        return flags
    flag = flags[at].removeprefix("--")
    name, path = LIST_FLAGS[flag]
    if flag not in engine.flags:
        raise BadFlag(f"{engine.ref} has no flag {flag!r}.", param="argv")
    for argument in flags[at + 1 :]:
        try:
            adapter = json.loads(argument)
        except (ValueError, RecursionError):
            adapter = None
        if (
            not isinstance(adapter, dict)
            or adapter.keys() != {name, path}
            or not all(isinstance(value, str) for value in adapter.values())
        ):
            raise BadFlag(
                f"--{flag} of {engine.ref} names an adapter in another form than plans:"
                f" {argument[:80]!r}.",
                param="argv",
            )
        check_text(f"--{flag}", argument, param="argv")
        if re.fullmatch(NAME_PATTERN, adapter[name]) is None or not _is_below(
            adapter[path], folder
        ):
            raise BadFlag(
                f"The adapter {adapter[path][:80]!r} is not below {folder}.", param="argv"
            )
    return flags[:at]


def _drop_media_hosts(engine: Engine, flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags before the hosts of media, which come last. Raises BadFlag for another text."""
    flag = f"--{media_hosts_flag.FLAG}"
    if flag not in flags or media_hosts_flag.FLAG not in engine.flags:
        return flags
    at = flags.index(flag)
    for host in flags[at + 1 :]:
        if not media_hosts_flag.HOST.fullmatch(host):
            raise BadFlag(f"{flag} of {engine.ref} has no host {host[:80]!r}.", param="argv")
    return flags[:at]


def _is_below(path: str, folder: str) -> bool:
    return ".." not in path.split("/") and path.startswith(f"{folder}/")


def check_environment(engine: Engine, env: Mapping[str, str]) -> None:
    """Refuse a variable that neither the engine's profile nor a plan sets, and that no user may.
    Raises BadFlag."""
    for name, value in env.items():
        is_planned = (
            engine.env.get(name) == value
            or engine.eager_env.get(name) == value
            or (name, value) == P2P_SWITCH
        )
        # An authentication layer protects its development endpoints then.
        is_planned |= (name, value) == engine_auth.DEV_MODE and engine.has_sleep_mode
        is_planned |= (name, value) == (SERVICE_VARIABLE, engine.kind)
        address = name == engine_kind(engine.kind).address_env
        is_planned |= address and re.fullmatch(r"[\w.:-]{1,253}", value, re.ASCII) is not None
        if not is_planned:
            variables.check(engine, name, value)


def _check_flag(
    engine: Engine, flag_text: str, planned_args: Mapping[str, str], folder: str
) -> None:
    name, text = _split_flag(flag_text)
    value: Scalar = True if text is None else text
    if text is None and name not in engine.flags:
        name = name.removeprefix("no-")
        value = False
    if name not in engine.flags:
        raise BadFlag(f"{engine.ref} has no flag {flag_text[:80]!r}.", param="argv")
    name = engine.flags[name].same_as or name
    is_planned = name in _PLAN_FLAGS or name in engine.api_switches
    if name in planned_args or (engine.flags[name].is_reserved and not is_planned):
        raise BadFlag(f"The flag --{name} is not part of any plan.", param="argv")
    if name == template.FLAG and not template.is_file_of(folder, text or ""):
        raise BadFlag(
            f"The chat template {(text or '')[:80]!r} is not a file below"
            f" {folder}/{template.FOLDER}.",
            param="argv",
        )
    check_value(engine, name, engine.flags[name], value)


def _split_flag(flag_text: str) -> tuple[str, str | None]:
    """The name of a flag and its value; a switch has none, and other items have no name."""
    name, separator, value = flag_text.partition("=")
    return name[2:] if name.startswith("--") else "", value if separator else None
