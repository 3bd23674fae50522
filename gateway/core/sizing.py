"""The sizes of a candidate: batch, memory budget, KV cache, context; and the Plan they make. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core import memory as mem
from gateway.core.command import arguments
from gateway.core.gates import Inputs, Refused
from gateway.core.parallel import available_bytes, peers_without_p2p
from gateway.domain import Choice, Engine, EngineRef, Fact, Gpu, ModelRef, Plan, Scalar
from gateway.errors import BadFlag

# A context that serves most chats and agents; among plans that all load, one that offers less ranks behind one that
# offers it. Only a preference: `min_context` is the user's hard limit.
COMFORTABLE_CONTEXT = 32768
# Free bytes left alone on each GPU: what other processes and the driver may take between our look and the start.
_HEADROOM = 256 * mem.MIB
_GIB = mem.GIB
_LEAST_KV = 16 * mem.MIB


@dataclass
class Sizing:
    """The sizes of one candidate: how much it takes, and how much context that leaves."""

    given: Inputs
    engine: Engine
    tp: int
    group: tuple[Gpu, ...]
    dtype: Choice[str]
    args: Mapping[str, Scalar]
    conservative: bool

    def plan(self, env: dict[str, str]) -> Plan:
        spec, engine, tp, dtype = self.given.spec, self.engine, self.tp, self.dtype.value
        eager = self._eager()
        seqs = self._sized("max-num-seqs", *self._default_seqs())
        batched = self._sized("max-num-batched-tokens", *self._default_batched())
        budget, flags, where = self._budget(batched.value, seqs.value)
        device_bytes = min((gpu.total_bytes or 0 for gpu in self.group), default=self.given.hardware.ram_total_bytes)
        size = mem.memory(
            spec,
            device=engine.device,
            device_bytes=device_bytes,
            budget_bytes=budget,
            tp=tp,
            dtype=dtype,
            batched_tokens=batched.value,
            seqs=seqs.value,
            graphs=not eager.value and engine.device == "cuda",
        )
        scope = {
            "engine": engine.ref,
            "model": f"{spec.source}@{spec.revision}" if spec.revision else spec.source,
            "device": f"{self.group[0].name} sm_{self.group[0].capability}"
            if self.group
            else f"cpu {self.given.hardware.arch}",
            "tensor_parallel": str(tp),
            "dtype": dtype,
            "budget": where,
        }
        used = size.weights_bytes + size.activation_bytes + size.overhead_bytes + size.graph_bytes
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
        own: dict[str, Scalar] = {"tensor-parallel-size": tp, "dtype": dtype, "max-model-len": context.value}
        own |= {"max-num-seqs": seqs.value, "max-num-batched-tokens": batched.value, **flags}
        own |= {"enforce-eager": True} if eager.value else {}
        reduce = self._all_reduce()
        own |= {} if reduce.value else {"disable-custom-all-reduce": True}
        return Plan(
            model=ModelRef(source=spec.source, revision=spec.revision, task=spec.task, vocab=spec.vocab),
            engine=EngineRef(kind=engine.kind, version=engine.version, image=engine.image),
            gpus=tuple(gpu.uuid for gpu in self.group),
            tensor_parallel=self._tp_choice(),
            pipeline_parallel=Choice[int](value=1, reason="one host", source="planner"),
            replicas=Choice[int](value=self.given.wish.replicas, reason="as asked for", source="user"),
            dtype=self.dtype,
            max_model_len=context,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            custom_all_reduce=reduce,
            enforce_eager=eager,
            memory=size,
            verdict="degraded" if self.conservative else "ok",
            argv=arguments({**{k: v for k, v in own.items() if k in engine.flags}, **self.args}),
            env={**(engine.eager_env if eager.value else {}), **env},
            scope=scope,
            warnings=tuple(warnings),
        )

    def _tp_choice(self) -> Choice[int]:
        if self.given.wish.tensor_parallel or "tensor-parallel-size" in self.args:
            return Choice[int](value=self.tp, reason="set by the user", source="user")
        if self.engine.device == "cpu":
            return Choice[int](value=1, reason="a CPU-only host", source="probe")
        if self.tp == 1:
            return Choice[int](value=1, reason="the model fits one GPU", source="memory model")
        heads = "/".join(str(group.heads) for group in self.given.spec.attention)
        return Choice[int](
            value=self.tp, reason=f"{heads} attention heads and the weights divide by {self.tp}", source="config.json"
        )

    def _sized(self, flag: str, default: int, reason: str, source: str) -> Choice[int]:
        if flag in self.args:
            return Choice[int](value=int(self.args[flag]), reason="set by the user", source="user")
        if self.conservative and flag == "max-num-seqs":
            return Choice[int](
                value=max(1, default // 8), reason="a smaller batch, because the plan with the usual one failed", source="fact"
            )
        return Choice[int](value=default, reason=reason, source=source)

    def _big(self, least_gib: int = 70) -> bool:
        name = self.group[0].name.lower() if self.group else ""
        large = bool(self.group) and (self.group[0].total_bytes or 0) >= least_gib * _GIB
        return large and "a100" not in name and "gb10" not in name

    def _default_seqs(self) -> tuple[int, str, str]:
        if self._big():
            return 1024, "the engine's default for GPUs of 70 GiB and more", "vllm/engine/arg_utils.py get_batch_defaults"
        return self.engine.default_seqs, "the engine's default", f"profile {self.engine.ref}"

    def _default_batched(self) -> tuple[int, str, str]:
        if all(group.kind == "encoder" for group in self.given.spec.attention):
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
        if self.conservative:
            return Choice[bool](value=True, reason="no graphs, because the plan with them failed", source="fact")
        return Choice[bool](value=False, reason="CUDA graphs are faster", source="planner")

    def _all_reduce(self) -> Choice[bool]:
        pair = peers_without_p2p(self.given.hardware, self.group)
        if pair is None:
            return Choice[bool](
                value=True,
                reason="one device" if self.tp == 1 else "every pair has NVLink or working peer-to-peer access",
                source="probe",
            )
        return Choice[bool](
            value=False,
            reason=f"GPUs {pair[0]} and {pair[1]} have neither NVLink nor proven peer-to-peer access",
            source="probe",
        )

    def _budget(self, batched: int, seqs: int) -> tuple[int, dict[str, Scalar], str]:
        """Bytes the engine may take per device, the flags that say so, and the same in words (also a fact's scope)."""
        if self.engine.device == "cpu":
            return self._cpu_budget(batched, seqs)
        total = min(gpu.total_bytes or 0 for gpu in self.group)
        if "gpu-memory-utilization" in self.args:
            share = float(self.args["gpu-memory-utilization"])
            return round(total * share), {}, f"utilization {share:.2f}, set by the user"
        usable = min(available_bytes(gpu, self.given.claims) for gpu in self.group) - _HEADROOM
        share = min(self.engine.default_utilization, max(0, usable * 100 // total) / 100)
        return round(total * share), {"gpu-memory-utilization": share}, f"utilization {share:.2f}"

    def _cpu_budget(self, batched: int, seqs: int) -> tuple[int, dict[str, Scalar], str]:
        """Weights and activations, and a KV cache for four requests of the wanted length, within half of the RAM."""
        spec, dtype = self.given.spec, self.dtype.value
        ram = self.given.hardware.ram_total_bytes
        fixed = mem.memory(
            spec,
            device="cpu",
            device_bytes=ram,
            budget_bytes=0,
            tp=1,
            dtype=dtype,
            batched_tokens=batched,
            seqs=seqs,
            graphs=False,
        )
        used = fixed.weights_bytes + fixed.activation_bytes + fixed.overhead_bytes
        context = min(self._limit(), max(COMFORTABLE_CONTEXT, self.given.wish.min_context or 0))
        wanted = 4 * mem.kv_bytes_for(spec, 1, dtype, context, batched, self.engine.block_size)
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
        spec, engine, limit = self.given.spec, self.engine, self._limit()
        warnings: list[str] = []
        fits = mem.largest_context(
            spec, self.tp, self.dtype.value, kv_bytes, batched, engine.block_size, max(limit, spec.max_position)
        )
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
