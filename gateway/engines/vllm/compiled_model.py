"""The form in which vLLM keeps a compiled model for its next starts. Pure.

vLLM 0.26.0 keeps the traced graph and, elsewhere, the compiled parts of it. A start reads the
graph, splits it, and looks up each part: 3.2 s of 14 for an 8B on one H200. One piece is read in
less than a second (VLLM_USE_MEGA_AOT_ARTIFACT; use_mega_aot_artifact in vllm/envs.py). That needs
torch 2.10 (InductorStandaloneAdaptor in vllm/compilation/compiler_interface.py), and is the
engine's default from torch 2.12 on. Where the piece cannot be read, vLLM compiles the model again.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Choice, Engine
from gateway.domain.choice import str_choice

TRAIT = "one_compiled_piece"
VARIABLE = "VLLM_USE_MEGA_AOT_ARTIFACT"
# Variables of the user that choose another form, and make VARIABLE an error or useless.
_OTHER_FORMS = (
    "VLLM_USE_STANDALONE_COMPILE",
    "VLLM_USE_AOT_COMPILE",
    "VLLM_DISABLE_COMPILE_CACHE",
)


def compile_variables(engine: Engine, env: Mapping[str, str]) -> dict[str, Choice[str]]:
    """The variable that keeps the compiled model in one piece; empty: the engine decides.

    env: the variables of the user.
    """
    if TRAIT not in engine.traits or any(name in env for name in (VARIABLE, *_OTHER_FORMS)):
        return {}
    return {VARIABLE: str_choice("1", "the next start reads it faster", f"profile {engine.ref}")}
