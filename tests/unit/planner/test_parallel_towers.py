"""Vision towers whose heads the ranks cannot share: cut, whole on every rank, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Decision
from tests.conformance.forecast_cases import family_configs
from tests.support.published import config
from tests.support.reported_plans import make_decision, rejection_of

# 16 heads in the tower, and a text model that three ranks can share.
TEXT = config("qwen3-vl-8b")["text_config"]
THREE = config(
    "qwen3-vl-8b",
    text_config=TEXT | {"num_attention_heads": 24, "num_key_value_heads": 3, "vocab_size": 152064},
)
REASON = "the 16 heads of its vision tower cannot be shared by 3 GPUs"


def decision_of(fields: dict[str, Any], engine: str, hardware: str, **wishes: Any) -> Decision:
    return make_decision(fields, hardware, engine, **wishes)


@pytest.mark.parametrize("version", ["0.19.1", "0.26.0", "0.33.0"])
def test_a_tower_that_three_ranks_cannot_share_is_refused_with_its_cure(version: str) -> None:
    ref = f"vllm=={version}"
    rejection = rejection_of(decision_of(THREE, ref, "3x3090", tensor_parallel=3), 3)
    assert rejection.verdict == "illegal_parallelism"
    assert rejection.reasons[0] == (
        f"{REASON}; --arg mm-encoder-tp-mode=data keeps it whole on every GPU"
    )
    kept_decision = decision_of(
        THREE, ref, "3x3090", tensor_parallel=3, args={"mm-encoder-tp-mode": "data"}
    )
    assert [plan.tensor_parallel.value for plan in kept_decision.plans] == [3]


def test_a_whole_tower_costs_its_weights_on_every_rank() -> None:
    fields = config("qwen3-vl-8b")
    cut, whole = (
        decision_of(fields, "vllm==0.33.0", "2x3090", tensor_parallel=2, args=args).plans[0]
        for args in ({}, {"mm-encoder-tp-mode": "data"})
    )
    vision = fields["vision_config"]
    blocks = vision["depth"] * (
        4 * vision["hidden_size"] ** 2 + 2 * vision["hidden_size"] * vision["intermediate_size"]
    )
    extra_bytes = whole.memory.weights_bytes - cut.memory.weights_bytes
    assert blocks <= extra_bytes <= 1.6 * blocks  # 2 bytes each, halved; with the mergers


@pytest.mark.parametrize(
    ("version", "legal"), [("0.19.1", False), ("0.26.0", True), ("0.33.0", True)]
)
def test_kimi_k25_falls_back_to_a_whole_tower_in_the_versions_that_do(
    version: str, legal: bool
) -> None:
    """Its class gives is_vit_use_data_parallel the number of heads from 0.26.0 on."""
    fields = family_configs()["kimi_k25"]
    vision = fields["vision_config"] | {"num_attention_heads": 12}
    decision = decision_of(
        fields | {"vision_config": vision}, f"vllm=={version}", "8xb200", tensor_parallel=8
    )
    verdicts = {rejection.verdict for rejection in decision.rejected}
    assert ("illegal_parallelism" not in verdicts) == legal


def test_kimi_k3_shares_eight_gpus_with_its_tower_of_twelve_heads() -> None:
    decision = decision_of(family_configs()["kimi_k3"], "vllm==0.33.0", "8xb200", tensor_parallel=8)
    assert {rejection.verdict for rejection in decision.rejected} == {"no_memory"}


def test_a_text_model_that_cannot_be_shared_is_the_reason_before_its_tower() -> None:
    rejection = rejection_of(
        decision_of(config("qwen3-vl-8b"), "vllm==0.33.0", "3x3090", tensor_parallel=3), 3
    )
    assert rejection.reasons[0] == "32 attention heads cannot be shared by 3 GPUs"
