"""Quantization methods as a whole: each version's own verdict, for every checkpoint,
--quantization, GPU and dtype."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import Quant
from gateway.planner.quantization_methods import MethodRefusalError, check, resolve
from tests.conformance.method_questions import BLOCKS, CAPABILITIES
from tests.support.method_plans import PROFILES, make_decision
from tests.support.versions import NEWEST_VLLM


def test_a_refusal_quotes_the_engine_with_its_source() -> None:
    modelopt = make_decision("0.18.0", "8xa100-80g", BLOCKS["modelopt FP8"]).rejected[0]
    assert modelopt.verdict == "unsupported_quantization"
    assert (
        "modelopt of vllm==0.18.0 needs compute capability 8.9, this GPU has 8.0"
        in modelopt.reasons[0]
    )
    assert modelopt.source == "profile vllm==0.18.0"
    assert make_decision(NEWEST_VLLM, "8xa100-80g", BLOCKS["modelopt FP8"]).plans
    bnb = make_decision(NEWEST_VLLM, "3090", BLOCKS["bitsandbytes"]).rejected[0]
    assert f"vllm=={NEWEST_VLLM} has no quantization method bitsandbytes" in bnb.reasons[0]


def test_a_plan_names_the_engines_quantization_method() -> None:
    old, new = (
        make_decision(version, "3090", BLOCKS["gptq 4"]).plans[0].quantization
        for version in ("0.19.1", NEWEST_VLLM)
    )
    assert (old.value, new.value) == ("gptq", "gptq")
    assert "vllm==0.19.1 loads it as gptq_marlin" in old.reason
    assert f"vllm=={NEWEST_VLLM} loads it as auto_gptq" in new.reason


def test_the_quantization_that_a_user_asks_for_must_be_the_checkpoints() -> None:
    wrong = make_decision(
        "0.19.1", "3090", BLOCKS["awq 4"], args={"quantization": "gptq"}
    ).rejected[0]
    assert (
        "the checkpoint is quantized with awq, which vllm==0.19.1 does not load as --quantization"
        " gptq" in wrong.reasons[0]
    )
    assert make_decision(
        "0.19.1", "3090", BLOCKS["awq 4"], args={"quantization": "awq_marlin"}
    ).plans
    assert (
        make_decision("0.19.1", "3090", None, args={"quantization": "awq"}).rejected[0].verdict
        == "unsupported_quantization"
    )
    rejection = make_decision(NEWEST_VLLM, "3090", None, args={"quantization": "humming"}).rejected[
        0
    ]
    assert "is not known here" in rejection.reasons[0]


def test_activations_that_the_method_takes_are_a_repair_unless_the_user_set_others() -> None:
    # The plain GPTQ kernels, which 3-bit weights need, compute float16 alone.
    best = make_decision("0.19.1", "3090", BLOCKS["gptq 3"]).plans[0]
    assert best.dtype.value == "float16"
    assert "gptq of vllm==0.19.1 takes float16 activations, not bfloat16" in best.dtype.reason
    assert not make_decision("0.19.1", "3090", BLOCKS["gptq 3"], dtype="bfloat16").plans


def test_a_deprecated_method_runs_where_the_user_lets_it() -> None:
    block = {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head"],
    }
    rejection = make_decision(NEWEST_VLLM, "8xh100", block).rejected[0]
    assert "--allow-deprecated-quantization" in rejection.reasons[0]
    decision = make_decision(
        NEWEST_VLLM, "8xh100", block, args={"allow-deprecated-quantization": True}
    )
    assert not any(
        "--allow-deprecated-quantization" in rejection.reasons[0] for rejection in decision.rejected
    )


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.text(max_size=6)
    | st.lists(st.integers(), max_size=2)
)
_NAMES = [
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "zero_point",
    "quant_algo",
    "quantization",
    "quantized_layers",
]
_BLOCKS = st.dictionaries(
    st.sampled_from(_NAMES), _VALUES | st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=2)
)


@settings(deadline=None)
@given(
    ref=st.sampled_from(list(PROFILES.engine_files)),
    method=st.sampled_from(
        ["gptq", "awq", "modelopt", "compressed_tensors", "fp8", "none", "", "\ud800"]
    )
    | st.text(max_size=8),
    block=_BLOCKS,
    user=st.sampled_from(["", "fp8", "gptq_marlin", "humming", "moe_wna16"]),
    capability=st.sampled_from([None, *CAPABILITIES]),
)
def test_no_block_breaks_the_method(
    ref: str, method: str, block: dict[str, object], user: str, capability: str | None
) -> None:
    engine = PROFILES.engine(ref)
    with contextlib.suppress(MethodRefusalError):
        method_choice = resolve(
            engine, Quant(method=method, config=block), user, "llama", capability
        )
        check(engine, method_choice, capability, "float16")
        assert method_choice.method in engine.quantizations
