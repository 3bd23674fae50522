"""A gap between rules and engine."""

from __future__ import annotations

from gateway.domain import RuleGap

GAP = RuleGap(
    engine="vllm==0.28.0",
    rules="vllm==0.26.0",
    source="sha256:0123",
    capability="8.6",
    model="LlamaForCausalLM",
    argv=("--dtype=bfloat16",),
    subject="weights",
    forecast="1 bytes on a rank",
    answer="2 bytes on a rank",
)
