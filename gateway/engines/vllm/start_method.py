"""The start method of vLLM's processes: fork, unless a rule speaks against it. Pure.

A spawned process imports the engine again, 25 of 102 s of a start of Llama-8B (0.26.0, one H100;
by fork 63 s). The server sets `spawn` where VLLM_WORKER_MULTIPROC_METHOD is unset
(cli_env_setup), while the engine's own default is `fork` (vllm/envs.py). The engine takes `spawn`
by itself where CUDA is in use already, under WSL, in a Ray actor and with --numa-bind
(_maybe_force_spawn in vllm/utils/system_utils.py). Read in 0.18.0, 0.26.0 and 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.diagnosis.facts.scope import FORK
from gateway.domain import Choice, Engine, Scalar
from gateway.domain.choice import str_choice

VARIABLE, _METHOD = FORK
# Whisper hangs after a fork, and tensors in shared memory of torch want `spawn`:
# vllm/config/vllm.py of 0.26.0 and 0.32.0.
_SPAWN_ARCHITECTURES = ("WhisperForConditionalGeneration",)
_FLAGS: Mapping[str, tuple[Scalar, ...]] = {
    "mm-tensor-ipc": ("torch_shm",),
    "distributed-executor-backend": ("ray", "external_launcher"),
}


def start_method(
    engine: Engine, args: Mapping[str, Scalar], architecture: str
) -> dict[str, Choice[str]]:
    """The variable that lets processes of this engine be forked; empty: the engine decides.

    args: the arguments of the user. On a CPU vLLM always spawns: vllm/platforms/cpu.py of 0.32.0.
    """
    if (
        engine.device != "cuda"
        or VARIABLE not in engine.user_env
        or architecture in _SPAWN_ARCHITECTURES
        or any(name.startswith("numa-bind") for name in args)
        or any(args.get(name) in values for name, values in _FLAGS.items())
    ):
        return {}
    reason = "a forked process does not import the engine again"
    return {VARIABLE: str_choice(_METHOD, reason, f"profile {engine.ref}")}
