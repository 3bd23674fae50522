"""A variant that passed the gates, before it is sized: what one rank holds and keeps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from gateway.core.layers.built_model import BuiltModel, stage
from gateway.core.layers.weights import weights_bytes
from gateway.core.memory.sglang_kv_cache import TokenPool, whole
from gateway.core.memory.sglang_memory import MemoryRules
from gateway.core.memory.vllm_kv_cache import ITEM_BYTES, Cache, cache, stored_dtype
from gateway.core.model.rank import Rank
from gateway.core.model.scheme import Scheme
from gateway.core.planner.evidence import Evidence
from gateway.core.planner.layer_kernels import described
from gateway.core.planner.planning_input import PlanningInput
from gateway.core.planner.refusal import Refused
from gateway.core.planner.variants import Variant
from gateway.core.speculative.speculative import Speculation
from gateway.domain import Choice, Engine, Gpu, Scalar


@dataclass
class Candidate:
    """`args` are the user's flags by canonical names; `found` has the kernels and backends of its layers. `pools`: SGLang's rules."""

    given: PlanningInput
    engine: Engine
    built: BuiltModel
    variant: Variant
    group: tuple[Gpu, ...]
    dtype: Choice[str]
    args: Mapping[str, Scalar]
    speculation: Speculation
    pools: MemoryRules | None
    found: Evidence

    @property
    def source(self) -> str:
        return f"profile {self.engine.ref}"

    @cached_property
    def rank(self) -> Rank:
        return self.variant.rank(self.dtype.value, self.group[0].capability if self.group else None)

    @cached_property
    def gpu_bytes(self) -> int:
        """What the smallest device has."""
        return min((gpu.total_bytes or 0 for gpu in self.group), default=self.given.hardware.ram_total_bytes)

    @cached_property
    def scope(self) -> dict[str, str]:
        """What a fact about its sizes is about, but for the budget."""
        spec, variant, group = self.given.spec, self.variant, self.group
        scope = {
            "engine": self.engine.ref,
            "model": f"{spec.source}@{spec.revision}" if spec.revision else spec.source,
            "device": f"{group[0].name} sm_{group[0].capability}" if group else f"cpu {self.given.hardware.arch}",
            "tensor_parallel": str(variant.tp),
            "pipeline_parallel": str(variant.pp),
            "dtype": self.dtype.value,
            "kv_cache_dtype": variant.kv_dtype,
            "quantization": variant.quantization or "as stored",
        }
        return scope | ({"capability": group[0].capability} if group and group[0].capability else {})

    @cached_property
    def stage(self) -> BuiltModel:
        """What one rank's stage has of the model; all of it without pipeline parallelism."""
        return stage(self.built, self.variant.pp)

    @cached_property
    def weights(self) -> int:
        """Bytes of weights on one rank, padded as the chosen kernels pad. Raises Refused where the cut or a scheme is not known."""
        rows = {(row.layer, row.scheme): row.padded_to for row in self.found.kernels if row.padded_to}
        padded = {
            layer: rows[key]
            for layer in self.stage.linears
            if isinstance(layer.scheme, Scheme) and (key := (layer.name, described(layer.scheme))) in rows
        }
        traits = frozenset(self.engine.traits)
        held = weights_bytes(self.stage, self.rank, traits, padded)
        if held is None:
            raise Refused("unsupported_quantization", "the size of its quantized weights is not known", self.source)
        return held + self.speculation.weights_bytes

    @cached_property
    def cache(self) -> Cache | TokenPool:
        """Raises Refused for layers that one cache cannot hold, or whose states these rules do not know."""
        if self.pools is not None:
            return self._pool(self.pools)
        prefixes = self.args.get("enable-prefix-caching")
        kept = cache(
            (*self.stage.attention, *self.speculation.groups),
            replace(self.rank, kv_dtype=self._stored()),
            self._block(),
            frozenset(self.engine.traits),
            prefixes=None if prefixes is None else bool(prefixes),
        )
        if kept.refused:
            raise Refused("no_backend", f"one KV cache cannot hold its layers: {kept.refused}", self.source)
        return kept

    def _pool(self, rules: MemoryRules) -> TokenPool:
        item = 1 if self.variant.kv_dtype.startswith("fp8") else ITEM_BYTES[self.dtype.value]
        windows = self.given.spec.architecture in rules.hybrid_swa and not self.args.get("disable-hybrid-swa-memory")
        attention = self.stage.attention if windows else whole(self.stage.attention)
        pool = TokenPool(
            rules, attention, self.variant.tp, item, max((row.block or 1 for row in self.found.attention), default=1)
        )
        if not pool.bytes_per_token and any(group.kind not in ("encoder", "vision") for group in pool.attention):
            raise Refused("unknown_memory", "how this engine keeps the state of such layers is not known here", self.source)
        return pool

    def _block(self) -> int:
        """Tokens of a block: the user's, or the least that the engine and every backend take. update_block_size_for_backend in
        vllm/platforms/interface.py."""
        if "block-size" in self.args:
            return int(self.args["block-size"])
        return max((row.block or 0 for row in self.found.attention), default=0) or self.engine.block_size

    def _stored(self) -> str:
        latent = next((row.backend for row in self.found.attention if row.kind == "mla" and row.backend), "")
        return stored_dtype(self.variant.kv_dtype, latent)
