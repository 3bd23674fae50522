"""A start without the warm-ups of kernels that its model never calls. Pure.

vLLM 0.26.0 compiles router kernels for every model, from compute capability 9.0 on: 9 to 29 s of
each start, as nothing keeps them (tests/logs/healthy-*). They are those of four mixtures of
experts, named by a list of shapes (_LL_BF16_WARMUP_MODEL_SHAPES in kernel_warmup.py), and have
constants for rows and columns. Another mixture that has such a router (GateLinear in
gate_linear.py) compiles its own while CUDA graphs are captured. All others, such as Qwen3's, never
call one. vLLM has no switch for that. From 0.30.0 on it compiles the experts of the model. So a
small program empties the engine's list of shapes when the engine has read it, and starts the
engine. A version without the list starts as ever. Only forked processes inherit the empty list.
"""

from __future__ import annotations

import re

from gateway.domain import Choice, Engine, ModelSpec, Plan
from gateway.domain.choice import str_choice
from gateway.domain.engine import Warmup

VARIABLE = "FITSERVE_SKIP_WARMUP"
"""A variable of plans that names warm-ups. The engine does not get it."""
_MODULE = re.compile(r"[A-Za-z_][\w.]*")
_PROGRAM = """
import importlib.util, sys
PLACES = {places}
def empty(module):
    for place in PLACES:
        owner, _, name = place.partition(":")
        if owner == module.__name__ and isinstance(getattr(module, name, None), tuple):
            setattr(module, name, ())
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if not any(place.startswith(name + ":") for place in PLACES):
            return None
        sys.meta_path.remove(Finder)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, Finder)
        run = getattr(getattr(spec, "loader", None), "exec_module", None)
        if run is not None:
            def run_and_empty(module):
                run(module)
                empty(module)
            spec.loader.exec_module = run_and_empty
        return spec
sys.meta_path.insert(0, Finder)
for place in PLACES:
    if place.partition(":")[0] in sys.modules:
        empty(sys.modules[place.partition(":")[0]])
"""
_RUN = """
import runpy
runpy.run_module("{module}", run_name="__main__", alter_sys=True)
"""


def skipped_warmups(
    engine: Engine, capability: str | None, spec: ModelSpec, *, has_graphs: bool
) -> dict[str, Choice[str]]:
    """The variable that names the warm-ups which a model would run in vain; empty: there are none.

    capability: the compute capability of its GPUs; None: unknown.
    has_graphs: it captures CUDA graphs, and compiles its own kernels meanwhile.
    """
    names = ",".join(
        name
        for name, warmup in sorted(engine.expert_warmups.items())
        if capability
        and float(capability) >= float(warmup.min_capability)
        and _is_in_vain(warmup, spec, has_graphs=has_graphs)
    )
    if not names:
        return {}
    reason = (
        "a model without experts never calls these kernels"
        if spec.experts is None
        else f"these kernels are not those of a router of {spec.experts.count} experts from"
        f" {spec.hidden} values"
    )
    return {VARIABLE: str_choice(names, reason, f"profile {engine.ref}")}


def _is_in_vain(warmup: Warmup, spec: ModelSpec, *, has_graphs: bool) -> bool:
    # A guessed family may have experts under names that no reader knows.
    if spec.guessed:
        return False
    if spec.experts is None:
        return True
    router = (spec.hidden, spec.experts.count)
    return has_graphs and bool(warmup.routers) and router not in warmup.routers


def wrap_command(command: tuple[str, ...], engine: Engine, names: str) -> tuple[str, ...]:
    """The command, `PYTHON -m MODULE` or `PYTHON -c PROGRAM ...`, without the named warm-ups.

    names: the warm-ups that VARIABLE lists. A name that the profile lacks is ignored. Raises
    ValueError for another command.
    """
    places = tuple(
        warmup.shapes
        for name, warmup in sorted(engine.expert_warmups.items())
        if name in names.split(",")
    )
    if not places:
        return command
    python, option, program, *arguments = command
    if option == "-m" and _MODULE.fullmatch(program):
        program = _RUN.format(module=program)
    elif option != "-c":
        raise ValueError(f"{command} is not a Python program")
    return python, "-c", _PROGRAM.format(places=places) + program, *arguments


def drop_skips(plan: Plan) -> Plan:
    """The plan for a start without a gateway: the engine's plain command."""
    if VARIABLE not in plan.env:
        return plan
    return plan.evolve(env={name: value for name, value in plan.env.items() if name != VARIABLE})
