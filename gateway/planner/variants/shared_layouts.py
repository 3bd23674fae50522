"""Layers and groups of GPUs that all engine versions share in a search. Pure."""

from __future__ import annotations

from gateway.engines.common.layers.build import build, set_method
from gateway.engines.common.layers.built_model import BuiltModel
from gateway.engines.common.planning_input import PlanningInput
from gateway.models.experts import ExpertTraits, expert_traits
from gateway.planner.parallel import GpuGroups


class SharedLayouts:
    """Layers of the model and groups of GPUs, computed once for all engine versions."""

    def __init__(self, inputs: PlanningInput) -> None:
        self.inputs = inputs
        self.groups = GpuGroups(inputs.hardware, inputs.promised_bytes)
        self._built_models: dict[tuple[frozenset[str], str], BuiltModel] = {}
        self._experts: dict[bool, ExpertTraits | None] = {}

    def experts(self, *, is_online: bool) -> ExpertTraits | None:
        """The experts by the model's config. is_online: weights are quantized while they load."""
        if is_online not in self._experts:
            self._experts[is_online] = expert_traits(self.inputs.spec, is_online=is_online)
        return self._experts[is_online]

    def build_layers(self, traits: frozenset[str], quantization: str) -> BuiltModel:
        """The layers that engines with these traits build of the model.

        quantization: applied to the weights while they load; "": none. Raises BadModel.
        """
        key = traits, quantization
        if key not in self._built_models:
            self._built_models[key] = build(set_method(self.inputs.spec, quantization), traits)
        return self._built_models[key]
