"""Backends of experts: the rules of each vLLM version agree with that version's own selection code,
and read well."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engines.common.kernels.expert_kernels import MoeChoice, MoeRules, choose_moe
from gateway.models.scheme import MoeShape, Scheme
from gateway.profiles.profiles import Profiles
from tests.conformance.moe_questions import CAPABILITIES
from tests.support.engine_rules import SCHEMES, read_rules, tells_the_line
from tests.support.examples import examples
from tests.support.versions import NEWEST_VLLM, VLLM, since

RULES = {version: read_rules(MoeRules, "moe", version) for version in VLLM}


# --- the cases that people reported ---

MXFP4 = Scheme(kind="mxfp4", bits=4, group=32, weight_only=True)


def gpt_oss(version: str, capability: str, origin: str, tp: int = 1) -> MoeChoice:
    shape = MoeShape(
        hidden=2880,
        intermediate=2880 // tp,
        experts=32,
        scheme=MXFP4,
        origin=origin,
        dtype="bfloat16",
        function="swigluoai",
        bias=True,
        routing="renormalize",
        family="gpt_oss",
    )
    return choose_moe(RULES[version], shape, capability)


@pytest.mark.parametrize("version", VLLM)
def test_gpt_oss_as_compressed_tensors_loads_and_would_crash_in_its_second_product(
    version: str,
) -> None:
    choice = gpt_oss(version, "12.0", "compressed-tensors")
    assert (choice.status, choice.kernel) == ("crash", "MARLIN")
    assert [product for product, _ in choice.crashes] == ["w2"]
    assert (
        choice.note
        == "w2: K=2880, N=2880: K=2880 is not a multiple of 128 (64 over) and N=2880 is not a"
        " multiple of 128 (64 over)"
    )


@pytest.mark.parametrize("tp", [2, 4])
def test_gpt_oss_as_compressed_tensors_crashes_with_any_cut(tp: int) -> None:
    assert gpt_oss("0.18.0", "12.0", "compressed-tensors", tp).status == "crash"


@pytest.mark.parametrize("version", VLLM)
def test_gpt_oss_as_published_is_padded_and_runs(version: str) -> None:
    choice = gpt_oss(version, "12.0", "mxfp4")
    assert (choice.status, choice.kernel, choice.padded_to) == ("ok", "MARLIN", (3072, 2944))


@pytest.mark.parametrize("kind", ["fp8_token", "nvfp4"])
def test_marlin_repacks_experts_in_whole_tiles_until_it_pads(kind: Any) -> None:
    """Experts of 1408 on 8 ranks, 4 and 1, on GPUs without products of FP8."""

    def choice(version: str, tp: int) -> MoeChoice:
        bits, group, origin = (8, 0, "compressed-tensors") if "8" in kind else (4, 16, "modelopt")
        shape = MoeShape(
            hidden=4096,
            intermediate=1408 // tp,
            experts=128,
            scheme=Scheme(kind=kind, bits=bits, group=group),
            origin=origin,
            dtype="bfloat16",
        )
        return choose_moe(RULES[version], shape, "8.6")

    for version in ("0.18.0", "0.19.1"):
        crashes = {tp: [product for product, _ in choice(version, tp).crashes] for tp in (8, 4, 1)}
        assert crashes == {8: ["w13", "w2"], 4: ["w2"], 1: []}
        assert choice(version, 1).kernel == "MARLIN"
    assert {choice("0.26.0", tp).status for tp in (8, 4, 1)} == {"ok"}


def wna16(version: str, intermediate: int, origin: str = "gptq", group: int = 32) -> MoeChoice:
    scheme = Scheme(kind="wna16", bits=4, group=group)
    sizes: dict[str, Any] = {"hidden": 2816, "intermediate": intermediate, "experts": 128}
    sizes |= {"dtype": "bfloat16", "routing": "renormalize"}
    return choose_moe(RULES[version], MoeShape(scheme=scheme, origin=origin, **sizes), "8.6")


@pytest.mark.parametrize(
    ("version", "symmetric", "method"),
    [
        ("0.19.1", False, "AWQMarlinMoEMethod"),
        ("0.19.1", True, "MoeWNA16Method"),
        ("0.26.0", False, "AutoAWQMoEMethod"),
        ("0.26.0", True, "MoeWNA16Method"),
        ("0.33.0", False, "AutoAWQMoEMethod"),
        ("0.33.0", True, "AutoAWQMoEMethod"),
    ],
)
def test_auto_round_in_the_layout_of_awq_has_its_own_methods(
    version: str, symmetric: bool, method: str
) -> None:
    """As the versions answered for Mixtral, Qwen3 and Qwen1.5 experts on compute capability 8.6."""
    scheme = Scheme(kind="wna16", bits=4, group=128, symmetric=symmetric, layout="awq")
    shape = MoeShape(
        hidden=2048,
        intermediate=768,
        experts=128,
        scheme=scheme,
        origin="auto-round",
        dtype="bfloat16",
        routing="renormalize",
    )
    assert choose_moe(RULES[version], shape, "8.6").method == method


@pytest.mark.parametrize("family", ["ernie4_5_moe", "minimax_m2"])
def test_routers_in_float32_keep_a_kernel_from_models(family: str) -> None:
    shape = MoeShape(
        hidden=3072,
        intermediate=1536,
        experts=256,
        scheme=Scheme(kind="fp8_block", bits=8, group=128),
        origin="fp8",
        dtype="bfloat16",
    )
    other_shape = shape._replace(family="qwen3_moe", routing="renormalize")
    assert choose_moe(RULES["0.18.0"], other_shape, "10.0").kernel == "FLASHINFER_TRTLLM"
    assert choose_moe(RULES["0.18.0"], shape._replace(family=family), "10.0").kernel == "TRITON"


# bitsandbytes.py of 0.26.0, which 0.33.0 does not have.
@pytest.mark.parametrize("version", [version for version in VLLM if not since(version, "0.33")])
def test_experts_in_bitsandbytes_are_unpacked_for_triton_and_those_of_gpt_oss_refused(
    version: str,
) -> None:
    shape = MoeShape(
        hidden=2048,
        intermediate=768,
        experts=128,
        scheme=Scheme(kind="bnb", bits=4),
        origin="bitsandbytes",
        dtype="bfloat16",
        function="silu",
        routing="renormalize",
        family="qwen3_moe",
    )
    choice = choose_moe(RULES[version], shape, "8.9")
    assert (choice.status, choice.kernel, choice.method) == (
        "ok",
        "TRITON",
        "BitsAndBytesMoEMethod",
    )
    assert choose_moe(RULES[version], shape, "8.9", forced_backend="marlin").kernel == "TRITON"
    refusal = choose_moe(RULES[version], shape._replace(family="gpt_oss", bias=True), "8.9")
    assert (refusal.status, refusal.kernel) == ("none", None)
    assert "without weights" in refusal.refusals[0].reason


def test_a_width_of_352_is_padded_for_marlin_since_a_version_and_uses_triton_before() -> None:
    assert (wna16("0.26.0", 352).kernel, wna16("0.26.0", 352).padded_to) == ("MARLIN", (2816, 384))
    early = wna16("0.19.1", 352)
    assert early.kernel == "MoeWNA16Method"
    assert "Triton" in early.note
    # AutoRound's own path never pads.
    assert wna16(NEWEST_VLLM, 352, origin="auto-round").kernel == "TRITON"


@pytest.mark.parametrize("version", ["0.18.0", "0.19.1", "0.26.0"])
def test_4_bit_experts_of_2880_in_groups_of_32_load_and_would_crash(version: str) -> None:
    """A block of 96 divides 2880, and three groups are not a number that the kernel has code for.
    Seen on an H200."""

    def choice(hidden: int, group: int) -> MoeChoice:
        shape = MoeShape(
            hidden=hidden,
            intermediate=hidden,
            experts=32,
            scheme=Scheme(kind="wna16", bits=4, group=group),
            origin="compressed-tensors",
            dtype="bfloat16",
            routing="renormalize",
        )
        return choose_moe(RULES[version], shape, "9.0")

    crash = choice(2880, 32)
    assert (crash.status, crash.kernel) == ("crash", "CompressedTensorsWNA16MoEMethod")
    assert (
        "a block of 96 of K=2880 has 3 groups of 32, and the kernel takes 1 or 2 or 4 or 8"
        in crash.note
    )
    assert [product for product, _ in crash.crashes] == ["w13", "w2"]
    assert choice(2880, 64).status == "ok"
    assert choice(2944, 32).status == "ok"


@pytest.mark.parametrize("version", ["0.5.10.post1", "0.5.23"])
def test_triton_that_is_asked_of_sglang_computes_experts_of_16_and_8_bits(version: str) -> None:
    """Their methods take the runner that is named: create_moe_runner in
    srt/layers/quantization/unquant.py and fp8.py. Those of GPTQ assert that none is."""
    engine = Profiles().engine(f"sglang=={version}")
    rules = Profiles().rules([engine])[engine.ref].moe
    assert rules is not None

    def choice(scheme: Scheme, origin: str, forced: str, capability: str) -> MoeChoice:
        sizes: dict[str, Any] = {"hidden": 2048, "intermediate": 768, "experts": 128}
        shape = MoeShape(
            **sizes, scheme=scheme, origin=origin, dtype="bfloat16", routing="renormalize",
            family="qwen3_moe",
        )  # fmt: skip
        return choose_moe(rules, shape, capability, forced_backend=forced)

    plain = (Scheme(kind="unquantized"), "")
    block = (Scheme(kind="fp8_block", bits=8, group=128), "fp8")
    gptq = (Scheme(kind="wna16", bits=4, group=128), "gptq")
    for capability in ("9.0", "10.0"):
        assert choice(*plain, "triton", capability).kernel == "triton"
        assert choice(*block, "triton", capability).kernel == "triton"
    assert choice(*block, "auto", "10.0").kernel == "flashinfer_trtllm"
    for case in ((*block, "deep_gemm"), (*gptq, "triton")):
        assert choice(*case, "9.0").status == "unknown"
    # The older version has no described answer for it.
    forced_kernel = {"0.5.10.post1": None, "0.5.23": "flashinfer_cutlass"}[version]
    assert choice(*plain, "flashinfer_cutlass", "9.0").kernel == forced_kernel


@pytest.mark.parametrize(
    ("version", "capability", "clamped", "kernel"),
    [
        ("0.26.0", "10.0", True, "FLASHINFER_TRTLLM"),
        ("0.26.0", "12.0", True, "FLASHINFER_CUTLASS"),
        ("0.26.0", "11.0", True, "MARLIN"),
        ("0.26.0", "11.0", False, "VLLM_CUTLASS"),
        ("0.33.0", "11.0", True, "VLLM_CUTLASS"),
    ],
)
def test_a_limit_of_the_activation_leaves_out_the_backends_that_ignore_it(
    version: str, capability: str, clamped: bool, kernel: str
) -> None:
    shape = MoeShape(
        hidden=4096,
        intermediate=2048,
        experts=256,
        scheme=Scheme(kind="nvfp4", bits=4, group=16),
        origin="fp8",
        dtype="bfloat16",
        clamped=clamped,
    )
    assert choose_moe(RULES[version], shape, capability).kernel == kernel


@pytest.mark.parametrize(
    ("version", "capability", "kernel"),
    [
        ("0.26.0", "9.0", "MARLIN"),
        ("0.26.0", "10.0", "FLASHINFER_TRTLLM_MXFP4_MXFP8"),
        ("0.26.0", "12.0", "DEEPGEMM_MXFP4"),
        ("0.33.0", "10.0", "FLASHINFER_TRTLLM_MXFP4_MXFP8"),
    ],
)
def test_mxfp4_experts_of_an_fp8_checkpoint_have_their_own_kernel(
    version: str, capability: str, kernel: str
) -> None:
    shape = MoeShape(
        hidden=4096,
        intermediate=2048,
        experts=256,
        scheme=MXFP4,
        origin="fp8",
        dtype="bfloat16",
    )
    assert choose_moe(RULES[version], shape, capability).kernel == kernel


def test_every_refusal_is_kept_with_its_numbers() -> None:
    scheme = Scheme(kind="fp8_token", bits=8)
    shape = MoeShape(
        hidden=2048,
        intermediate=768,
        experts=128,
        scheme=scheme,
        origin="compressed-tensors",
        dtype="bfloat16",
        routing="sigmoid",
    )
    choice = choose_moe(RULES[NEWEST_VLLM], shape, "8.6")
    assert choice.kernel == "MARLIN"
    reasons = {refusal.kernel: refusal.reason for refusal in choice.refusals}
    assert reasons["TRITON"] == "needs compute capability 8.9 or higher, this GPU has 8.6"
    assert list(reasons) == [
        "FLASHINFER_TRTLLM",
        "FLASHINFER_CUTLASS",
        "DEEPGEMM",
        "VLLM_CUTLASS",
        "TRITON",
    ]


def test_a_router_that_is_not_known_matters_only_where_a_backend_asks() -> None:
    shape = MoeShape(
        hidden=2048,
        intermediate=768,
        experts=128,
        scheme=Scheme(kind="unquantized", bits=16),
        dtype="bfloat16",
    )
    assert choose_moe(RULES[NEWEST_VLLM], shape, "9.0").kernel == "TRITON"
    assert choose_moe(RULES[NEWEST_VLLM], shape, "10.0").status == "unknown"


def test_a_forced_backend_stands_alone_and_a_wrong_one_is_refused() -> None:
    shape = MoeShape(
        hidden=2048,
        intermediate=768,
        experts=128,
        scheme=Scheme(kind="unquantized", bits=16),
        dtype="bfloat16",
        routing="renormalize",
    )
    assert (
        choose_moe(RULES[NEWEST_VLLM], shape, "9.0", forced_backend="flashinfer_cutlass").kernel
        == "FLASHINFER_CUTLASS"
    )
    assert choose_moe(RULES[NEWEST_VLLM], shape, "9.0", forced_backend="auto").kernel == "TRITON"
    choice = choose_moe(RULES[NEWEST_VLLM], shape, "9.0", forced_backend="deep_gemm")
    assert (choice.status, choice.refusals[0].kernel) == ("none", "--moe-backend deep_gemm")


# --- the data and the evaluator hold together ---


@pytest.mark.parametrize("version", VLLM)
def test_the_rules_name_only_backends_that_they_describe_and_describe_none_in_vain(
    version: str,
) -> None:
    rules = RULES[version]
    names = {
        name
        for method in rules.methods
        for names in (method.backends, *method.backends_by_flag.values())
        for name in names
    }
    assert names == set(rules.backends)
    assert all(method.backends or method.refuses for method in rules.methods)
    for source in [method.source for method in rules.methods] + [
        backend.source for backend in rules.backends.values()
    ]:
        assert tells_the_line(source)


def test_a_list_with_a_backend_that_is_not_described_is_refused() -> None:
    method: dict[str, Any] = {
        "name": "M",
        "match": {"schemes": ["int8"]},
        "source": "a.py:1",
        "backends": ["int8 TRITON"],
    }
    backends = {"int8 TRITON": {"source": "a.py:2"}, "int8 HUMMING": {"source": "a.py:3"}}
    MoeRules.model_validate({"packages": [], "methods": [method], "backends": backends})
    with pytest.raises(ValueError, match="lists int8 TRITON, which `backends` does not describe"):
        MoeRules.model_validate({"packages": [], "methods": [method], "backends": {}})
    method["moves"] = [{"when": {}, "name": "int8 HUMMING", "to": "front"}]
    with pytest.raises(ValueError, match="moves int8 HUMMING but does not list it"):
        MoeRules.model_validate({"packages": [], "methods": [method], "backends": backends})


shapes = st.builds(
    MoeShape,
    hidden=st.integers(1, 1 << 40),
    intermediate=st.integers(1, 1 << 40),
    experts=st.integers(1, 1 << 20),
    scheme=SCHEMES,
    origin=st.sampled_from(
        ["", "gptq", "awq", "auto-round", "compressed-tensors", "fp8", "modelopt", "mxfp4", "frobq"]
    ),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", ""]),
    function=st.sampled_from(["silu", "gelu", "relu2_no_mul", "swigluoai", "frob"]),
    routing=st.sampled_from(["", "renormalize", "default", "deepseek"]),
    bias=st.booleans(),
    ep=st.booleans(),
)


@settings(max_examples=examples(150))
@given(
    version=st.sampled_from(VLLM),
    shape=shapes,
    capability=st.sampled_from([*CAPABILITIES, "7.0", "8.7", "11.0", "13.0"]) | st.text(max_size=5),
    forced=st.none() | st.sampled_from(["auto", "marlin", "triton", "humming", "none such"]),
)
def test_any_experts_get_the_same_answer_twice_and_never_an_error(
    version: str, shape: MoeShape, capability: str, forced: str | None
) -> None:
    choice = choose_moe(RULES[version], shape, capability, forced_backend=forced)
    assert choice == choose_moe(RULES[version], shape, capability, forced_backend=forced)
    assert (choice.kernel is not None) == (choice.status in ("ok", "crash"))
    assert choice.kernel or choice.refusals
    assert all(refusal.reason for refusal in choice.refusals)
    if choice.padded_to:
        assert choice.padded_to[0] >= shape.hidden
        assert choice.padded_to[1] >= shape.intermediate
