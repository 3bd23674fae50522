"""Dense linear kernels: the rules of each vLLM version agree with that version's own selection
code, and read well."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engines.common.kernels.linear import (
    KernelChoice,
    LinearRules,
    choose,
    disabling,
)
from gateway.models.scheme import LinearShape, Scheme
from tests.conformance.linear_questions import CAPABILITIES
from tests.support.engine_rules import SCHEMES, read_rules, tells_the_line
from tests.support.examples import examples
from tests.support.versions import NEWEST_VLLM, VLLM, vllm_since

RULES = {version: read_rules(LinearRules, "linear", version) for version in VLLM}


def wna16(
    version: str,
    capability: str,
    k: int,
    n: int,
    group: int,
    dtype: str = "bfloat16",
    **fields: Any,
) -> KernelChoice:
    shape = LinearShape(k=k, n=n, scheme=Scheme(kind="wna16", bits=4, group=group), dtype=dtype)
    return choose(RULES[version], shape, capability, **fields)


def fp8(version: str, capability: str, kind: Any = "fp8_token", **fields: Any) -> KernelChoice:
    shape = LinearShape(k=4096, n=4096, scheme=Scheme(kind=kind, bits=8), dtype="bfloat16")
    return choose(RULES[version], shape, capability, **fields)


# --- the cases that people reported ---


def test_a_narrow_projection_has_six_refusals_and_no_kernel_in_0_19() -> None:
    choice = wna16("0.19.1", "8.6", k=2048, n=32, group=128)
    assert choice.status == "none"
    assert [(refusal.kernel, refusal.reason) for refusal in choice.refusals] == [
        ("CutlassW4A8LinearKernel", "runs on compute capability 9.0, this GPU has 8.6"),
        ("MacheteLinearKernel", "runs on compute capability 9.0, this GPU has 8.6"),
        ("AllSparkLinearKernel", "takes group size -1, not 128"),
        ("MarlinLinearKernel", "N=32 is not a multiple of 64 (32 over)"),
        ("ConchLinearKernel", "the package conch is not installed"),
        ("ExllamaLinearKernel", "takes activations in float16, not bfloat16"),
    ]


@pytest.mark.parametrize("version", vllm_since("0.26"))
def test_later_versions_pad_a_narrow_projection_to_a_marlin_tile(version: str) -> None:
    choice = wna16(version, "8.6", k=2048, n=32, group=128)
    assert (choice.status, choice.kernel, choice.padded_to) == (
        "ok",
        "MarlinLinearKernel",
        (2048, 64),
    )


def test_float16_leaves_a_narrow_projection_exllama_in_0_19() -> None:
    assert (
        wna16("0.19.1", "8.6", k=2048, n=32, group=128, dtype="float16").kernel
        == "ExllamaLinearKernel"
    )


def test_marlin_computes_the_whole_projection_of_one_rank() -> None:
    assert wna16("0.19.1", "8.6", k=2048, n=64, group=128).kernel == "MarlinLinearKernel"


def test_k_2112_with_groups_of_32_needs_the_other_marlin_tile() -> None:
    old = wna16("0.19.1", "8.6", k=2112, n=4096, group=32)
    assert old.status == "none"
    assert "K=2112 is not a multiple of 128 (64 over)" in [
        refusal.reason for refusal in old.refusals
    ]
    new = wna16("0.26.0", "8.6", k=2112, n=4096, group=32)
    assert (new.kernel, new.padded_to) == ("MarlinLinearKernel", None)


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [("8.9", "TritonFp8BlockScaledMMKernel"), ("9.0", "CutlassFp8BlockScaledMMKernel")],
)
def test_fp8_in_blocks_loads_with_2112_inputs_and_would_crash(capability: str, kernel: str) -> None:
    """Its activations are quantized in whole groups of 128."""

    def choice(k: int) -> KernelChoice:
        shape = LinearShape(
            k=k, n=4096, scheme=Scheme(kind="fp8_block", bits=8, group=128), dtype="bfloat16"
        )
        return choose(RULES["0.26.0"], shape, capability)

    assert (choice(2112).kernel, choice(2112).status) == (kernel, "crash")
    assert "K=2112 is not a multiple of 128 (64 over)" in choice(2112).note
    assert choice(2176).status == "ok"


@pytest.mark.parametrize("n", [2736, 5472])
def test_marlin_repacks_fp8_in_whole_tiles_until_it_pads(n: int) -> None:
    """The first MLP of GLM-4.5-Air on 8 and on 4 ranks, on GPUs without products of FP8."""

    def choice(version: str, columns: int) -> KernelChoice:
        shape = LinearShape(
            k=4096, n=columns, scheme=Scheme(kind="fp8_token", bits=8), dtype="bfloat16"
        )
        return choose(RULES[version], shape, "8.6")

    for version, kernel in (("0.18.0", "Marlin"), ("0.19.1", "MarlinFP8ScaledMMLinearKernel")):
        crash = choice(version, n)
        assert (crash.kernel, crash.status) == (kernel, "crash")
        assert f"N={n} is not a multiple of 64 ({n % 64} over)" in crash.note
        assert choice(version, 10944).status == "ok"
    padded = choice("0.26.0", n)
    assert (padded.status, padded.kernel) == ("ok", "MarlinFP8ScaledMMLinearKernel")


def test_a_group_that_straddles_ranks_is_beyond_padding() -> None:
    shape = LinearShape(
        k=576, n=4096, full_k=1152, scheme=Scheme(kind="wna16", group=128), dtype="bfloat16"
    )
    assert choose(RULES[NEWEST_VLLM], shape, "8.6").kernel == "HummingLinearKernel"
    without = choose(RULES[NEWEST_VLLM], shape, "8.6", packages=frozenset())
    assert without.status == "none"
    reasons = {refusal.kernel: refusal.reason for refusal in without.refusals}
    assert reasons["MarlinLinearKernel"] == "K=576 is not a multiple of the group size 128"
    assert reasons["HummingLinearKernel"] == "the package humming is not installed"


def test_the_next_fp8_kernel_takes_over_from_a_disabled_cutlass_on_gb10() -> None:
    assert fp8("0.18.0", "12.1").kernel == "CutlassFP8ScaledMMLinearKernel"
    choice = fp8("0.18.0", "12.1", variables=disabling(["CutlassFP8ScaledMMLinearKernel"]))
    assert choice.kernel == "ChannelWiseTorchFP8ScaledMMLinearKernel"
    reasons = {refusal.kernel: refusal.reason for refusal in choice.refusals}
    assert reasons["CutlassFP8ScaledMMLinearKernel"] == "disabled by VLLM_DISABLED_KERNELS"


def test_0_18_computes_fp8_with_marlin_where_the_gpu_has_no_fp8() -> None:
    assert fp8("0.18.0", "8.6").kernel == "Marlin"
    assert fp8("0.18.0", "8.9").kernel == "CutlassFP8ScaledMMLinearKernel"


# --- overrides ---


def test_a_forced_backend_is_the_only_candidate() -> None:
    choice = wna16("0.26.0", "8.6", k=4096, n=4096, group=128, forced_backend="machete")
    assert choice.status == "none"
    assert [refusal.kernel for refusal in choice.refusals] == ["MacheteLinearKernel"]
    assert (
        wna16("0.26.0", "8.6", k=4096, n=4096, group=128, forced_backend="auto").kernel
        == "MarlinLinearKernel"
    )


def test_a_backend_without_kernel_is_refused_by_0_26_and_ignored_by_0_33() -> None:
    assert fp8("0.26.0", "8.6", forced_backend="machete").status == "none"
    assert (
        fp8(NEWEST_VLLM, "8.6", forced_backend="machete").kernel == "MarlinFP8ScaledMMLinearKernel"
    )


def test_a_backend_that_the_version_does_not_have_is_unknown() -> None:
    assert (
        wna16("0.19.1", "8.6", k=4096, n=4096, group=128, forced_backend="marlin").status
        == "unknown"
    )
    assert (
        wna16(NEWEST_VLLM, "8.6", k=4096, n=4096, group=128, forced_backend="marlyn").status
        == "unknown"
    )


def test_a_package_that_is_missing_changes_the_answer() -> None:
    assert fp8("0.26.0", "10.0", "fp8_block").kernel == "DeepGemmFp8BlockScaledMMKernel"
    bare = fp8("0.26.0", "10.0", "fp8_block", packages=frozenset())
    assert bare.kernel == "CutlassFp8BlockScaledMMKernel"
    assert any(
        refusal.reason == "the package deep_gemm is not installed" for refusal in bare.refusals
    )


def test_a_scheme_that_the_version_does_not_describe_is_unknown_not_refused() -> None:
    shape = LinearShape(
        k=4096, n=4096, scheme=Scheme(kind="mxfp8", bits=8, group=32), dtype="bfloat16"
    )
    assert choose(RULES["0.19.1"], shape, "8.6").status == "unknown"
    assert choose(RULES[NEWEST_VLLM], shape, "8.6").kernel == "MarlinMxfp8LinearKernel"


def test_act_order_is_turned_away_by_0_33_before_any_kernel() -> None:
    shape = LinearShape(
        k=4096, n=4096, scheme=Scheme(kind="wna16", group=128, act_order=True), dtype="float16"
    )
    assert choose(RULES["0.26.0"], shape, "8.6").kernel == "MarlinLinearKernel"
    choice = choose(RULES[NEWEST_VLLM], shape, "8.6")
    assert choice.status == "none"
    assert "desc_act" in choice.refusals[0].reason


# --- the data and the evaluator hold together ---


@pytest.mark.parametrize("version", VLLM)
def test_the_rules_name_only_kernels_that_they_describe(version: str) -> None:
    rules = RULES[version]
    assert {kernel for path in rules.paths for kernel in path.kernels} == set(rules.kernels)
    assert {kernel for kernels in rules.backends.values() for kernel in kernels} <= set(
        rules.kernels
    )
    assert all(path.kernels or path.refuses for path in rules.paths)
    for source in [path.source for path in rules.paths] + [
        kernel.source for kernel in rules.kernels.values()
    ]:
        assert tells_the_line(source)


def test_a_list_with_a_kernel_that_is_not_described_is_refused() -> None:
    path: dict[str, Any] = {
        "match": {"schemes": ["wna16"]},
        "source": "a.py:1",
        "kernels": ["Marlin"],
    }
    kernels = {"Marlin": {"source": "a.py:2"}, "Humming": {"source": "a.py:3"}}
    LinearRules.model_validate({"packages": [], "paths": [path], "kernels": kernels})
    with pytest.raises(ValueError, match="lists Marlin, which `kernels` does not describe"):
        LinearRules.model_validate({"packages": [], "paths": [path], "kernels": {}})
    path["moves"] = [{"when": {"capabilities": ["9.0"]}, "name": "Humming", "before": "Marlin"}]
    with pytest.raises(ValueError, match="moves Humming before Marlin but does not list both"):
        LinearRules.model_validate({"packages": [], "paths": [path], "kernels": kernels})


shapes = st.builds(
    LinearShape,
    k=st.integers(1, 1 << 40),
    n=st.integers(1, 1 << 40),
    scheme=SCHEMES,
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "", "int3"]),
    full_k=st.none() | st.integers(-4, 1 << 40),
)
names = st.sampled_from(sorted({name for rules in RULES.values() for name in rules.kernels}))
capabilities = st.sampled_from([*CAPABILITIES, "7.0", "8.7", "11.0", "13.0"]) | st.text(max_size=5)


@settings(max_examples=examples(150))
@given(
    version=st.sampled_from(VLLM),
    shape=shapes,
    capability=capabilities,
    disabled=st.frozensets(names, max_size=4),
    forced=st.none()
    | st.sampled_from(["auto", "marlin", "torch", "humming", "conch", "none such"]),
)
def test_any_layer_gets_the_same_answer_twice_and_never_an_error(
    version: str, shape: LinearShape, capability: str, disabled: frozenset[str], forced: str | None
) -> None:
    choice = choose(
        RULES[version], shape, capability, variables=disabling(disabled), forced_backend=forced
    )
    assert choice == choose(
        RULES[version], shape, capability, variables=disabling(disabled), forced_backend=forced
    )
    assert (choice.kernel is not None) == (choice.status in ("ok", "crash"))
    # A layer without a kernel has a reason of each; one that would crash, its own.
    assert choice.refusals or choice.status == "ok" or (choice.status == "crash" and choice.note)
    assert all(refusal.reason for refusal in choice.refusals)
    assert choice.kernel not in {refusal.kernel for refusal in choice.refusals}
    if choice.padded_to:
        assert choice.padded_to[0] >= shape.k
        assert choice.padded_to[1] >= shape.n
