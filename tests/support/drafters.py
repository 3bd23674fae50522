"""Targets, drafters and their speculation."""

from __future__ import annotations

import json
from typing import Any

from gateway.domain import (
    AttentionGroup,
    Engine,
    LayerAttention,
    ModelSpec,
    TensorGroup,
    Wish,
)
from gateway.engines.common.layers.build import build
from gateway.engines.common.speculative.speculative import DraftTarget, speculate
from gateway.engines.common.speculative.speculative_rules import Speculation, SpeculativeRules
from gateway.models.drafter import Drafter
from gateway.models.rank import Rank
from gateway.models.read_drafter import read_drafter
from tests.conformance.speculative_questions import DRAFTERS
from tests.support.engine_rules import rule_document
from tests.support.paths import MODELS
from tests.support.versions import VLLM

RULES = {
    version: SpeculativeRules.model_validate(rule_document("vllm", version, "speculative"))
    for version in VLLM
}


def engine(version: str) -> Engine:
    return Engine(
        kind="vllm",
        version=version,
        device="cuda",
        image="",
        container_command=(),
        process_command=(),
    )


def attends(groups: tuple[AttentionGroup, ...]) -> tuple[LayerAttention, ...]:
    return tuple(row(group, "FLASH_ATTN", "ok") for group in groups)


def row(group: AttentionGroup, backend: str | None, status: Any) -> LayerAttention:
    return LayerAttention(
        kind=group.kind,
        layers=group.layers,
        head_dim=group.head_dim,
        backend=backend,
        status=status,
    )


def target(name: str, *, drafting: bool = True, **changes: Any) -> ModelSpec:
    """A spec with the fields that speculation reads, from tests/models/NAME.json."""
    config = json.loads((MODELS / f"{name}.json").read_text()) | changes
    text = config.get("text_config", config)
    heads = AttentionGroup(
        kind="full", layers=text["num_hidden_layers"], heads=32, kv_heads=8, head_dim=128
    )
    layer = TensorGroup(
        name="mtp.fc.weight",
        count=1,
        shape=(text["hidden_size"], 64),
        dtype="BF16",
        shard="replicated",
    )
    return ModelSpec(
        source=name,
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        dtype="bfloat16",
        max_position=4096,
        hidden=text["hidden_size"],
        vocab=text.get("vocab_size", 262208),
        attention=(heads,),
        tensors=(),
        draft_tensors=(layer,) if drafting else (),
        tensors_from="headers",
        config=config,
    )


def wish(**fields: Any) -> Wish:
    return Wish(name="model", source="org/model", **fields)


def speculation_of(
    spec: ModelSpec,
    drafter: Drafter | None,
    request: Wish,
    engine: Any,
    rules: SpeculativeRules | None,
    attends: Any,
    rank: Rank,
) -> Speculation:
    return speculate(DraftTarget(spec, rank, build, attends), drafter, request, engine, rules)


def drafter(name: str, spec: ModelSpec | None = None) -> Drafter:
    drafter = read_drafter(
        "org/EAGLE-drafter" if name == "eagle llama" else "org/drafter", None, DRAFTERS[name]
    )
    # Engines compare these sizes only when weights are loaded, or never: they are ours to compare.
    return (
        drafter
        if spec is None
        else drafter.evolve(target_hidden=spec.hidden, vocab=spec.vocab, target_layers=())
    )
