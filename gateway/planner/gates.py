"""Gates that a variant passes before its sizes: trust, architecture, driver, GPUs, dtype. Pure.

The first gate that refuses decides the verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.diagnosis.facts.peers import NCCL, failing_links
from gateway.domain import (
    Choice,
    Engine,
    Fact,
    Gpu,
    LayerKernel,
    ModelSpec,
    Scalar,
    str_choice,
)
from gateway.domain.release import release
from gateway.domain.units import gib
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.chat import template
from gateway.engines.common.kernels.compiled import capabilities, runs
from gateway.engines.common.layers.built_model import BuiltModel
from gateway.engines.common.layers.stages import unshared
from gateway.engines.common.lora.adapter_flags import LIST_FLAGS, supported_rank
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.refusal import Refused, VariantEvidence
from gateway.engines.common.variant import Variant
from gateway.models.spec import TOKENIZER_CODE
from gateway.planner.layer_kernels import ObservedRefusals
from gateway.planner.parallel import GpuGroups, tower_cut
from gateway.planner.quantization_methods import check, resolve

# KV cache dtypes without rules of backends: their size follows from the name.
_SIZED = ("auto", "bfloat16", "bf16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")

# Flags that keep a vision tower whole on every rank: vllm/config/multimodal.py, ServerArgs of
# SGLang.
_WHOLE_TOWER: dict[str, str | bool] = {"mm-encoder-tp-mode": "data", "mm-enable-dp-encoder": True}

# The trait of engines that refuse ranks with unlike free memory: _check_tp_memory_balance in
# srt/distributed/bootstrap.py of SGLang 0.5.23, init_torch_distributed in model_runner.py before.
UNBALANCED = "balanced_ranks"

# Tensors that belong to quantized layers of every format.
_PACKED = (
    ".qweight",
    ".qzeros",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
)


def gate_model(inputs: PlanningInput, engine: Engine, rules: EngineRules) -> None:
    spec = inputs.spec
    # A reader of the family describes a class of the engine's own, not that of transformers.
    described = bool(spec.structure or spec.guessed)
    builds = rules.builds(spec.architecture, engine) or (
        described and spec.architecture in engine.stand_ins and stands_in(spec, engine)
    )
    if engine.architectures and not builds:
        reason = f"{engine.ref} does not know {spec.architecture}"
        if stands_in(spec, engine):
            reason = (
                f"{engine.ref} has no class of its own for {spec.architecture}, and whether it"
                " serves that of transformers is unknown: `fitserve plan --check` asks the engine"
                " where it is installed"
            )
        raise Refused("unsupported_architecture", reason, f"profile {engine.ref}")
    if not inputs.wish.policy.allow_remote_code and (foreign_code := _foreign(spec, engine)):
        reason = (
            f"{engine.ref} would need code of the repository ({', '.join(spec.remote_code[:5])}):"
            f" it has no {foreign_code} of its own"
        )
        raise Refused("untrusted_code", reason, "policy.allow_remote_code")
    if inputs.template.digest and template.FLAG not in engine.flags:
        raise Refused(
            "bad_flag",
            f"{engine.ref} takes no chat template but the model's own",
            f"profile {engine.ref}",
        )
    gate_adapters(inputs, engine)
    unfit = (
        {group.head_dim for group in spec.attention} - set(engine.head_dims)
        if engine.head_dims
        else set()
    )
    if unfit:
        raise Refused(
            "no_backend",
            f"no attention of {engine.ref} computes heads of size {min(unfit)}",
            f"profile {engine.ref}",
        )


def gate_adapters(inputs: PlanningInput, engine: Engine) -> None:
    """Refuse adapters of a rank, or beside a model, that the engine does not take.

    Support for the architecture is known by the engine's own code, which is asked later.
    """
    if not inputs.adapters:
        return
    source = f"profile {engine.ref}"
    if "enable-lora" not in engine.flags or not LIST_FLAGS.keys() & engine.flags.keys():
        raise Refused("unsupported_lora", f"{engine.ref} serves no adapters", source)
    if inputs.spec.architecture in engine.no_lora:
        reason = f"{engine.ref} has no adapters for {inputs.spec.architecture}"
        raise Refused("unsupported_lora", reason, engine.sources.get("no_lora", source))
    if supported_rank(engine, inputs.adapters) is None:
        highest = max(inputs.adapters, key=lambda adapter: adapter.rank)
        most = max(map(int, engine.flags["max-lora-rank"].choices or ("0",)))
        reason = (
            f"the adapter {highest.name} has rank {highest.rank}, and {engine.ref} takes at most"
            f" {most}"
        )
        raise Refused("unsupported_lora", reason, source)
    if inputs.spec.experts:
        # vLLM wraps experts whether an adapter changes them or not, and refuses those whose kernel
        # has no LoRA (lora/layers/fused_moe.py).
        reason = (
            f"with which kernels {engine.ref} computes the experts of a model that has adapters is"
            " not known here"
        )
        raise Refused("unsupported_lora", reason, "vllm/lora/layers/fused_moe.py")
    if not inputs.spec.generates:
        raise Refused(
            "unsupported_lora",
            "adapters of a model that does not generate are not served here",
            "planner",
        )


def stands_in(spec: ModelSpec, engine: Engine) -> bool:
    """Whether the engine would try transformers' class of an architecture that it lacks, and none
    of the repository's: _try_resolve_transformers
    in vllm/model_executor/models/registry.py."""
    own_classes = (
        "TransformersForCausalLM" in engine.architectures
        and spec.model_type in engine.config_classes
    )
    return own_classes and not spec.remote_code


def _foreign(spec: ModelSpec, engine: Engine) -> str:
    """The part of the engine that the repository's code would replace; "": none.

    Untrusted code never runs. The class of the model is the engine's, as its architecture is
    listed. Source: HFConfigParser in vllm/transformers_utils/config.py, and from_pretrained of
    AutoConfig and AutoTokenizer, which prefer a class that they have.
    """
    if not spec.remote_code:
        return ""
    if not engine.architectures:
        return "known class for this model"
    if spec.model_type not in engine.config_classes:
        return f"configuration class for {spec.model_type}"
    if TOKENIZER_CODE in spec.remote_code and spec.model_type not in engine.tokenizers:
        return f"tokenizer for {spec.model_type}"
    return ""


def gate_kv(spec: ModelSpec, engine: Engine, rules: EngineRules, kv_dtype: str) -> None:
    """Refuse a KV cache dtype that the version lacks, or refuses for such weights, or whose
    backends and size are unknown."""
    flag = engine.flags.get(engine.spelling.get("kv-cache-dtype", "kv-cache-dtype"))
    if kv_dtype != "auto" and flag is not None and flag.choices and kv_dtype not in flag.choices:
        reason = (
            f"--kv-cache-dtype of {engine.ref} cannot be {kv_dtype}; it is one of"
            f" {', '.join(flag.choices)}"
        )
        raise Refused("bad_flag", reason, f"profile {engine.ref}")
    if reason := rules.kv_refusal(spec.quant, engine, kv_dtype):
        raise Refused("bad_flag", reason, f"profile {engine.ref}")
    described = rules.kv_dtypes
    if kv_dtype not in (_SIZED if described is None else described):
        reason = (
            f"which attention backend takes a KV cache in {kv_dtype}, and how large it is, is not"
            " known here"
        )
        raise Refused("no_backend", reason, f"profile {engine.ref}")


def gate_peers(inputs: PlanningInput, engine: Engine, group: tuple[Gpu, ...]) -> None:
    """Refuse GPUs that cannot communicate, even without peer-to-peer access."""
    if fact := failing_links(inputs.facts, engine, group).get(NCCL):
        names = ", ".join(str(gpu.index) for gpu in group)
        reason = (
            f"GPUs {names} could not talk to each other here, also without peer-to-peer access:"
            f" {fact.source}"
        )
        raise Refused("known_bad", reason, "fact")


def gate_kernels(
    evidence: VariantEvidence, engine: Engine, facts: KnownFacts, capability: str | None
) -> None:
    """Refuse a layer without a kernel or backend, then one that is known to fail.

    The order matters: an engine refuses a missing kernel in any case, and other changes cure it.
    """
    source = f"profile {engine.ref}"
    for row in evidence.kernels:
        if row.status == "none":
            why = "; ".join(
                f"{refusal.kernel}: {refusal.reason}".removeprefix(": ") for refusal in row.refused
            )
            raise Refused(
                "no_kernel",
                f"no kernel for {row.layer}{_size(row)}: {why}",
                source,
                layer=row.layer,
            )
        if row.status == "crash":
            reason = (
                f"it loads, but {row.kernel} would crash at the first request in"
                f" {row.layer}{_size(row)}: {row.note}"
            )
            raise Refused("runtime_fail", reason, source, layer=row.layer, kernel=row.kernel)
    # Mostly no such fact exists, which one look tells for all layers.
    fails = facts.may_hold("kernel_fails", "engine", engine.ref) and facts.may_hold(
        "kernel_fails", "capability", capability
    )
    for row in evidence.kernels if fails else ():
        suspected = row.kernel is not None and facts.may_hold("kernel_fails", "kernel", row.kernel)
        if suspected and (fact := _failing(row, engine, facts, capability)):
            reason = (
                f"{row.kernel}, which {row.layer}{_size(row)} would get, is known to fail here:"
                f" {fact.source}"
            )
            raise Refused("known_bad", reason, "fact", layer=row.layer, kernel=row.kernel)
    _gate_attention(evidence, engine, facts, capability, fails=bool(fails))


def _gate_attention(
    evidence: VariantEvidence,
    engine: Engine,
    facts: KnownFacts,
    capability: str | None,
    *,
    fails: bool,
) -> None:
    """The same for attention backends. fails: facts about failing kernels exist."""
    source = f"profile {engine.ref}"
    for layers in evidence.attention:
        if layers.status == "none":
            why = "; ".join(
                f"{refusal.kernel}: {refusal.reason}".removeprefix(": ")
                for refusal in layers.refused
            )
            reason = (
                f"no attention backend for the {layers.layers} {layers.kind} layers of head size"
                f" {layers.head_dim}: {why}"
            )
            raise Refused("no_backend", reason, source)
        if not fails:
            continue
        about = {
            "kernel": layers.backend,
            "engine": engine.ref,
            "capability": capability,
            "head_dim": str(layers.head_dim),
        }
        if facts.may_hold("kernel_fails", "head_dim", str(layers.head_dim)) and (
            fact := _matching_fact(facts, "kernel_fails", about)
        ):
            reason = (
                f"{layers.backend}, which heads of size {layers.head_dim} would get, is known to"
                f" fail here: {fact.source}"
            )
            raise Refused("known_bad", reason, "fact")


def _size(row: LayerKernel) -> str:
    return f" (K={row.k}, N={row.n} per rank)" if row.k else ""


def _failing(
    row: LayerKernel, engine: Engine, facts: KnownFacts, capability: str | None
) -> Fact | None:
    about = {
        "kernel": row.kernel,
        "engine": engine.ref,
        "capability": capability,
        "scheme": row.scheme,
    }
    about |= {"k": str(row.k), "n": str(row.n)}
    return _matching_fact(facts, "kernel_fails", about)


def refused_before(facts: KnownFacts, engine: Engine, capability: str) -> ObservedRefusals:
    """Layers that this engine version refused although the rules accept them."""
    about = {"engine": engine.ref, "capability": capability}
    return ObservedRefusals(
        (
            frozenset(fact.scope.items() - about.items()),
            f"refused such a layer here before: {fact.source}",
        )
        for fact in facts.of_kind("kernel_refuses")
        if all(fact.scope.get(name, value) == value for name, value in about.items())
    )


def _matching_fact(facts: KnownFacts, kind: str, about: Mapping[str, str | None]) -> Fact | None:
    """The first fact of this kind that holds and is about more than an engine version."""
    return next(
        (fact for fact in facts.holding(kind, about) if fact.scope.keys() - {"engine"}), None
    )


def gate_driver(inputs: PlanningInput, engine: Engine) -> None:
    """Refuse an old driver, another processor, and a version that failed at this task before."""
    source = f"profile {engine.ref}"
    for capability in {gpu.capability for gpu in inputs.hardware.gpus} or {None}:
        about = {
            "engine": engine.ref,
            "capability": capability,
            "architecture": inputs.spec.architecture,
            "model": inputs.spec.versioned_source,
            "task": inputs.spec.task,
        }
        about |= {"quantization": inputs.spec.quant.method if inputs.spec.quant else None}
        if fact := _matching_fact(inputs.facts, "engine_fails", about):
            raise Refused(
                "known_bad", f"{engine.ref} is known not to do this: {fact.source}", "fact"
            )
    if engine.machines and inputs.hardware.arch not in engine.machines:
        built = " and ".join(engine.machines)
        raise Refused(
            "unsupported_platform",
            f"its image is built for {built}, this machine is {inputs.hardware.arch}",
            source,
        )
    driver, least = inputs.hardware.driver, engine.min_driver
    if driver and least and release(driver) < release(least):
        reason = f"CUDA {engine.cuda} needs driver {least} or newer, this machine has {driver}"
        raise Refused("driver_too_old", reason, source)


def gate_devices(
    inputs: PlanningInput, engine: Engine, built: BuiltModel, variant: Variant, groups: GpuGroups
) -> tuple[Gpu, ...]:
    """The GPUs of the variant; none on a CPU. Raises Refused."""
    gpus, tp, pp, ranks = inputs.hardware.gpus, variant.tp, variant.pp, variant.ranks
    if engine.device == "cpu":
        if ranks > 1:
            raise Refused("illegal_parallelism", "parallelism on a CPU is not planned", "planner")
        return ()
    if len(gpus) < ranks:
        raise Refused(
            "no_device",
            f"{ranks} GPU{'s are' if ranks > 1 else ' is'} needed and {len(gpus)} are here",
            "probe",
        )
    if problem := groups.illegal(inputs.spec, built, tp, ep=variant.ep, dp=variant.dp):
        reason, layer = problem
        source = "vllm/config/model.py, vllm/model_executor/layers/linear.py"
        raise Refused("illegal_parallelism", reason, source, layer=layer)
    _gate_tower(inputs, engine, built, tp)
    layers = sum(group.layers for group in inputs.spec.attention if group.kind != "vision")
    if pp > layers:
        raise Refused(
            "illegal_parallelism",
            f"{layers} layers cannot be shared by {pp} stages",
            "vllm/distributed/utils.py",
        )
    if pp > 1 and (field := unshared(built, engine, inputs.spec.architecture)):
        reason = f"{engine.ref} cannot share {inputs.spec.architecture} by stages of a pipeline"
        raise Refused(
            "illegal_parallelism", reason, engine.sources.get(field, f"profile {engine.ref}")
        )
    # Unlike GPUs hold stages, or the ranks of one stage.
    one_split = variant.dp == 1 and 1 in (tp, pp)
    group = groups.best(ranks) or (groups.unlike(ranks) if one_split else None)
    if group is None:
        raise Refused("no_device", f"there are no {ranks} GPUs of one kind", "probe")
    if group[0].total_bytes is None:
        raise Refused("unknown_memory", f"the memory of {group[0].name} could not be read", "probe")
    for gpu in group:
        _computed_for(engine, gpu)
    return group


def _gate_tower(inputs: PlanningInput, engine: Engine, built: BuiltModel, tp: int) -> None:
    """Refuse ranks that cannot share the vision tower, unless each holds all of it."""
    flag = next(
        (name for name in _WHOLE_TOWER if engine.spelling.get(name, name) in engine.flags), ""
    )
    options = {name.replace("_", "-"): value for name, value in inputs.wish.args.items()}
    if inputs.wish.text_only or (flag and options.get(flag) == _WHOLE_TOWER[flag]):
        return
    if reason := tower_cut(built, inputs.spec.architecture, tp):
        value = str(_WHOLE_TOWER.get(flag, "")).lower()
        cure = f"; --arg {flag}={value} keeps it whole on every GPU" if flag else ""
        raise Refused("illegal_parallelism", reason + cure, f"profile {engine.ref}")


def gate_groups(
    inputs: PlanningInput, engine: Engine, rules: EngineRules, variant: Variant
) -> None:
    """Refuse groups of ranks with requests of their own where the model or version has none."""
    if variant.dp == 1:
        return
    reason = rules.grouped_refusal(inputs.spec, engine, variant.tp * variant.dp)
    if not reason and variant.pp > 1:
        reason = "data parallel groups with stages of a pipeline are not planned"
    if reason:
        raise Refused("illegal_parallelism", reason, f"profile {engine.ref}")


def _computed_for(engine: Engine, gpu: Gpu) -> None:
    """Raise Refused if the engine has no code for this GPU."""
    capability = gpu.capability
    if engine.min_capability and capability and float(capability) < float(engine.min_capability):
        raise Refused(
            "no_kernel",
            f"{engine.ref} needs compute capability {engine.min_capability}, {gpu.name} has"
            f" {capability}",
            f"profile {engine.ref}",
        )
    if engine.compiled and capability and runs(engine.compiled, capability) == "no":
        compiled_for = ", ".join(capabilities(engine.compiled))
        reason = (
            f"{engine.ref} is compiled for compute capability {compiled_for};"
            f" {gpu.name} has {capability}"
        )
        raise Refused("no_kernel", reason, engine.sources.get("compiled", f"profile {engine.ref}"))


def gate_balance(engine: Engine, tp: int, free_bytes: Collection[int]) -> None:
    """Refuse ranks with unlike free memory where the engine does."""
    if tp < 2 or UNBALANCED not in engine.traits:
        return
    if 10 * min(free_bytes) < 9 * max(free_bytes):
        reason = (
            f"{engine.ref} refuses ranks where one GPU has less than nine tenths of another's free"
            f" memory: {gib(min(free_bytes))} and {gib(max(free_bytes))} are free"
        )
        raise Refused("no_device", reason, "sglang/srt, _check_tp_memory_balance")


def gate_same_kernels(first: VariantEvidence, second: VariantEvidence, gpus: Sequence[Gpu]) -> None:
    """Refuse ranks of one stage whose kernels differ: all processes ask the first visible GPU."""
    for layer, counterpart in zip(first.kernels, second.kernels, strict=True):
        if layer.kernel != counterpart.kernel:
            names = " and ".join(f"{gpu.name} ({gpu.capability})" for gpu in gpus)
            reason = (
                f"ranks on {names} would need different kernels for {layer.layer}: {layer.kernel}"
                f" and {counterpart.kernel}. All ranks ask the first GPU"
            )
            raise Refused("no_kernel", reason, "vllm/platforms/cuda.py", layer=layer.layer)


def gate_alike(first: VariantEvidence, second: VariantEvidence, gpu: Gpu) -> None:
    """Refuse stages with different caches: the engine counts blocks once for all stages."""
    first_backends, theirs = (
        {
            (row.kind, row.head_dim): f"{row.backend} in blocks of {row.block}"
            for row in one.attention
            if row.kind != "vision"
        }
        for one in (first, second)
    )
    if first_backends != theirs:
        reason = (
            f"its GPUs would keep their caches unlike: on {gpu.name}"
            f" {', '.join(theirs.values())}, else {', '.join(first_backends.values())}"
        )
        raise Refused("no_backend", reason, "planner")


def gate_method(
    inputs: PlanningInput,
    engine: Engine,
    args: Mapping[str, Scalar],
    variant: Variant,
    dtype: str,
    capability: str | None,
) -> str:
    """The quantization method by the engine's name.

    Raises Refused if the version lacks the method, or the method does not take this GPU or these
    activations.
    """
    spec, source = inputs.spec, f"profile {engine.ref}"
    if spec.quant is None and "quantization" not in args:
        _check_described(spec)
    deprecated = bool(args.get("allow-deprecated-quantization", False))
    resolved = resolve(
        engine,
        spec.quant,
        variant.quantization,
        spec.model_type,
        capability,
        allow_deprecated=deprecated,
    )
    check(engine, resolved, capability, dtype)
    if spec.quant is None and variant.quantization not in ("", "fp8"):
        reason = (
            f"what --quantization {variant.quantization} makes of weights that are not quantized is"
            " not known here"
        )
        raise Refused("unsupported_quantization", reason, source)
    return resolved.method


def _check_described(spec: ModelSpec) -> None:
    """Raises Refused for packed weights without a word about their quantization: engines take them
    for plain ones, and fail on their tensors."""
    packed = next((group.name for group in spec.tensors if group.name.endswith(_PACKED)), None)
    if packed is not None:
        reason = (
            f"the weights are quantized ({packed}), and neither config.json nor"
            " hf_quant_config.json says how: take the missing file from where the model was"
            " published"
        )
        raise Refused("unsupported_quantization", reason, "headers of the weights")


def gate_dtype(
    inputs: PlanningInput,
    engine: Engine,
    group: tuple[Gpu, ...],
    args: Mapping[str, Scalar],
    variant: Variant,
) -> Choice[str]:
    """The dtype of activations: of a change, of the user, or by default. Raises Refused."""
    capability = group[0].capability if group else None
    without = _not_computed(inputs.spec, engine, group)
    wish_dtype = variant.dtype or str(args.get("dtype", inputs.wish.dtype))
    wish_dtype = {"half": "float16", "float": "float32"}.get(wish_dtype, wish_dtype)
    if wish_dtype in without:
        reason, source = without[wish_dtype]
        raise Refused("no_kernel", reason, source)
    if variant.dtype:
        reason, source = variant.reasons["dtype"]
        return str_choice(variant.dtype, reason, source)
    if wish_dtype != "auto":
        return str_choice(wish_dtype, "set by the user", "user")
    stored = inputs.spec.dtype
    first = ("bfloat16", "float16") if inputs.spec.generates else ("float16", "bfloat16")
    preferred = next(dtype for dtype in (*first, "float32") if dtype not in without)
    if stored == "float32" != preferred:
        source = inputs.spec.sources.get("dtype", "")
        reason = (
            "no file names a dtype, and the engine itself would choose this"
            if "default" in source
            else "half the bytes of the float32 weights, as the engine itself would choose"
        )
        return str_choice(preferred, reason, "vllm/config/model.py _resolve_auto_dtype")
    if stored in without:
        reason = f"the weights are {stored}, which compute capability {capability} cannot compute"
        source = "vllm/platforms/cuda.py"
        if stored == "float16" or preferred == "float32":
            reason, source = without["float16"]
            reason += "; it takes twice the memory and time" if preferred == "float32" else ""
        return str_choice(preferred, reason, source)
    return str_choice(stored, "the dtype of the weights", inputs.spec.sources.get("dtype", ""))


def _not_computed(
    spec: ModelSpec, engine: Engine, group: tuple[Gpu, ...]
) -> dict[str, tuple[str, str]]:
    """Dtypes that the engine cannot compute on these GPUs: the reason and its source."""
    dtypes = {}
    if old := next(
        (gpu for gpu in group if gpu.capability is not None and float(gpu.capability) < 8.0), None
    ):
        reason = f"bfloat16 needs compute capability 8.0, {old.name} has {old.capability}"
        dtypes["bfloat16"] = reason, "vllm/platforms/cuda.py check_if_supports_dtype"
    if spec.model_type in engine.no_float16:
        reason = f"{engine.ref} refuses float16 for {spec.model_type}: it is numerically unstable"
        dtypes["float16"] = reason, engine.sources.get("no_float16", f"profile {engine.ref}")
    return dtypes
