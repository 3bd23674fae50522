"""SGLang as a planned engine: its spelling of flags and its memory settings. Its kernels are in
test_sglang_kernels.py."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import AttentionGroup, Engine, Gpu, Hardware, Recurrent, Scalar
from gateway.engines.sglang.memory import MemoryRules, StaticMemory, fraction_within, kv_tokens
from gateway.errors import BadFlag
from gateway.planner.flags import canonical, check_args, spell_flags
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import QUANTS
from tests.support.engine_rules import rule_document
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import NEWEST_SGLANG, SGLANG, since

PROFILES = Profiles()
MIB, GIB = 1024**2, 1024**3


def engine(version: str) -> Engine:
    return PROFILES.engine(f"sglang=={version}")


def rules(version: str, name: str) -> Any:
    return rule_document("sglang", version, name)


MEMORY = {version: MemoryRules.model_validate(rules(version, "memory")) for version in SGLANG}


# --- spelling ---


@pytest.mark.parametrize("version", SGLANG)
def test_the_planners_flags_are_written_as_this_engine_calls_them(version: str) -> None:
    tp, ep = (
        ("tp-size", "ep-size")
        if since(version, "0.5.11")
        else ("tensor-parallel-size", "expert-parallel-size")
    )
    flags: dict[str, Scalar] = {
        "tensor-parallel-size": 4,
        "dtype": "bfloat16",
        "max-model-len": 8192,
        "max-num-seqs": 64,
    }
    flags |= {
        "max-num-batched-tokens": 2048,
        "gpu-memory-utilization": 0.8,
        "enforce-eager": True,
        "disable-custom-all-reduce": True,
    }
    flags |= {
        "enable-expert-parallel": True,
        "kv-cache-memory-bytes": 5,
        "moe-backend": "triton",
        "kv-cache-dtype": "fp8_e4m3",
    }
    assert spell_flags(engine(version), flags) == (
        f"--{tp}=4",
        "--dtype=bfloat16",
        "--context-length=8192",
        "--max-running-requests=64",
        "--chunked-prefill-size=2048",
        "--mem-fraction-static=0.8",
        "--disable-cuda-graph",
        "--disable-custom-all-reduce",
        f"--{ep}=4",
        "--moe-runner-backend=triton",
        "--kv-cache-dtype=fp8_e4m3",
    )


@pytest.mark.parametrize("version", SGLANG)
def test_a_users_flag_is_known_by_every_name_and_means_the_planners(version: str) -> None:
    for name in ("tp-size", "tensor-parallel-size", "--tp_size"):
        arguments = check_args(engine(version), {name: "2", "context-length": 4096})
        assert canonical(engine(version), arguments) == {
            "tensor-parallel-size": 2,
            "max-model-len": 4096,
        }
        assert set(arguments) <= set(engine(version).flags)
        assert spell_flags(engine(version), canonical(engine(version), arguments)) == spell_flags(
            engine(version), arguments
        )
    with pytest.raises(BadFlag, match="given twice"):
        check_args(engine(version), {"tp-size": 2, "tensor-parallel-size": 2})
    with pytest.raises(BadFlag, match="at least 1"):
        check_args(engine(version), {"chunked-prefill-size": -1})


@pytest.mark.parametrize(
    "name",
    ["model", "model-path", "nccl-init-addr", "dist-init-addr", "enable-custom-logit-processor"],
)
@pytest.mark.parametrize("version", SGLANG)
def test_no_other_name_opens_a_closed_flag(version: str, name: str) -> None:
    with pytest.raises(BadFlag, match="cannot be given"):
        check_args(engine(version), {name: "x"})


# --- memory ---


@given(st.integers(1, 2**50), st.floats(0, 1), st.floats(0, 10**6))
def test_a_fraction_leaves_reserved_memory(
    free: int, user_fraction: float, reserved: float
) -> None:
    static = StaticMemory(
        chunked_prefill=2048, graph_batch=8, reserved_mib=reserved, fraction=user_fraction
    )
    fraction = fraction_within(static, free)
    assert 0 <= fraction <= user_fraction
    assert fraction == 0 or fraction * free <= free - reserved * MIB + free * 1e-9


# Tokens that SGLang 0.5.15.post1 counted on an H200 whose driver kept 615 MiB
# (benchmarks/notebook/performance.md).
@pytest.mark.parametrize(
    ("model", "changes", "counted"),
    [
        ("llama-3.1-8b", {}, 898_954),
        (
            "qwen3-30b-a3b",
            {"num_hidden_layers": 16, "quantization_config": QUANTS["fp8-dynamic"]},
            3_742_632,
        ),
    ],
)
def test_the_pool_has_a_measured_size(model: str, changes: dict[str, Any], counted: int) -> None:
    h200 = Gpu(
        index=0,
        uuid="GPU-0",
        name="NVIDIA H200",
        capability="9.0",
        total_bytes=143771 * MIB,
        free_bytes=143156 * MIB,
    )
    machine = Hardware(
        arch="x86_64",
        cpu_cores=8,
        ram_total_bytes=1 << 40,
        ram_available_bytes=1 << 40,
        gpus=(h200,),
    )
    near = engine("0.5.10.post1")
    request = wish(args={"mem-fraction-static": 0.897, "max-running-requests": 256})
    plan = decide(
        published_model(model, **changes),
        machine,
        [near],
        request,
        rules=Profiles().rules([near]),
    ).plans[0]
    assert plan.memory.kv_tokens == pytest.approx(counted, rel=0.005)


def test_the_pool_of_sglang_is_its_share_without_the_weights() -> None:
    full = AttentionGroup(kind="full", layers=32, heads=32, kv_heads=8, head_dim=128)
    tokens = kv_tokens(MEMORY[NEWEST_SGLANG], [full], 8 * GIB, tp=1, element_bytes=2)
    assert tokens == 8 * GIB // (32 * 8 * 256 * 2)
    # One head is not cut.
    assert kv_tokens(MEMORY[NEWEST_SGLANG], [full], 8 * GIB, tp=16, element_bytes=2) == tokens * 8
    latent = AttentionGroup(
        kind="mla", layers=61, heads=128, kv_heads=1, head_dim=576, value_dim=512
    )
    assert kv_tokens(MEMORY[NEWEST_SGLANG], [latent], GIB, tp=8, element_bytes=2) == GIB // (
        61 * 576 * 2
    )
    sliding = full.evolve(kind="sliding", window=1024)
    assert kv_tokens(MEMORY[NEWEST_SGLANG], [full, sliding], 9 * GIB, tp=1, element_bytes=2) == int(
        9 * GIB / (1.8 * 131072)
    )
    state = Recurrent(
        kind="gdn", heads=32, rows=128, columns=128, conv_channels=8192, conv_kernel=4
    )
    hybrid = [
        full,
        AttentionGroup(
            kind="recurrent", layers=30, heads=32, kv_heads=0, head_dim=128, recurrent=state
        ),
    ]
    assert (
        kv_tokens(MEMORY[NEWEST_SGLANG], hybrid, 19 * GIB, tp=1, element_bytes=2)
        == 10 * GIB // 131072
    )
    sparse = [full.evolve(index_dim=128)]
    assert kv_tokens(MEMORY[NEWEST_SGLANG], sparse, GIB, tp=8, element_bytes=2) is None
