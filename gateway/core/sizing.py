"""The sizes of a candidate: batch, memory budget, KV cache, context; and the Plan they make. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gateway.core import memory as mem
from gateway.core.command import spelled
from gateway.core.conditions import Scheme, numbers
from gateway.core.gates import Found, Inputs
from gateway.core.kernels import described
from gateway.core.kv import Cache, cache
from gateway.core.layers import Body
from gateway.core.memory import Load
from gateway.core.parallel import available_bytes, peers_without_p2p
from gateway.core.pool import Pool, model_of
from gateway.core.sglang_memory import MemoryRules, StaticMemory, fraction_within, static_memory
from gateway.core.speculative import Speculation
from gateway.core.stages import stage
from gateway.core.ways import Refused, Way
from gateway.core.weights import weights_bytes
from gateway.domain import Choice, Engine, EngineRef, Fact, Gpu, Memory, ModelRef, Plan, Scalar
from gateway.errors import BadFlag

# A context that serves most chats and agents; among plans that all load, one that offers less ranks behind one that
# offers it. Only a preference: `min_context` is the user's hard limit.
COMFORTABLE_CONTEXT = 32768
# Free bytes left alone on each GPU: what other processes and the driver may take between our look and the start.
_HEADROOM = 256 * mem.MIB
_GIB = mem.GIB
_LEAST_KV = 16 * mem.MIB
# A trait of engine versions: CUDA graphs are counted within the memory budget, not captured beside it.
GRAPHS_IN_BUDGET = "graphs_in_budget"


@dataclass
class Sizing:
    """The sizes of one way: how much it takes, and how much context that leaves. `args` are the user's flags by
    canonical names."""

    given: Inputs
    engine: Engine
    body: Body
    way: Way
    group: tuple[Gpu, ...]
    dtype: Choice[str]
    args: Mapping[str, Scalar]
    speculation: Speculation
    pools: MemoryRules | None

    @property
    def block(self) -> int:
        return int(self.args.get("block-size", self.engine.block_size))

    @cached_property
    def stage(self) -> Body:
        """What one rank's stage has of the model; all of it without pipeline parallelism."""
        return stage(self.body, self.way.pp)

    @cached_property
    def cache(self) -> Cache | Pool:
        if self.pools is not None:
            item = 1 if self.way.kv_dtype.startswith("fp8") else mem.ITEM_BYTES[self.dtype.value]
            pool = Pool(self.pools, self.stage.attention, self.way.tp, item)
            if not pool.bytes_per_token and any(group.kind not in ("encoder", "vision") for group in pool.attention):
                raise Refused(
                    "unknown_memory",
                    "how this engine keeps the state of such layers is not known here",
                    f"profile {self.engine.ref}",
                )
            return pool
        kept = cache(
            (*self.stage.attention, *self.speculation.groups),
            self.way.tp,
            self.dtype.value,
            self.way.kv_dtype,
            self.block,
            frozenset(self.engine.traits),
            capability=self._capability,
        )
        if kept.refused:
            raise Refused("no_backend", f"one KV cache cannot hold its layers: {kept.refused}", f"profile {self.engine.ref}")
        return kept

    @property
    def _capability(self) -> tuple[int, int]:
        return numbers(self.group[0].capability or "") or (0, 0) if self.group else (0, 0)

    def _weights(self, found: Found) -> int:
        """Bytes of weights on one rank, padded as the chosen kernels pad. Raises Refused where the cut or a scheme is not known."""
        ranks = self.way.tp if self.way.ep else 1
        rows = {(row.layer, row.scheme): row.padded_to for row in found.kernels if row.padded_to}
        padded = {
            layer: rows[key]
            for layer in self.stage.linears
            if isinstance(layer.scheme, Scheme) and (key := (layer.name, described(layer.scheme))) in rows
        }
        traits, capability = frozenset(self.engine.traits), self.group[0].capability or "" if self.group else ""
        held = weights_bytes(self.stage, self.way.tp, self.dtype.value, traits, ranks, capability, padded)
        if held is None:
            raise Refused(
                "unsupported_quantization", "the size of its quantized weights is not known", f"profile {self.engine.ref}"
            )
        return held + self.speculation.weights_bytes

    def plan(self, env: dict[str, str], found: Found) -> Plan:
        """Raises Refused; `found.memory` is then what is missing."""
        spec, engine, way, dtype = self.given.spec, self.engine, self.way, self.dtype.value
        eager = self._eager()
        seqs = self._sized("max-num-seqs", *self._default_seqs())
        batched = self._sized("max-num-batched-tokens", *self._default_batched())
        load = Load(
            engine.device, way.tp, way.pp, dtype, batched.value, seqs.value, not eager.value and engine.device == "cuda"
        )
        self._held = self._weights(found)
        budget, flags, where = self._budget(load)
        size = found.memory = self._memory(load, budget)
        scope = {
            "engine": engine.ref,
            "model": f"{spec.source}@{spec.revision}" if spec.revision else spec.source,
            "device": f"{self.group[0].name} sm_{self.group[0].capability}"
            if self.group
            else f"cpu {self.given.hardware.arch}",
            "tensor_parallel": str(way.tp),
            "dtype": dtype,
            "budget": where,
        }
        scope |= {"pipeline_parallel": str(way.pp)} if way.pp > 1 else {}
        scope |= {"kv_cache_dtype": way.kv_dtype} if way.kv_dtype != "auto" else {}
        used = size.weights_bytes + size.activation_bytes + size.overhead_bytes
        used += size.graph_bytes if GRAPHS_IN_BUDGET in engine.traits else 0
        if used > budget:
            raise Refused(
                "no_memory",
                f"{_gib(used)} are needed beside the KV cache, and {_gib(budget)} are to be had ({where})",
                "memory model",
            )
        if engine.device == "cpu":
            # Never left out: without a size the engine takes nearly all memory, even for a model that keeps no cache.
            flags = {"kv-cache-memory-bytes": max(size.kv_bytes, _LEAST_KV)}
        context, warnings = self._context(size.kv_bytes, batched.value, scope)
        size = found.memory = size.evolve(
            full_requests=round(self.cache.requests(size.kv_bytes, context.value, batched.value), 2) if size.kv_bytes else 0.0
        )
        reduce = self._all_reduce()
        own: dict[str, Scalar] = {"tensor-parallel-size": way.tp, "dtype": dtype, "max-model-len": context.value}
        own |= {"pipeline-parallel-size": way.pp} if way.pp > 1 else {}
        own |= {"enable-expert-parallel": True} if way.ep else {}
        own |= {"max-num-seqs": seqs.value, "max-num-batched-tokens": batched.value, **flags}
        own |= {"kv-cache-dtype": way.kv_dtype} if way.kv_dtype != "auto" else {}
        own |= {"quantization": way.quantization} if way.quantization else {}
        own |= dict(way.backends)
        own |= {"speculative-config": json.dumps(self.speculation.config)} if self.speculation.config else {}
        own |= {"enforce-eager": True} if eager.value else {}
        own |= {} if reduce.value else {"disable-custom-all-reduce": True}
        warnings += self._warnings(found)
        return Plan(
            model=ModelRef(source=spec.source, revision=spec.revision, task=spec.task, vocab=spec.vocab),
            engine=EngineRef(kind=engine.kind, version=engine.version, image=engine.image),
            gpus=tuple(gpu.uuid for gpu in self.group),
            tensor_parallel=self._tp_choice(),
            pipeline_parallel=self._pp_choice(),
            expert_parallel=Choice[bool](
                value=way.ep,
                **self._why(
                    "ep", "enable-expert-parallel", "experts are cut like other layers" if spec.experts else "no experts"
                ),
            ),
            replicas=Choice[int](
                value=self.given.wish.replicas or 1,
                reason="as asked for" if self.given.wish.replicas else "one is what every other GPU is free of",
                source="user" if self.given.wish.replicas else "planner",
            ),
            dtype=self.dtype,
            quantization=self._quantization(),
            kv_cache_dtype=Choice[str](
                value=way.kv_dtype, **self._why("kv_dtype", "kv-cache-dtype", "the dtype of the activations")
            ),
            kernel_overrides=self._overrides(),
            speculation=self.speculation.method,
            num_speculative_tokens=self.speculation.tokens
            or Choice[int](value=0, reason=self.speculation.method.reason, source=self.speculation.method.source),
            drafter=self._drafter(),
            max_model_len=context,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            custom_all_reduce=reduce,
            enforce_eager=eager,
            kernels=found.kernels,
            attention=found.attention,
            memory=size,
            verdict="degraded" if self._degraded(found) else "ok",
            cost=way.cost,
            argv=spelled(engine, {**own, **self.args}),
            env={**(engine.eager_env if eager.value else {}), **env},
            scope=scope,
            warnings=tuple(warnings),
        )

    def _drafter(self) -> ModelRef | None:
        config = self.speculation.config
        if "model" not in config:
            return None
        return ModelRef(source=config["model"], revision=config.get("revision"), task="generate", vocab=self.given.spec.vocab)

    def _degraded(self, found: Found) -> bool:
        rows = found.kernels
        return self.way.careful or not self.body.known or any(row.status == "unknown" or row.note for row in rows)

    def _warnings(self, found: Found) -> list[str]:
        warnings = [f"{row.layer}: {row.note}." for row in found.kernels if row.note]
        warnings += self.speculation.warnings
        if unknown := [row.layer for row in found.kernels if row.status == "unknown"]:
            warnings.append(f"Which kernel computes {', '.join(unknown[:3])} is not known; the start will tell.")
        if unknown := sorted({row.kind for row in found.attention if row.status == "unknown"}):
            warnings.append(f"Which backend computes {', '.join(unknown)} attention is not known; the start will tell.")
        if not self.body.known:
            warnings.append(
                f"The family {self.given.spec.model_type} is not known here: sizes are those of its files, kernels are not predicted."
            )
        if self.body.assumed:
            warnings.append(f"{self.body.assumed[:1].upper()}{self.body.assumed[1:]}.")
        if self.way.quantization and self.given.spec.quant is None:
            warnings.append(f"The weights are quantized to {self.way.quantization} while they load, which costs some accuracy.")
        return warnings

    def _why(self, name: str, flag: str, plain: str) -> dict[str, str]:
        """Reason and source of what a way may change by `name`, and a user by `flag`."""
        reason, source = ("set by the user", "user") if flag in self.args else self.way.because.get(name, (plain, "planner"))
        return {"reason": reason, "source": source}

    def _quantization(self) -> Choice[str]:
        quant = self.given.spec.quant
        if "quantization" in self.args:
            return Choice[str](value=self.way.quantization, reason="set by the user", source="user")
        if self.way.quantization:
            reason, source = self.way.because["quantization"]
            return Choice[str](value=self.way.quantization, reason=reason, source=source)
        if quant is None:
            return Choice[str](value="none", reason="the weights are not quantized", source="config.json")
        return Choice[str](value=quant.method, reason="what the checkpoint says of itself", source="config.json")

    def _overrides(self) -> Choice[str]:
        """What keeps the engine from a kernel it would choose itself."""
        words = [f"without {name}" for name in self.way.disabled] + [f"--{flag}={value}" for flag, value in self.way.backends]
        reasons = [self.way.because[name] for name in ("disabled", "backends") if name in self.way.because]
        if not words:
            return Choice[str](value="none", reason="the engine's own choice of kernels is sound", source="planner")
        reason = "; ".join(reason for reason, _ in reasons) or "set by the user"
        return Choice[str](value=", ".join(words), reason=reason, source=reasons[0][1] if reasons else "user")

    def _memory(self, load: Load, budget: int) -> Memory:
        if self.pools is not None:
            return self._pooled(self.pools, load, budget)
        device_bytes = min((gpu.total_bytes or 0 for gpu in self.group), default=self.given.hardware.ram_total_bytes)
        return mem.memory(
            self.given.spec,
            self.stage,
            self.cache,
            load,
            weights_bytes=self._held,
            device_bytes=device_bytes,
            budget_bytes=budget,
            graphs_in_budget=GRAPHS_IN_BUDGET in self.engine.traits,
        )

    def _tp_choice(self) -> Choice[int]:
        if self.given.wish.tensor_parallel or "tensor-parallel-size" in self.args:
            return Choice[int](value=self.way.tp, reason="set by the user", source="user")
        if self.engine.device == "cpu":
            return Choice[int](value=1, reason="a CPU-only host", source="probe")
        if self.way.tp == 1:
            fits = "the model fits one GPU" if self.way.pp == 1 else "each stage fits one GPU"
            return Choice[int](value=1, reason=fits, source="memory model")
        heads = "/".join(str(group.heads) for group in self.body.attention if group.kind not in ("vision", "recurrent"))
        return Choice[int](
            value=self.way.tp, reason=f"{heads} attention heads and the weights divide by {self.way.tp}", source="config.json"
        )

    def _pp_choice(self) -> Choice[int]:
        return Choice[int](value=self.way.pp, **self._why("pp", "pipeline-parallel-size", "one stage is enough"))

    def _sized(self, flag: str, default: int, reason: str, source: str) -> Choice[int]:
        if flag in self.args:
            return Choice[int](value=int(self.args[flag]), reason="set by the user", source="user")
        if self.way.careful and flag == "max-num-seqs":
            return Choice[int](
                value=max(1, default // 8), reason="a smaller batch, because the plan with the usual one failed", source="fact"
            )
        return Choice[int](value=default, reason=reason, source=source)

    def _big(self, least_gib: int = 70) -> bool:
        name = self.group[0].name.lower() if self.group else ""
        large = bool(self.group) and (self.group[0].total_bytes or 0) >= least_gib * _GIB
        return large and "a100" not in name and "gb10" not in name

    def _default_seqs(self) -> tuple[int, str, str]:
        if self._big() and self.pools is None:
            return 1024, "the engine's default for GPUs of 70 GiB and more", "vllm/engine/arg_utils.py get_batch_defaults"
        return self.engine.default_seqs, "the engine's default", f"profile {self.engine.ref}"

    def _default_batched(self) -> tuple[int, str, str]:
        if self.pools is not None:
            total = min(gpu.total_bytes or 0 for gpu in self.group)
            chosen = static_memory(self.pools, total / mem.MIB, model_of(self.given.spec), tp=self.way.tp)
            return chosen.chunked_prefill, "the engine's default for GPUs of this size", f"profile {self.engine.ref}"
        if all(group.kind in ("encoder", "vision") for group in self.body.attention):
            longest = self.given.wish.max_context or self.given.spec.max_position
            return (
                max(self.engine.default_batched_tokens, longest),
                "an encoder reads a whole input at once",
                "vllm/config/scheduler.py",
            )
        if self._big(160):
            return 16384, "the engine's default for GPUs of 160 GiB and more", "vllm/engine/arg_utils.py get_batch_defaults"
        if self._big():
            return 8192, "the engine's default for GPUs of 70 GiB and more", "vllm/engine/arg_utils.py get_batch_defaults"
        return self.engine.default_batched_tokens, "the engine's default", f"profile {self.engine.ref}"

    def _eager(self) -> Choice[bool]:
        if "enforce-eager" in self.args:
            return Choice[bool](value=bool(self.args["enforce-eager"]), reason="set by the user", source="user")
        if self.engine.device == "cpu":
            return Choice[bool](
                value=True, reason="compiling for the CPU costs minutes at every start", source=f"profile {self.engine.ref}"
            )
        if self.way.careful:
            return Choice[bool](value=True, reason="no graphs, because the plan with them failed", source="fact")
        return Choice[bool](value=False, reason="CUDA graphs are faster", source="planner")

    def _all_reduce(self) -> Choice[bool]:
        pair = peers_without_p2p(self.given.hardware, self.group)
        if pair is None:
            return Choice[bool](
                value=True,
                reason="one device" if self.way.tp == 1 else "every pair has NVLink or working peer-to-peer access",
                source="probe",
            )
        return Choice[bool](
            value=False,
            reason=f"GPUs {pair[0]} and {pair[1]} have neither NVLink nor proven peer-to-peer access",
            source="probe",
        )

    def _budget(self, load: Load) -> tuple[int, dict[str, Scalar], str]:
        """Bytes the engine may take per device, the flags that say so, and the same in words (also a fact's scope)."""
        if self.engine.device == "cpu":
            return self._cpu_budget(load)
        if self.pools is not None:
            return self._pool_budget(self.pools, load)
        total = min(gpu.total_bytes or 0 for gpu in self.group)
        if "gpu-memory-utilization" in self.args:
            share = float(self.args["gpu-memory-utilization"])
            return round(total * share), {}, f"utilization {share:.2f}, set by the user"
        usable = min(available_bytes(gpu, self.given.claims) for gpu in self.group) - _HEADROOM
        share = min(self.engine.default_utilization, max(0, usable * 100 // total) / 100)
        return round(total * share), {"gpu-memory-utilization": share}, f"utilization {share:.2f}"

    def _static(self, pools: MemoryRules, load: Load) -> StaticMemory:
        """What SGLang itself would choose on these GPUs."""
        total = min(gpu.total_bytes or 0 for gpu in self.group)
        model = model_of(self.given.spec)
        sizes: dict[str, Any] = {
            "tp": self.way.tp,
            "pp": self.way.pp,
            "seqs": load.seqs,
            "chunked_prefill": load.batched_tokens,
        }
        return static_memory(pools, total / mem.MIB, model, **sizes, eager=not load.graphs)

    def _pooled(self, pools: MemoryRules, load: Load, budget: int) -> Memory:
        """SGLang takes a share for weights and pools, and leaves what it reserves to everything else."""
        total = min(gpu.total_bytes or 0 for gpu in self.group)
        reserved = round(self._static(pools, load).reserved_mib * mem.MIB)
        kv = max(0, budget - reserved - self._held)
        per_token = self.cache.bytes_per_token
        return Memory(
            gpu_bytes=total,
            budget_bytes=budget,
            weights_bytes=self._held,
            activation_bytes=reserved,
            graph_bytes=0,
            overhead_bytes=0,
            kv_bytes=kv,
            kv_bytes_per_token=per_token,
            kv_tokens=kv // per_token if per_token else 0,
            low=self._held + reserved // 2,
            high=self._held + self._held // 50 + reserved,
        )

    def _pool_budget(self, pools: MemoryRules, load: Load) -> tuple[int, dict[str, Scalar], str]:
        total = min(gpu.total_bytes or 0 for gpu in self.group)
        static = self._static(pools, load)
        if "gpu-memory-utilization" in self.args:
            fraction = float(self.args["gpu-memory-utilization"])
        else:
            usable = min(available_bytes(gpu, self.given.claims) for gpu in self.group) - _HEADROOM
            fraction = fraction_within(static, usable, total)
        budget = int(total * fraction) + round(static.reserved_mib * mem.MIB)
        return budget, {"gpu-memory-utilization": fraction}, f"static fraction {fraction:.3f}"

    def _cpu_budget(self, load: Load) -> tuple[int, dict[str, Scalar], str]:
        """Weights and activations, and a KV cache for four requests of the wanted length, within half of the RAM."""
        ram = self.given.hardware.ram_total_bytes
        fixed = self._memory(load, 0)
        used = fixed.weights_bytes + fixed.activation_bytes + fixed.overhead_bytes
        context = min(self._limit(), max(COMFORTABLE_CONTEXT, self.given.wish.min_context or 0))
        wanted = 4 * self.cache.bytes_for(context, load.batched_tokens)
        if "kv-cache-memory-bytes" in self.args:
            kv = int(self.args["kv-cache-memory-bytes"])
        elif space := self.given.wish.env.get("VLLM_CPU_KVCACHE_SPACE"):
            if not space.isdecimal():
                raise BadFlag(
                    f"VLLM_CPU_KVCACHE_SPACE is {space[:40]!r}; it is a whole number of GiB.", hint="Correct it.", param="env"
                )
            kv = int(space[:6]) * _GIB
        else:
            kv = _coarse(min(max(wanted, _GIB // 4), ram // 2 - used)) if wanted else 0
        return used + kv, {}, f"{_gib(kv)} of KV cache"

    def _limit(self) -> int:
        return min(self.given.spec.max_position, self.given.wish.max_context or self.given.spec.max_position)

    def _context(self, kv_bytes: int, batched: int, scope: dict[str, str]) -> tuple[Choice[int], list[str]]:
        spec, limit = self.given.spec, self._limit()
        warnings: list[str] = []
        fits = self.cache.largest(kv_bytes, batched, max(limit, spec.max_position))
        source = "memory model"
        reason = (
            f"the model's own limit is {spec.max_position}" if limit == spec.max_position else "the most that was asked for"
        )
        for fact in self.given.facts:
            if fact.kind == "max_context" and fact.value is not None and fact.value < fits and _holds(fact, scope):
                fits, source = fact.value, f"fact: {fact.source}"
        if "max-model-len" in self.args:
            asked = int(self.args["max-model-len"])
            if asked > fits:
                raise Refused("no_memory", f"--max-model-len {asked} was set, and the KV cache holds {fits} tokens", source)
            return Choice[int](value=asked, reason="set by the user", source="user"), warnings
        context = min(limit, fits)
        if context < (self.given.wish.min_context or 1):
            wanted = self.given.wish.min_context or 1
            raise Refused("no_memory", f"a context of {wanted} tokens was asked for, and {context} fit", source)
        if fits < limit:
            if source == "memory model":
                reason = f"the largest that fits into {_gib(kv_bytes)} of KV cache"
            else:
                reason = "the largest that the engine itself said fits"
            warnings.append(f"The context is {context} tokens; the model could do {limit} with more memory.")
        return Choice[int](value=context, reason=reason, source=source if fits < limit else "config.json"), warnings


def _holds(fact: Fact, scope: Mapping[str, str]) -> bool:
    return all(scope.get(key) == value for key, value in fact.scope.items())


def _coarse(count: int) -> int:
    """Down to a quarter of a GiB: a machine's RAM reads a little different after each boot, and facts must go on to hold."""
    return max(0, count // (_GIB // 4)) * (_GIB // 4)


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"
