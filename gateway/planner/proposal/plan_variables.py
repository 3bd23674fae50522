"""The environment variables of a plan, each with its reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.diagnosis.facts.peers import P2P, P2P_SWITCH
from gateway.domain import Choice, Fact, str_choice
from gateway.engines.common import expert_warmups
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.engine_auth import DEV_MODE
from gateway.planner.sizes import Sizes
from gateway.variables import NO_PROXY


def engine_variables(
    candidate: Candidate, env: Mapping[str, str], link_failures: Mapping[str, Fact], sizes: Sizes
) -> dict[str, Choice[str]]:
    """The reason for each variable of the engine. `env`: the operator's variables, and those that
    the variant adds."""
    engine = candidate.engine
    wish_env = candidate.inputs.wish.env
    global_env = candidate.inputs.global_env
    variables_found = _start_method(candidate, sizes, env)
    if not sizes.batch.eager.value:
        variables_found |= candidate.rules.compile_variables(engine, env)
    for name, value in engine.eager_env.items() if sizes.batch.eager.value else ():
        variables_found[name] = str_choice(
            value, "needed without CUDA graphs", f"profile {engine.ref}"
        )
    if P2P in link_failures:
        variables_found[P2P_SWITCH[0]] = str_choice(
            P2P_SWITCH[1],
            f"the GPUs could not talk to each other: {link_failures[P2P].source}",
            "fact",
        )
    for name, value in env.items():
        if name == candidate.rules.stage_layers_env and candidate.variant.layers:
            reason, source = candidate.variant.reasons["layers"]
        elif wish_env.get(name) != value:
            reason, source = candidate.variant.reasons.get(
                "disabled", ("kernels that the engine is kept from", "planner")
            )
        elif global_env.get(name) == value:
            reason = "set for all engines"
            source = "FITSERVE_ENGINE_ENV"
        elif name in NO_PROXY:
            reason = "the engine asks itself over loopback, past the proxy"
            source = "planner"
        else:
            reason = "set by the user"
            source = "user"
        variables_found[name] = str_choice(value, reason, source)
    return variables_found


def _start_method(
    candidate: Candidate, sizes: Sizes, env: Mapping[str, str]
) -> dict[str, Choice[str]]:
    """The way in which the engine starts its processes, and the steps that its forks leave out. A
    failure of a fork here leaves that to the engine."""
    if next(candidate.inputs.facts.holding("fork_fails", sizes.scope), None) is not None:
        return {}
    chosen_variables = candidate.rules.start_method(
        candidate.engine, candidate.args, candidate.inputs.spec.architecture
    )
    choices = {name: choice for name, choice in chosen_variables.items() if name not in env}
    if choices and candidate.gpus:
        choices |= expert_warmups.skipped_warmups(
            candidate.engine,
            candidate.gpus[0].capability,
            candidate.inputs.spec,
            has_graphs=not sizes.batch.eager.value,
        )
    return choices


def sleep_variables(candidate: Candidate, mode: Choice[bool]) -> dict[str, Choice[str]]:
    name, value = DEV_MODE
    reason = "opens /sleep and /wake_up; each request to the engine then needs its key"
    return (
        {name: str_choice(value, reason, f"profile {candidate.engine.ref}")} if mode.value else {}
    )
