"""Patterns that a checkpoint brings: real ones pass, hostile ones never reach the matcher."""

import re
import time
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engines.common.quantization.safe_regex import SlowPatternError, refuse_slow_patterns
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import QUANTS
from tests.support.examples import quicker
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import VLLM_REF

NAME = "language_model.model.layers.37.mlp.shared_expert.gate_up_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        r".*mlp.gate$",
        r".*layers.0.self_attn.(q|k|v)_proj",
        r"^(?!.*(?:mlp|self_attn)).*$",
        r"model\.layers\.(?:[0-9]|1[0-9]|2[0-9])\.mlp\.experts\.[0-9]+\.(gate|up|down)_proj",
        r".*\.layers\.\d+\.mlp\.experts\.\d+\..*_proj",
        r"visual\.blocks\.\d+\.attn\.(qkv|proj)",
        r"[^.]+\.lm_head",
        rf"model\.layers\.({'|'.join(map(str, range(30)))})\.mlp\..*",
    ],
)
def test_patterns_as_they_are_published_pass(pattern: str) -> None:
    refuse_slow_patterns([pattern] * 3)
    refuse_slow_patterns([pattern], matches_anywhere=True)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(.+)+\d\d\d$",
        r"(.|.)*x",
        r"(?:\w{1,9}){2,}x",
        ".*" * 8 + "x",
        "(.|.)" * 30 + "x",
        ".?" * 40 + "x",
        r"(\w|_)*?$",
    ],
)
def test_hostile_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(SlowPatternError, match="could take for ever"):
        refuse_slow_patterns([pattern])


def test_many_patterns_are_refused_together() -> None:
    refuse_slow_patterns([".*a.*b.*c$"])
    with pytest.raises(SlowPatternError):
        refuse_slow_patterns([".*a.*b.*c$"] * 10)


@settings(max_examples=quicker(60), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [".", r"\w", "a", r"\d", "[a-z_.]", "*", "+", "?", "{2,}", "(", "|", ")", "x"]
        ),
        max_size=24,
    ).map("".join)
)
def test_an_accepted_pattern_is_matched_quickly(pattern: str) -> None:
    try:
        refuse_slow_patterns([pattern])
        expression = re.compile(pattern)
    except (SlowPatternError, re.error):
        return
    # CPU time, the best of several tries: a pattern that passes costs less than this one, an
    # endless one millions of times as much.
    assert any(cost(expression) < 1000 * cost(CUBIC) for _ in range(5))


CUBIC = re.compile(".*.*.*!")


def cost(pattern: re.Pattern[str]) -> float:
    began = time.process_time()
    pattern.match(NAME)
    return time.process_time() - began


BLOCKS = {
    "compressed": {**QUANTS["w4a16"], "ignore": ["re:(.+)+\\d\\d\\d$"]},
    "targets": {
        **QUANTS["w4a16"],
        "config_groups": {
            "g": {**QUANTS["w4a16"]["config_groups"]["group_0"], "targets": ["re:(.|.)*x"]}
        },
    },
    "gptq": {**QUANTS["gptq"], "dynamic": {"-:(.+)+\\d\\d\\d$": {}}},
    "auto-round": {**QUANTS["auto-round"], "extra_config": {"(.+)+\\d\\d\\d$": {"bits": 8}}},
}


@pytest.mark.parametrize(("name", "ref"), list(product(BLOCKS, ["vllm==0.19.1", VLLM_REF])))
def test_a_checkpoint_with_a_hostile_pattern_is_refused_in_words(name: str, ref: str) -> None:
    profiles = Profiles()
    engines = [profiles.engine(ref)]
    spec = published_model("llama-3.1-8b", quantization_config=BLOCKS[name])
    decision = decide(
        spec, profiles.hardware("2x3090"), engines, wish(), rules=profiles.rules(engines)
    )
    assert not decision.plans
    assert {rejection.verdict for rejection in decision.rejected} == {"unsupported_quantization"}
    assert "could take for ever" in decision.rejected[0].reasons[0]
