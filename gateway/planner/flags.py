"""From choices to a command line: typed, allow-listed flags of one engine version, never a
shell."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gateway.domain import Engine, Flag, Plan, Scalar
from gateway.domain.record import FrozenRecord
from gateway.domain.value import served_name
from gateway.engines.common import engine_auth, expert_warmups, resources
from gateway.engines.common.chat import template
from gateway.engines.common.lora.adapter_flags import list_arguments
from gateway.engines.common.open_flags import why_closed
from gateway.errors import BadFlag

# Only for types: a plan does without the classes of running engines.
if TYPE_CHECKING:
    from gateway.domain import LaunchSpec, Mount

_MAX_VALUE = 8192
# Flags that no user gives, by the planner's names, like all names here.
GATEWAY_FLAGS = ("model", "served-model-name", "host", "port")
# The KV cache of a vLLM in bytes, which spares it the measurement.
CACHE_BYTES = "kv-cache-memory-bytes"
# Ranges of flags that the planner computes with; a value outside them would make a wrong plan.
_RANGES: dict[str, tuple[float, float]] = {
    "tensor-parallel-size": (1, 64),
    "pipeline-parallel-size": (1, 64),
    "data-parallel-size": (1, 64),
    "max-model-len": (1, 10**9),
    "max-num-seqs": (1, 10**6),
    "max-num-batched-tokens": (1, 10**9),
    "block-size": (1, 2**16),
    "gpu-memory-utilization": (0.01, 1),
    CACHE_BYTES: (1, 2**50),
}

# Flag of another engine -> the planner's name of it, which is vLLM's.
_OF_OTHERS = {
    "context-length": "max-model-len",
    "ctx-size": "max-model-len",
    "num-ctx": "max-model-len",
    "max-total-tokens": "max-model-len",
    "tp-size": "tensor-parallel-size",
    "pp-size": "pipeline-parallel-size",
    "max-running-requests": "max-num-seqs",
    "max-concurrent-requests": "max-num-seqs",
    "chunked-prefill-size": "max-num-batched-tokens",
    "mem-fraction-static": "gpu-memory-utilization",
    "cuda-memory-fraction": "gpu-memory-utilization",
    "disable-cuda-graph": "enforce-eager",
    "moe-runner-backend": "moe-backend",
    "page-size": "block-size",
}


def check_args(engine: Engine, args: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The user's flags with canonical names and typed values. Raises BadFlag naming the nearest
    known flag."""
    return {
        name: check_value(engine, name, engine.flags[name], value)
        for name, value in _named(engine, args)
    }


def canonical(engine: Engine, args: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Checked flags by the planner's names, which are vLLM's, where the planner has one; the others
    keep the engine's."""
    names = {spelled_name: planned for planned, spelled_name in engine.spelling.items()}
    return {names.get(name, name): value for name, value in args.items()}


def spelled(engine: Engine, flags: Mapping[str, Scalar]) -> tuple[str, ...]:
    """The planner's flags, and what `canonical` gave, as this engine spells them; without those
    that it does not have.

    A switch that this engine has as a size (SGLang's --ep-size) is the tensor parallel size.
    """
    spelling, engine_flags = engine.spelling, engine.flags
    own_names = {
        name: value
        for planned, value in flags.items()
        if (name := spelling.get(planned, planned)) in engine_flags
    }
    ranks = own_names.get(spelling.get("tensor-parallel-size", "tensor-parallel-size"), 1)
    return arguments(
        {
            name: ranks if value is True and engine_flags[name].type == "int" else value
            for name, value in own_names.items()
        }
    )


def arguments(flags: Mapping[str, Scalar]) -> tuple[str, ...]:
    """`--name=value` items, in order; a true switch is `--name`, a false one `--no-name`.

    Each flag is one item with `=`, so that no value can be read as another flag.
    """
    return tuple(
        [
            (
                f"--{name}"
                if value is True
                else f"--no-{name}"
                if value is False
                else f"--{name}={value}"
            )
            for name, value in flags.items()
        ]
    )


class LaunchInputs(FrozenRecord, frozen=True):
    """The inputs of one start on a host. Paths are those that the engine sees.

    weights, drafter: model folders. templates: folder of chat templates. adapters: names and
    folders. environment: folder of the virtual environment; None: the engine runs in a container.
    remote_code: code of the model's repository may run. cache_bytes: KV cache on each GPU of an
    engine that does not measure.
    """

    weights: str
    mounts: tuple[Mount, ...] = ()
    environment: str | None = None
    drafter: str | None = None
    templates: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    remote_code: bool = False
    cache_bytes: int | None = None


def launch_spec(
    plan: Plan,
    engine: Engine,
    inputs: LaunchInputs,
    *,
    name: str,
    model: str,
    attempt: int,
    port: int,
) -> LaunchSpec:
    """The start of a plan's engine on one host."""
    from gateway.domain.running import LaunchSpec  # not before a start

    environment, cache_bytes = inputs.environment, inputs.cache_bytes
    # Inside a container the engine listens on its only address; as a process, on loopback alone.
    listen = "0.0.0.0" if environment is None else "127.0.0.1"
    last: dict[str, Scalar] = {
        "model": inputs.weights,
        "served-model-name": served_name(model),
        "host": listen,
        "port": port,
    }
    return LaunchSpec(
        name=name,
        model=model,
        attempt=attempt,
        fingerprint=plan.fingerprint,
        engine=plan.engine,
        # A user may override the first flags. The gateway's own come last, and parsers take the
        # last value, so no flag of a plan can replace them.
        argv=_program(plan, engine, environment)
        + quieted(engine)
        + arguments({name: True for name in engine.api_switches if name in engine.flags})
        + tuple(_placed(item, inputs.drafter, inputs.templates) for item in plan.argv)
        + (arguments({CACHE_BYTES: cache_bytes}) if cache_bytes is not None else ())
        + list_arguments(engine, inputs.adapters)
        + arguments({engine.spelling.get(flag, flag): value for flag, value in last.items()}),
        env={**engine.env, **expert_warmups.without_skips(plan).env},
        gpus=plan.gpus,
        mounts=inputs.mounts,
        shm_bytes=resources.shared_memory(plan),
        port=port,
        memory_bytes=resources.memory(plan),
        pids=resources.pids(plan),
        scratch=engine.scratch if environment is None else None,
        cache=resources.cache(plan, engine, remote_code=inputs.remote_code),
        caches=engine.caches,
        key_env=engine.key_env,
        key_option=engine.key_option,
    )


def _program(plan: Plan, engine: Engine, environment: str | None) -> tuple[str, ...]:
    command = engine.container_command if environment is None else engine.process_command
    if engine_auth.needs_auth(plan.env):
        command = engine_auth.wrap_command(command, engine.key_env)
    skipped = plan.env.get(expert_warmups.VARIABLE, "")
    command = expert_warmups.wrap_command(command, engine, skipped)
    return tuple(part.replace("{env}", environment or "") for part in command)


def quieted(engine: Engine) -> tuple[str, ...]:
    """The engine's `quiet`, where this version has that flag."""
    return (
        engine.quiet
        if engine.quiet and engine.quiet[0].partition("=")[0].removeprefix("--") in engine.flags
        else ()
    )


def _placed(item: str, drafter: str | None, templates: str | None) -> str:
    """The item; where it names a drafter by its source, or a chat template by its content, with the
    folder that has it."""
    name, _, value = item.partition("=")
    if templates is not None and name == f"--{template.FLAG}":
        return f"{name}={templates}/{value}"
    if drafter is None or name != "--speculative-config":
        return item
    config = {key: value for key, value in json.loads(value).items() if key != "revision"}
    return f"{name}={json.dumps({**config, 'model': drafter})}"


def _named(engine: Engine, args: Mapping[str, Scalar]) -> Iterable[tuple[str, Scalar]]:
    own_names = {engine.spelling.get(name, name) for name in GATEWAY_FLAGS}
    used_names: set[str] = set()
    for option, value in args.items():
        name = option.removeprefix("--").replace("_", "-")
        if name not in engine.flags:
            mistake = f"{engine.ref} has no flag {option[:80]!r}"
            likely = engine.spelling.get(name) or _OF_OTHERS.get(name)
            raise BadFlag(
                (
                    f"{mistake}; here it is {likely}."
                    if likely in engine.flags
                    else _unknown(mistake, name, engine.flags)
                ),
                param="args",
            )
        planned, name = engine.spelling.get(name, ""), engine.flags[name].same_as or name
        if engine.flags[name].ours and planned in engine.flags:
            # SGLang's flag of this name is for replicas, the planner's for groups of ranks.
            name = planned
        if engine.flags[name].ours or name in own_names:
            why, substitute = why_closed(name)
            raise BadFlag(
                f"The flag --{name} of {engine.ref} cannot be given: {why}.",
                hint=substitute,
                param="args",
            )
        if name in used_names:
            raise BadFlag(
                f"The flag --{name} is given twice, in two spellings.",
                hint="Give it once.",
                param="args",
            )
        used_names.add(name)
        yield name, value


def check_value(engine: Engine, name: str, flag: Flag, value: Scalar) -> Scalar:
    """The value in the flag's type. Raises BadFlag that says what the flag takes."""
    if isinstance(value, str):
        check_text(f"--{name}", value, param="args", lines=flag.type == "json")
    typed = _typed(flag, value)
    if typed is None:
        raise BadFlag(
            f"--{name} of {engine.ref} takes {_KINDS[flag.type]}, not {_quoted(value)}.",
            hint="Correct the value.",
            param="args",
        )
    if isinstance(typed, str):
        check_text(f"--{name}", typed, param="args")
    if flag.choices is not None and str(typed) not in flag.choices:
        near = _unknown(
            f"--{name} of {engine.ref} cannot be {_quoted(value)}", str(typed), flag.choices
        )
        raise BadFlag(near, hint=f"It is one of: {', '.join(flag.choices)}.", param="args")
    low, high = _RANGES.get(next(iter(canonical(engine, {name: typed}))), (-math.inf, math.inf))
    if isinstance(typed, int | float) and not low <= typed <= high:
        raise BadFlag(
            f"--{name} is {_quoted(value)}; it must be at least {low} and at most {high}.",
            hint="Correct the value.",
            param="args",
        )
    return typed


def check_text(name: str, value: str, *, param: str, lines: bool = False) -> None:
    """Raises BadFlag for what would forge lines in a log or a process listing, or cannot be passed
    to a process.

    `lines` allows line breaks and tabs, for JSON that is written anew anyway.
    """
    plain = value.translate(_WHITESPACE) if lines else value
    if not plain.isprintable() or len(value) > _MAX_VALUE:
        raise BadFlag(
            f"The value of {name} is too long or has characters that cannot be printed.",
            hint=f"Give a plain value of at most {_MAX_VALUE} characters.",
            param=param,
        )


def _quoted(value: Scalar) -> str:
    huge = isinstance(value, int) and abs(value) >= 2**64
    return "a huge number" if huge else repr(str(value)[:80])


_WHITESPACE = {ord(space): " " for space in "\n\r\t"}
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
            return None if isinstance(value, bool) else _number(flag, value)
        case "json":
            return _json(value) if isinstance(value, str) else None
        case _:
            return (
                None if isinstance(value, bool) or _quoted(value) == "a huge number" else str(value)
            )


def _number(flag: Flag, value: str | float) -> int | float | None:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number):
        return None
    if flag.type == "float":
        return number
    return int(number) if number.is_integer() and abs(number) < 2**53 else None


def _json(value: str) -> str | None:
    """The object or list written anew in one line of ASCII; NaN and Infinity are not JSON."""
    try:
        parsed = json.loads(value)
        return json.dumps(parsed, allow_nan=False) if isinstance(parsed, dict | list) else None
    except (ValueError, RecursionError):
        return None


def _unknown(subject: str, name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name[:80], list(names), n=1, cutoff=0.6)
    return f"{subject}; did you mean {near[0]}?" if near else f"{subject}."
