"""Conventions that every vLLM version shares. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Choice, Engine, Scalar
from gateway.domain.value import served_name
from gateway.engines.vllm import start_method


class VllmKind:
    """Implements EngineKind for vLLM."""

    env_prefixes: tuple[str, ...] = ("VLLM_",)
    stage_layers_env = "VLLM_PP_LAYER_PARTITION"

    # Source: get_diff_sampling_param in vllm/config/model.py, 0.18.0 to 0.33.0.
    limits_answers = True
    thoughts = "reasoning"
    classify_path = "/classify"
    # Source: DefaultModelLoader._prepare_weights (vllm/model_executor/model_loader/
    # default_loader.py:172 of 0.33.0).
    weights_prefix = "consolidated"

    def stage_remainder(self, stages: int, extra: int) -> range:
        """The stages before the last one. Source: get_pp_indices in vllm/distributed/utils.py."""
        return range(stages - 1 - extra, stages - 1)

    def ports(self, port: int, _groups: int, /) -> frozenset[int]:
        """On one machine groups talk through files, and take free ports: launch_core_engines in
        vllm/v1/engine/utils.py, get_open_ports_list in vllm/config/parallel.py."""
        return frozenset({port})

    def start_method(
        self, engine: Engine, args: Mapping[str, Scalar], architecture: str, /
    ) -> dict[str, Choice[str]]:
        """See start_method.py."""
        return start_method.start_method(engine, args, architecture)

    def adapter_slots(self, adapters: int) -> int:
        """As many slots as adapters."""
        return adapters

    def adapter_name(self, _model: str, adapter: str, /) -> str:
        """The adapter's own name."""
        return served_name(adapter)


class VllmCpuKind(VllmKind):
    """Implements EngineKind for vLLM built for CPUs, whose pipeline stages stay as split."""

    stage_layers_env = ""
