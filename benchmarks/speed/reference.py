"""The `reference` of profiles/speed.yaml from a `fitserve calibrate`.

    python benchmarks/speed/reference.py FACTS.json

FACTS.json: output of `fitserve calibrate --json` on the machine of the fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from gateway.domain import Fact
from gateway.engines.common.kernels.cards import Card
from gateway.engines.common.speed.gpu_measurements import Number, fit_reduce
from gateway.profiles.profiles import Profiles


def reference(facts: Iterable[Fact], card: Card, source: str) -> dict[str, Any]:
    """The parts of this card's data sheet, of the median GPU and of two GPUs."""
    values: dict[str, list[int]] = {}
    sizes: dict[int, Number] = {}
    for fact in facts:
        if fact.kind != "machine_speed" or not fact.value:
            continue
        if fact.scope["what"] == "all_reduce" and fact.scope["gpus"].count(",") == 1:
            sizes[int(fact.scope["bytes"])] = Number(fact.value / 1e9, "")
        values.setdefault(fact.scope["what"], []).append(fact.value)
    sheet = {"bfloat16": card.bf16_tflops, "fp8": card.fp8_tflops, "int8": card.int8_tops}
    flops = {
        name: round(statistics.median(values[name]) / peak / 1e12, 3)
        for name, peak in sheet.items()
        if peak and name in values
    }
    found: dict[str, Any] = {
        "source": source,
        "memory": round(statistics.median(values["memory"]) / card.memory_gb_s / 1e9, 3),
    }
    found["flops"] = flops
    if (wire := fit_reduce(sizes, 2)) is not None and card.nvlink_gb_s:
        part = round(wire.bytes_s / card.nvlink_gb_s / 1e9, 3)
        found["nvlink"] = {"part": part, "latency_s": float(f"{wire.latency_s:.3g}")}
    found["launch_s"] = float(f"{statistics.median(values['launch']) / 1e9:.3g}")
    return {"reference": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--card", default="NVIDIA H200")
    args = parser.parse_args()
    card = Profiles().card_table.card(args.card, None)
    assert card is not None, f"nobody has written {args.card} down"
    facts = [Fact.model_validate(fact) for fact in json.loads(args.facts.read_text())["facts"]]
    source = (
        f"{args.facts.name}, by benchmarks/speed/reference.py:"
        f" {facts[0].source.partition(', varied')[0]}"
    )
    print(yaml.safe_dump(reference(facts, card, source), sort_keys=False))


if __name__ == "__main__":
    main()
