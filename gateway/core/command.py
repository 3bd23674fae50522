"""From choices to a command line: typed, allow-listed flags of one engine version, never a shell."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping

from gateway.domain import Engine, Flag, LaunchSpec, Mount, Plan, Scalar
from gateway.errors import BadFlag

# Control characters would forge lines in a log or a process listing; engines have no use for them in a flag.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_VALUE = 8192


def check_args(engine: Engine, args: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The user's flags with canonical names and typed values. Raises BadFlag naming the nearest known flag."""
    return {name: _check_value(engine, name, engine.flags[name], value) for name, value in _named(engine, args)}


def check_env(engine: Engine, env: Mapping[str, str]) -> dict[str, str]:
    """The user's environment variables. Raises BadFlag for one this engine version does not have or may not be given."""
    for name, value in env.items():
        if name not in engine.user_env:
            raise BadFlag(
                _unknown(f"{engine.ref} has no environment variable {name[:80]!r} that may be set", name, engine.user_env),
                param="env",
            )
        if _CONTROL.search(value) or len(value) > _MAX_VALUE:
            raise BadFlag(
                f"The value of {name} has control characters or is too long.", hint="Give a plain value.", param="env"
            )
    return dict(env)


def arguments(flags: Mapping[str, Scalar]) -> tuple[str, ...]:
    """`--name=value` items, in order; a true switch is `--name`, a false one `--no-name`.

    One item per flag, with `=`, so that no value can ever be read as another flag.
    """
    items = []
    for name, value in flags.items():
        if isinstance(value, bool):
            items.append(f"--{name}" if value else f"--no-{name}")
        else:
            items.append(f"--{name}={value}")
    return tuple(items)


def launch_spec(
    plan: Plan,
    engine: Engine,
    *,
    name: str,
    model: str,
    attempt: int,
    port: int,
    weights: str,
    mounts: Iterable[Mount],
    environment: str | None,
) -> LaunchSpec:
    """The plan made concrete for one host.

    `weights` is the model folder as the engine sees it; `environment` the folder of the engine's virtual
    environment, or None when the engine runs in its container.
    """
    program = engine.container_command if environment is None else engine.process_command
    argv = tuple(part.format(env=environment) for part in program)
    # Inside a container the engine must listen on its only address; as a process only loopback may reach it.
    listen = "0.0.0.0" if environment is None else "127.0.0.1"
    own: dict[str, Scalar] = {"model": weights, "served-model-name": model, "host": listen, "port": port}
    return LaunchSpec(
        name=name,
        model=model,
        attempt=attempt,
        fingerprint=plan.fingerprint,
        engine=plan.engine,
        argv=argv + arguments(own) + plan.argv,
        env={**engine.env, **plan.env},
        gpus=plan.gpus,
        mounts=tuple(mounts),
        # Ranks talk through shared memory; vLLM's own images ask for --ipc=host or a large /dev/shm.
        shm_bytes=(2 + 2 * plan.tensor_parallel.value) * 1024**3,
        port=port,
    )


def _named(engine: Engine, args: Mapping[str, Scalar]) -> Iterable[tuple[str, Scalar]]:
    for given, value in args.items():
        name = given.removeprefix("--").replace("_", "-")
        if name not in engine.flags:
            raise BadFlag(_unknown(f"{engine.ref} has no flag {given[:80]!r}", name, engine.flags), param="args")
        if engine.flags[name].ours:
            raise BadFlag(f"The flag --{name} is set by the gateway and cannot be given.", hint="Leave it out.", param="args")
        yield name, value


def _check_value(engine: Engine, name: str, flag: Flag, value: Scalar) -> Scalar:
    typed = _typed(flag, value)
    if typed is None:
        raise BadFlag(
            f"--{name} of {engine.ref} takes {_KINDS[flag.type]}, not {str(value)[:80]!r}.",
            hint="Correct the value.",
            param="args",
        )
    if isinstance(typed, str) and (_CONTROL.search(typed) or len(typed) > _MAX_VALUE):
        raise BadFlag(f"The value of --{name} has control characters or is too long.", hint="Give a plain value.", param="args")
    if flag.choices is not None and str(typed) not in flag.choices:
        near = _unknown(f"--{name} of {engine.ref} cannot be {str(typed)[:80]!r}", str(typed), flag.choices)
        raise BadFlag(near, hint=f"It is one of: {', '.join(flag.choices)}.", param="args")
    return typed


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "json": "a JSON object or list",
}


def _typed(flag: Flag, value: Scalar) -> Scalar | None:
    """The value in the flag's type, also from its text form; None when it has none."""
    match flag.type:
        case "bool":
            if isinstance(value, str):
                return {"true": True, "false": False, "": True}.get(value.lower())
            return value if isinstance(value, bool) else None
        case "int" | "float":
            if isinstance(value, bool):
                return None
            try:
                number = float(value)
            except ValueError:
                return None
            if not math.isfinite(number):
                return None
            if flag.type == "float":
                return number
            return int(number) if number == int(number) and abs(number) < 2**53 else None
        case "json":
            if not isinstance(value, str):
                return None
            try:
                parsed = json.loads(value)
            except (ValueError, RecursionError):
                return None
            return json.dumps(parsed) if isinstance(parsed, (dict, list)) else None
        case _:
            return None if isinstance(value, bool) else str(value)


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"{what}; did you mean {near[0]}?" if near else f"{what}."
