"""SGLang as a planned engine: its spelling of flags, its memory settings, and what is certain of its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.command import canonical, check_args, spelled
from gateway.core.kernels import layer_kernels
from gateway.core.layers import body
from gateway.core.linear import LinearRules, LinearShape, Scheme, choose
from gateway.core.reading import read_model
from gateway.core.sglang_memory import MemoryRules, Model, StaticMemory, fraction_within, kv_bytes, kv_tokens, static_memory
from gateway.domain import AttentionGroup, Engine, Recurrent, Scalar
from gateway.errors import BadFlag
from gateway.profiles import Profiles, shipped
from tests.conformance import sglang_linear_questions, sglang_memory_questions
from tests.conformance.golden import golden

pytestmark = pytest.mark.unit

PROFILES = Profiles()
VERSIONS = ("0.5.10.post1", "0.5.23")
MIB, GIB = 1024**2, 1024**3


def engine(version: str) -> Engine:
    return PROFILES.engine(f"sglang=={version}")


def rules(version: str, name: str) -> Any:
    return yaml.safe_load((shipped() / f"engines/sglang/{version}/{name}.yaml").read_text())


MEMORY = {version: MemoryRules.model_validate(rules(version, "memory")) for version in VERSIONS}
LINEAR = {version: LinearRules.model_validate(rules(version, "linear")) for version in VERSIONS}


# --- spelling ---


@pytest.mark.parametrize("version", VERSIONS)
def test_the_planners_flags_are_written_as_this_engine_calls_them(version: str) -> None:
    tp, ep = ("tp-size", "ep-size") if version == "0.5.23" else ("tensor-parallel-size", "expert-parallel-size")
    flags: dict[str, Scalar] = {"tensor-parallel-size": 4, "dtype": "bfloat16", "max-model-len": 8192, "max-num-seqs": 64}
    flags |= {
        "max-num-batched-tokens": 2048,
        "gpu-memory-utilization": 0.8,
        "enforce-eager": True,
        "disable-custom-all-reduce": True,
    }
    flags |= {"enable-expert-parallel": True, "kv-cache-memory-bytes": 5, "moe-backend": "triton", "kv-cache-dtype": "fp8_e4m3"}
    assert spelled(engine(version), flags) == (
        *(f"--{tp}=4", "--dtype=bfloat16", "--context-length=8192", "--max-running-requests=64", "--chunked-prefill-size=2048"),
        *("--mem-fraction-static=0.8", "--disable-cuda-graph", "--disable-custom-all-reduce", f"--{ep}=4"),
        *("--moe-runner-backend=triton", "--kv-cache-dtype=fp8_e4m3"),
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_a_users_flag_is_known_by_every_name_and_means_the_planners(version: str) -> None:
    for name in ("tp-size", "tensor-parallel-size", "--tp_size"):
        checked = check_args(engine(version), {name: "2", "context-length": 4096})
        assert canonical(engine(version), checked) == {"tensor-parallel-size": 2, "max-model-len": 4096}
        assert set(checked) <= set(engine(version).flags)
        assert spelled(engine(version), canonical(engine(version), checked)) == spelled(engine(version), checked)
    with pytest.raises(BadFlag, match="given twice"):
        check_args(engine(version), {"tp-size": 2, "tensor-parallel-size": 2})
    with pytest.raises(BadFlag, match="at least 1"):
        check_args(engine(version), {"chunked-prefill-size": -1})


@pytest.mark.parametrize("name", ["model", "model-path", "nccl-init-addr", "dist-init-addr", "enable-custom-logit-processor"])
@pytest.mark.parametrize("version", VERSIONS)
def test_no_other_name_opens_a_closed_flag(version: str, name: str) -> None:
    with pytest.raises(BadFlag, match="set by the gateway"):
        check_args(engine(version), {name: "x"})


# --- memory ---


def model_of(config: dict[str, Any]) -> Model:
    vision = config.get("vision_config") or {}
    return Model(
        architecture=config["architectures"][0],
        mla="kv_lora_rank" in config,
        towers="text_config" in config or "vision_config" in config,
        vision="vision_config" in config,
        vision_layers=vision.get("num_hidden_layers"),
        vision_hidden=vision.get("hidden_size"),
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_memory_settings_are_the_engines_own(version: str) -> None:
    models = {name: model_of(sglang_memory_questions.config_of(name)) for name in sglang_memory_questions.NAMES}
    wrong = []
    for capability, answers in golden(sglang_memory_questions, version).items():
        for question, answer in zip(sglang_memory_questions.questions(version), answers, strict=True):
            name, mib, tp, seqs, eager = question
            said = static_memory(MEMORY[version], mib, models[name], tp=tp, seqs=seqs, eager=eager)
            if [said.chunked_prefill, said.graph_batch, pytest.approx(said.fraction, abs=1e-5)] != answer:
                wrong.append((capability, question, answer, said))
    assert wrong == []


@given(st.integers(1, 2**50), st.integers(1, 2**50), st.floats(0, 1), st.floats(0, 10**6))
def test_a_fraction_never_takes_more_than_the_budget(gpu: int, budget: int, own: float, reserved: float) -> None:
    static = StaticMemory(chunked_prefill=2048, graph_batch=8, reserved_mib=reserved, fraction=own)
    fraction = fraction_within(static, budget, gpu)
    assert 0 <= fraction <= own
    assert fraction == 0 or fraction * gpu <= budget - reserved * MIB + gpu * 1e-9


def test_the_pool_is_what_weights_leave_of_the_share() -> None:
    full = AttentionGroup(kind="full", layers=32, heads=32, kv_heads=8, head_dim=128)
    assert kv_bytes(0.8, 20 * GIB, 8 * GIB) == 8 * GIB
    assert kv_bytes(0.3, 20 * GIB, 8 * GIB) == 0
    tokens = kv_tokens(MEMORY["0.5.23"], [full], 8 * GIB, tp=1, element_bytes=2)
    assert tokens == 8 * GIB // (32 * 8 * 256 * 2)
    assert kv_tokens(MEMORY["0.5.23"], [full], 8 * GIB, tp=16, element_bytes=2) == tokens * 8  # one head is not cut
    latent = AttentionGroup(kind="mla", layers=61, heads=128, kv_heads=1, head_dim=576, value_dim=512)
    assert kv_tokens(MEMORY["0.5.23"], [latent], GIB, tp=8, element_bytes=2) == GIB // (61 * 576 * 2)
    sliding = full.evolve(kind="sliding", window=1024)
    assert kv_tokens(MEMORY["0.5.23"], [full, sliding], 9 * GIB, tp=1, element_bytes=2) == int(9 * GIB / (1.8 * 131072))
    state = Recurrent(kind="gdn", heads=32, rows=128, columns=128, conv_channels=8192, conv_kernel=4)
    hybrid = [full, AttentionGroup(kind="recurrent", layers=30, heads=32, kv_heads=0, head_dim=128, recurrent=state)]
    assert kv_tokens(MEMORY["0.5.23"], hybrid, 19 * GIB, tp=1, element_bytes=2) == 10 * GIB // 131072
    assert kv_tokens(MEMORY["0.5.23"], [latent.evolve(index_dim=128)], GIB, tp=8, element_bytes=2) is None


# --- kernels ---


def kernel(version: str, k: int, n: int, capability: str = "8.6", **scheme: Any) -> Any:
    shape = LinearShape(k=k, n=n, scheme=Scheme(**{"kind": "wna16", "group": 128, **scheme}), dtype="bfloat16")
    return choose(LINEAR[version], shape, capability)


@pytest.mark.parametrize("version", VERSIONS)
def test_it_takes_the_integer_checkpoints_for_marlin_that_the_engine_takes(version: str) -> None:
    wrong = []
    for capability, answers in golden(sglang_linear_questions, version).items():
        for question, answer in zip(sglang_linear_questions.questions(version), answers, strict=True):
            method, bits, symmetric, group, act_order = question
            kind = "fp8_token" if method == "fp8" else "w8a16" if bits == 8 else "wna16"
            said = kernel(
                version, 4096, 4096, capability, kind=kind, bits=bits, symmetric=symmetric, group=group, act_order=act_order
            )
            if (said.status == "ok") != answer or said.status == "none":
                wrong.append((capability, question, answer, said))
    assert wrong == []


@pytest.mark.parametrize("version", VERSIONS)
def test_seed_000_two_ranks_leave_no_tile_for_the_gates_of_a_gdn_layer(version: str) -> None:
    assert kernel(version, 2048, 64).kernel == "GPTQMarlinLinearMethod"
    halved = kernel(version, 2048, 32)
    assert halved.status == "none"
    (refusal,) = halved.refused
    assert refusal.reason.startswith("N=32 is not a multiple of 64 (32 over)")


@pytest.mark.parametrize("version", VERSIONS)
def test_seed_000_as_a_whole_model(version: str) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    config = {**sglang_memory_questions.config_of("qwen3.6-35b-a3b"), "quantization_config": quantization}
    spec = read_model("/models/qwen", None, config, None, None, (), None)
    layers = body(spec, engine(version).traits).linears
    known = PROFILES.rules([engine(version)])[f"sglang=={version}"]
    without = {
        tp: [row.layer for row in layer_kernels(layers, known, tp, "bfloat16", "8.6") if row.status == "none"] for tp in (1, 2)
    }
    assert without == {1: [], 2: ["language_model.model.layers.*.linear_attn.in_proj_ba"]}


@pytest.mark.parametrize(
    ("k", "n", "status"),
    [(2112, 2048, "ok"), (2112, 2112, "none"), (2880, 2880, "none"), (1024, 64, "ok"), (576, 1024, "unknown")],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_marlin_needs_a_tile_that_fits_both_sides_and_whole_groups(version: str, k: int, n: int, status: str) -> None:
    group = 128 if k == 576 else 32
    shape = LinearShape(k=k, n=n, scheme=Scheme(kind="wna16", group=group), dtype="bfloat16", full_k=2 * k)
    assert choose(LINEAR[version], shape, "8.6").status == status


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "int8", "fp8_block"])
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_not_certain_is_unknown(version: str, kind: str) -> None:
    assert kernel(version, 4096, 4096, "9.0", kind=kind).status == "unknown"
    assert kernel(version, 4096, 4096, symmetric=False).status == "unknown"
