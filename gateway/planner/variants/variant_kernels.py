"""The choice of kernels and attention backends for the variants of one engine version. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from gateway.domain import AttentionGroup, Engine, LayerAttention, LayerKernel, Scalar
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.kernels.linear import disabling
from gateway.engines.common.layers.built_model import BuiltModel
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.rules.variable_effects import rule_variables
from gateway.engines.common.variant import Variant
from gateway.models.rank import Rank
from gateway.planner.gates.kernel_gates import refused_before
from gateway.planner.layer_kernels import ObservedRefusals, layer_kernels
from gateway.planner.variants.shared_layouts import SharedLayouts


class VariantKernels:
    """The kernels and backends that an engine version chooses, kept for all variants.

    env: the environment of the engine.
    canonical: the user's flags by the planner's names.
    """

    def __init__(
        self,
        inputs: PlanningInput,
        engine: Engine,
        rules: EngineRules,
        canonical: Mapping[str, Scalar],
        env: dict[str, str],
        layouts: SharedLayouts,
    ) -> None:
        self.inputs = inputs
        self.engine = engine
        self.rules = rules
        self.canonical = canonical
        self.env = env
        self.layouts = layouts
        self._refused_kernels: dict[str, ObservedRefusals] = {}
        self._backends: dict[Hashable, tuple[LayerAttention, ...]] = {}
        self._kernel_rows: dict[Hashable, tuple[LayerKernel, ...]] = {}

    def kernels(
        self, built_model: BuiltModel, rank: Rank, variant: Variant
    ) -> tuple[LayerKernel, ...]:
        """The kernel of every linear layer, on one rank."""
        # The layers are one object for all variants that load the weights alike.
        key = built_model, rank.computing, variant.quantization, variant.disabled, variant.backends
        if key not in self._kernel_rows:
            self._kernel_rows[key] = self._choose_kernels(built_model, rank, variant)
        return self._kernel_rows[key]

    def _choose_kernels(
        self, built_model: BuiltModel, rank: Rank, variant: Variant
    ) -> tuple[LayerKernel, ...]:
        spec = self.inputs.spec
        capability = rank.capability
        if capability not in self._refused_kernels:
            self._refused_kernels[capability] = refused_before(
                self.inputs.facts, self.engine, capability
            )
        user_disabled = self.env.get(self.rules.disabled_kernels_env, "").split(",")
        disabled = (*user_disabled, *variant.disabled)
        return layer_kernels(
            built_model.linears,
            self.rules,
            rank.computing,
            variant.backend("linear-backend"),
            experts=self.layouts.experts(
                is_online=bool(variant.quantization and spec.quant is None)
            ),
            moe_backend=variant.backend("moe-backend"),
            variables=rule_variables(self.env) | disabling(disabled),
            refusals=self._refused_kernels[capability],
        )

    def attention(
        self,
        groups: tuple[AttentionGroup, ...],
        rank: Rank,
        variant: Variant,
        gpu_bytes: int,
        *,
        has_drafter: bool = False,
    ) -> tuple[LayerAttention, ...]:
        """The backend of attention layers, on one rank.

        has_drafter: the layers are those that draft.
        """
        if not rank.capability:
            return ()
        key = (
            groups,
            rank.tp,
            rank.dtype,
            rank.kv_dtype,
            rank.capability,
            variant.backends,
            gpu_bytes,
            has_drafter,
        )
        if key not in self._backends:
            spec = self.inputs.spec
            args = {**dict(variant.backends), **self.canonical}
            if has_drafter:
                rows = self.rules.drafter_attention(groups, rank, spec, self.inputs.drafter, args)
            else:
                rows = self.rules.layer_attention(groups, rank, spec, args, gpu_bytes)
            self._backends[key] = rows
        return self._backends[key]
