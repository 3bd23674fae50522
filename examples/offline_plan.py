"""Plan a model for machines that are not here. No gateway, GPU or engine is needed.

python examples/offline_plan.py MODEL_FOLDER_OR_REPOSITORY 2x3090 8xh100
"""

from __future__ import annotations

import sys

import gateway


def main() -> None:
    source, *machines = sys.argv[1:]
    for machine in machines or ["2x3090"]:
        decision = gateway.plan(source, hardware=machine, engines=["vllm"])
        if not decision.plans:
            print(f"{machine}: no plan: {decision.rejected[0].reasons[0]}")
            continue
        best = decision.plans[0]
        print(
            f"{machine}: {best.engine}, {best.tensor_parallel.value} GPU,"
            f" {best.max_model_len.value:,} tokens of context ({best.max_model_len.reason})"
        )


if __name__ == "__main__":
    main()
