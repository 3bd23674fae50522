"""Planning: CPU time of one decision with everything loaded, of a large matrix, and the memory that takes.

    python benchmarks/planning.py [--rounds 20]

Prints one line a figure: what was reached, and what is to be reached. CPU time of this process, so other work hardly matters.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from itertools import islice
from pathlib import Path

from gateway.core.plan import decide
from gateway.core.reading import read_model
from gateway.domain import Engine, ModelSpec, Wish
from gateway.errors import BadModel
from gateway.profiles import Profiles
from tests.conformance.layer_cases import QUANTS

MODELS = Path(__file__).parent.parent / "tests" / "models"
MACHINES = ("3090", "2x3090", "4x3090", "4090", "5090", "8xa100-80g", "8xh100", "8xb200", "rtx-pro-6000", "gb10")
ENGINES = ("vllm", "sglang")


def specs(count: int) -> list[ModelSpec]:
    """Published configs as they are, then with each quantization block, without their weights."""
    found = []
    configs = [json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))]
    for name, block in (("none", None), *QUANTS.items()):
        for config in configs:
            changed = config if block is None else config | {"quantization_config": block}
            try:
                found.append(read_model(f"{config['model_type']}-{name}", None, changed, None, None, (), None))
            except BadModel:
                continue
    return list(islice(found, count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    profiles = Profiles()
    engines = profiles.engines(ENGINES, device="cuda")
    rules = profiles.rules(engines)
    machines = [profiles.hardware(name) for name in MACHINES]
    models = specs(100)
    wish = Wish(name="m", source="-")
    newest = [engine for engine in engines if engine.kind == "vllm"][:1]

    def cpu_ms(spec: ModelSpec, chosen: list[Engine], machine: int) -> float:
        began = time.process_time()
        decide(spec, machines[machine], chosen, wish, profiles.facts, rules=rules)
        return (time.process_time() - began) * 1000

    sample = [models[index] for index in range(0, len(models), 5)]
    for spec in sample:
        cpu_ms(spec, newest, 1)
    each = [statistics.median(cpu_ms(spec, newest, 1) for _ in range(args.rounds)) for spec in sample]
    print(
        f"one plan, one engine version, 2x3090: median {statistics.median(each):.1f} ms, worst {max(each):.1f} ms   to reach 15 ms"
    )
    began = time.process_time()
    plans = sum(
        bool(decide(spec, machine, engines, wish, profiles.facts, rules=rules).plans) for spec in models for machine in machines
    )
    took = time.process_time() - began
    size = f"{len(models)} models x {len(machines)} machines x {len(engines)} engine versions"
    print(f"matrix of {size}: {took:.1f} s, {plans} of {len(models) * len(machines)} have a plan   to reach 60 s")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"most memory resident: {resident:.0f} MiB   to reach 150 MiB")


if __name__ == "__main__":
    main()
