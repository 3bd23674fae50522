"""From choices to a command line: typed, allow-listed flags of one engine version, never a
shell."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from gateway.domain import Engine, Flag, NodeRanks, Plan, Scalar
from gateway.domain.record import FrozenRecord
from gateway.domain.value import served_name
from gateway.engines.common import engine_auth, expert_warmups, resources
from gateway.engines.common.chat import template
from gateway.engines.common.lora.adapter_flags import list_arguments
from gateway.engines.common.media_hosts_flag import host_arguments
from gateway.engines.common.open_flags import closing_reason
from gateway.engines.common.resources import OFFLOAD_FLAG
from gateway.engines.common.trace_flags import trace_arguments, trace_environment
from gateway.engines.registry import engine_kind
from gateway.errors import BadFlag, near_name
from gateway.variables import unprintable_value

# Only for types: a plan does without the classes of running engines.
if TYPE_CHECKING:
    from gateway.domain import LaunchSpec, Mount

_MAX_VALUE = 8192
# Flags that no user gives, by the planner's names, like all names here.
GATEWAY_FLAGS = ("model", "served-model-name", "host", "port")
# The KV cache of a vLLM in bytes, which spares it the measurement.
CACHE_BYTES = "kv-cache-memory-bytes"
# Flags for the memory of an engine, by the names of every kind.
MEMORY_FLAGS = ("gpu-memory-utilization", "mem-fraction-static", CACHE_BYTES, "max-total-tokens")
# Ranges of flags that the planner computes with; a value outside them would make a wrong plan.
_RANGES: dict[str, tuple[float, float]] = {
    "tensor-parallel-size": (1, 64),
    "pipeline-parallel-size": (1, 64),
    "data-parallel-size": (1, 64),
    "max-model-len": (1, 10**9),
    "max-num-seqs": (1, 10**6),
    "max-num-batched-tokens": (1, 10**9),
    "block-size": (1, 2**16),
    "max-total-tokens": (1, 10**9),
    "gpu-memory-utilization": (0.01, 1),
    CACHE_BYTES: (1, 2**50),
    OFFLOAD_FLAG: (0.01, 2**16),  # GiB
}

# Flag of another engine -> the planner's name of it, which is vLLM's.
_FOREIGN_SPELLINGS = {
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
        for name, value in _engine_flags(engine, args)
    }


def canonical(engine: Engine, args: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Checked flags by the planner's names, which are vLLM's, where the planner has one; the others
    keep the engine's."""
    names = {spelled_name: planned_name for planned_name, spelled_name in engine.spelling.items()}
    return {names.get(name, name): value for name, value in args.items()}


def spell_flags(engine: Engine, flags: Mapping[str, Scalar]) -> tuple[str, ...]:
    """The planner's flags and those of `canonical`, as this engine spells them. Flags that the
    engine does not have are left out.

    A switch that this engine has as a size (SGLang's --ep-size) is the tensor parallel size.
    """
    spelling = engine.spelling
    engine_flags = engine.flags
    own_names = {
        name: value
        for planned_name, value in flags.items()
        if (name := spelling.get(planned_name, planned_name)) in engine_flags
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
    return tuple([_argument(name, value) for name, value in flags.items()])


def _argument(name: str, value: Scalar) -> str:
    if value is True:
        return f"--{name}"
    return f"--no-{name}" if value is False else f"--{name}={value}"


class LaunchInputs(FrozenRecord, frozen=True):
    """The inputs of one start on a host. Paths are those that the engine sees.

    weights, drafter: model folders.
    templates: folder of chat templates.
    adapters: names and folders.
    environment: folder of the virtual environment; None: the engine runs in a container.
    allows_remote_code: code of the model's repository may run.
    cache_bytes: KV cache on each GPU of an engine that does not measure.
    copy_number: the number of this copy of a plan over several nodes.
    media_hosts: the only ones that the engine may fetch media from; (): any.
    is_exposed: other machines reach its port, so each path needs its key.
    trace_endpoint: the collector of its own traces; "": none.
    """

    weights: str
    mounts: tuple[Mount, ...] = ()
    environment: str | None = None
    drafter: str | None = None
    templates: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    allows_remote_code: bool = False
    cache_bytes: int | None = None
    copy_number: int = 0
    media_hosts: tuple[str, ...] = ()
    is_exposed: bool = False
    trace_endpoint: str = ""


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
    """The start of a plan's engine: on one host, or with the parts of several nodes."""
    from gateway.domain.running import LaunchSpec, NodeLaunch  # not before a start

    environment = inputs.environment
    # Inside a container the engine listens on its only address; as a process, only on loopback.
    listen = "0.0.0.0" if environment is None else "127.0.0.1"
    last: dict[str, Scalar] = {
        "model": inputs.weights,
        "served-model-name": served_name(model),
        "host": listen,
        "port": port,
    }
    env = _environment(plan, engine, inputs)
    nodes = tuple(
        NodeLaunch(
            node=node_ranks.node,
            argv=_command(plan, engine, inputs, last, node_ranks),
            env={**env, **node_ranks.env},
            gpus=node_ranks.gpus,
        )
        for node_ranks in (plan.nodes if plan.span > 1 else ())
        if node_ranks.copy_number == inputs.copy_number
    )
    return LaunchSpec(
        name=name,
        model=model,
        attempt=attempt,
        fingerprint=plan.fingerprint,
        engine=plan.engine,
        argv=nodes[0].argv if nodes else _command(plan, engine, inputs, last),
        env=nodes[0].env if nodes else env,
        gpus=nodes[0].gpus if nodes else plan.gpus,
        nodes=nodes,
        mounts=inputs.mounts,
        shm_bytes=resources.shm_bytes(plan),
        port=port,
        memory_bytes=resources.ram_limit_bytes(plan),
        pids=resources.process_limit(plan),
        scratch=engine.scratch if environment is None else None,
        cache=resources.compile_cache_name(plan, engine, remote_code=inputs.allows_remote_code),
        caches=engine.caches,
        forked_calls=engine_kind(plan.engine.kind).forked_calls,
        kernel_warmups=engine_kind(plan.engine.kind).kernel_warmups,
        kernel_builds=dict(engine_kind(plan.engine.kind).kernel_builds),
        key_env=engine.key_env,
        key_option=engine.key_option,
    )


def _environment(plan: Plan, engine: Engine, inputs: LaunchInputs) -> dict[str, str]:
    return {
        **engine.env,
        **trace_environment(engine, inputs.trace_endpoint),
        **expert_warmups.drop_skips(plan).env,
    }


def _command(
    plan: Plan,
    engine: Engine,
    inputs: LaunchInputs,
    last: Mapping[str, Scalar],
    node: NodeRanks | None = None,
) -> tuple[str, ...]:
    """The command line, on one of several nodes if `node` is given.

    A user may override the first flags. The gateway's own come last, and parsers take the last
    value, so no flag of a plan can replace them.
    """
    cache_bytes = inputs.cache_bytes
    return (
        _program(plan, engine, inputs, answers_requests=node is None or node.node_rank == 0)
        + quiet_flags(engine)
        + arguments({name: True for name in engine.api_switches if name in engine.flags})
        + tuple(
            _replace_paths(argument, inputs.drafter, inputs.templates) for argument in plan.argv
        )
        + (node.argv if node is not None else ())
        + (arguments({CACHE_BYTES: cache_bytes}) if cache_bytes is not None else ())
        + trace_arguments(engine, inputs.trace_endpoint)
        + host_arguments(engine, inputs.media_hosts, plan.argv)
        + list_arguments(engine, inputs.adapters)
        + arguments({engine.spelling.get(flag, flag): value for flag, value in last.items()})
    )


def _program(
    plan: Plan, engine: Engine, inputs: LaunchInputs, *, answers_requests: bool
) -> tuple[str, ...]:
    """The program and the words before its flags.

    answers_requests: the program has a server for requests.
    """
    environment = inputs.environment
    command = engine.container_command if environment is None else engine.process_command
    if not answers_requests:
        command = engine_kind(engine.kind).rank_command(command)
    elif engine_auth.needs_auth(plan.env) or (
        inputs.is_exposed and engine_auth.FLAG in engine.flags
    ):
        command = engine_auth.wrap_command(command, engine.key_env)
    skipped = plan.env.get(expert_warmups.VARIABLE, "")
    command = expert_warmups.wrap_command(command, engine, skipped)
    return tuple(part.replace("{env}", environment or "") for part in command)


def quiet_flags(engine: Engine) -> tuple[str, ...]:
    """The engine's `quiet`, where this version has that flag."""
    return (
        engine.quiet
        if engine.quiet and engine.quiet[0].partition("=")[0].removeprefix("--") in engine.flags
        else ()
    )


def _replace_paths(argument: str, drafter: str | None, templates: str | None) -> str:
    """The item; where it names a drafter by its source, or a chat template by its content, with the
    folder that has it."""
    name, _, value = argument.partition("=")
    if templates is not None and name == f"--{template.FLAG}":
        return f"{name}={templates}/{value}"
    if drafter is None or name != "--speculative-config":
        return argument
    config = {key: value for key, value in json.loads(value).items() if key != "revision"}
    return f"{name}={json.dumps({**config, 'model': drafter})}"


def _engine_flags(engine: Engine, args: Mapping[str, Scalar]) -> Iterable[tuple[str, Scalar]]:
    """The user's flags under the engine's own names. Raises BadFlag."""
    own_names = {engine.spelling.get(name, name) for name in GATEWAY_FLAGS}
    used_names: set[str] = set()
    for option, value in args.items():
        name = option.removeprefix("--").replace("_", "-")
        if name not in engine.flags:
            mistake = f"{engine.ref} has no flag {option[:80]!r}"
            likely = engine.spelling.get(name) or _FOREIGN_SPELLINGS.get(name)
            raise BadFlag(
                (
                    f"{mistake}; here it is {likely}."
                    if likely in engine.flags
                    else _suggest_name(mistake, name, engine.flags)
                ),
                param="args",
            )
        planned_name = engine.spelling.get(name, "")
        name = engine.flags[name].same_as or name
        if engine.flags[name].is_reserved and planned_name in engine.flags:
            # SGLang's flag of this name is for replicas, the planner's for groups of ranks.
            name = planned_name
        if engine.flags[name].is_reserved or name in own_names:
            reason, substitute = closing_reason(name)
            raise BadFlag(
                f"The flag --{name} of {engine.ref} cannot be given: {reason}.",
                hint=substitute or "Leave it out.",
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
    """The value in the flag's type. Raises BadFlag with the values that the flag takes."""
    if isinstance(value, str):
        check_text(f"--{name}", value, param="args", allows_lines=flag.type == "json")
    typed = _convert(flag, value, engine_kind(engine.kind).magnitudes)
    if typed is None:
        raise BadFlag(
            f"--{name} of {engine.ref} takes {_KINDS[flag.type]}, not {_quoted_value(value)}.",
            hint=f"Give {_KINDS[flag.type]}, or leave the flag out.",
            param="args",
        )
    if isinstance(typed, str):
        check_text(f"--{name}", typed, param="args")
    if flag.keys is not None:
        _check_keys(f"--{name} of {engine.ref}", json.loads(str(typed)), flag.keys)
    if flag.choices is not None and str(typed) not in flag.choices:
        suggestion = _suggest_name(
            f"--{name} of {engine.ref} cannot be {_quoted_value(value)}", str(typed), flag.choices
        )
        raise BadFlag(suggestion, hint=f"It is one of: {', '.join(flag.choices)}.", param="args")
    low, high = _RANGES.get(next(iter(canonical(engine, {name: typed}))), (-math.inf, math.inf))
    if isinstance(typed, int | float) and not low <= typed <= high:
        raise BadFlag(
            f"--{name} is {_quoted_value(value)}; it must be at least {low} and at most {high}.",
            hint="Give a value in this range, or leave the flag out.",
            param="args",
        )
    return typed


def _check_keys(flag: str, document: object, keys: Collection[str]) -> None:
    hint = f"It is an object of: {', '.join(keys)}."
    if not isinstance(document, dict):
        raise BadFlag(f"{flag} takes a JSON object, not a list.", hint=hint, param="args")
    if closed_keys := sorted(document.keys() - set(keys)):
        key = _quoted_value(closed_keys[0])
        mistake = f"{flag} cannot set {key}: only fields for longer contexts are open."
        raise BadFlag(mistake, hint=hint, param="args")


def check_text(name: str, value: str, *, param: str, allows_lines: bool = False) -> None:
    """Refuse a text that would forge lines in a log or a process listing, or that no process can be
    passed. Raises BadFlag.

    `allows_lines` allows line breaks and tabs, for JSON that is rewritten anyway.
    """
    plain_text = value.translate(_WHITESPACE) if allows_lines else value
    if not plain_text.isprintable() or len(value) > _MAX_VALUE:
        refusal = unprintable_value(name, _MAX_VALUE)
        raise BadFlag(refusal.message, hint=refusal.hint, param=param)


def _quoted_value(value: Scalar) -> str:
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


def _convert(flag: Flag, value: Scalar, magnitudes: Mapping[str, int]) -> Scalar | None:
    """The value in the flag's type, also from its text form; None when it has none."""
    match flag.type:
        case "bool":
            if isinstance(value, str):
                return {"true": True, "false": False, "": True}.get(value.lower())
            return value if isinstance(value, bool) else None
        case "int" | "float":
            return None if isinstance(value, bool) else _numeric_value(flag, value, magnitudes)
        case "json":
            return _json(value) if isinstance(value, str) else None
        case _:
            return (
                None
                if isinstance(value, bool) or _quoted_value(value) == "a huge number"
                else str(value)
            )


def _numeric_value(
    flag: Flag, value: str | float, magnitudes: Mapping[str, int]
) -> int | float | None:
    text = value.strip() if isinstance(value, str) else ""
    end = text.lstrip("0123456789.") if flag.type == "int" else ""
    factor = magnitudes.get(end, 1)
    try:
        number = factor * float(text.removesuffix(end) if factor > 1 else value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number):
        return None
    if flag.type == "float":
        return number
    whole_number = int(number) if factor > 1 or number.is_integer() else None
    return whole_number if whole_number is not None and abs(whole_number) < 2**53 else None


def _json(value: str) -> str | None:
    """The object or list in one line of ASCII; NaN and Infinity are not JSON."""
    try:
        parsed = json.loads(value)
        return json.dumps(parsed, allow_nan=False) if isinstance(parsed, dict | list) else None
    except (ValueError, RecursionError):
        return None


def _suggest_name(subject: str, name: str, names: Iterable[str]) -> str:
    suggestion = near_name(name[:80], names)
    return f"{subject}; did you mean {suggestion}?" if suggestion else f"{subject}."
