"""Predicted and measured memory, as a table for benchmarks/notebook/performance.md:
`python -m benchmarks.memory`."""

from __future__ import annotations

from gateway.domain.units import GIB
from tests.unit.engines.vllm.test_memory import MEASURED, best_plan


def main() -> None:
    print(
        "| start | runner | weights | activations | KV cache | tokens at full length | without the"
        " KV cache, in use |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in MEASURED.items():
        plan = best_plan(name)
        size = plan.memory
        if size is None or "kv_gib" not in row:
            continue
        tokens = round(size.full_requests * plan.max_model_len.value)
        seen = f"{row['used_gib'] - 0.6 - row['kv_gib']:.1f}" if "used_gib" in row else "-"
        print(
            f"| {name} | {row['runner']} | {size.weights_bytes / GIB:.2f} /"
            f" {row['weights_gib']:.2f} | {size.activation_bytes / GIB:.2f} /"
            f" {row.get('activation_gib', '-')} | {size.kv_bytes / GIB:.2f} / {row['kv_gib']:.2f} |"
            f" {tokens:,} / {row['kv_tokens']:,} ({tokens / row['kv_tokens'] - 1:+.2%}) |"
            f" {size.low / GIB:.1f} to {size.high / GIB:.1f} / {seen} |"
        )


if __name__ == "__main__":
    main()
