"""CPU time and memory of planning.

    python benchmarks/planning.py [--rounds 10]

One line for each figure, with its target. Decisions and the matrix are CPU time of this process,
the best of the rounds for each model, without a cache and with the garbage collector set as in the
gateway's planner. `fitserve plan` has wall and CPU time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gateway.diagnosis.facts.known_facts import KnownFacts  # noqa: E402
from gateway.domain import Engine, Hardware, ModelSpec, Wish  # noqa: E402
from gateway.engines.common.layers.build import _blueprint, _schemes  # noqa: E402
from gateway.engines.common.planning_input import PlanningInput  # noqa: E402
from gateway.engines.vllm.attention import choose_backend  # noqa: E402
from gateway.errors import BadModel  # noqa: E402
from gateway.models.spec import read_model  # noqa: E402
from gateway.planner.decide import decide  # noqa: E402
from gateway.planner.layer_kernels import layer_kernels  # noqa: E402
from gateway.planner.service.plan_program import _OBJECTS  # noqa: E402
from gateway.profiles.profiles import Profiles  # noqa: E402
from tests.conformance.layer_cases import QUANTS  # noqa: E402

MODELS = ROOT / "tests" / "models"
MACHINES = (
    "3090",
    "2x3090",
    "4x3090",
    "4090",
    "5090",
    "8xa100-80g",
    "8xh100",
    "8xb200",
    "rtx-pro-6000",
    "gb10",
)
ENGINES = ("vllm", "sglang")
# Models that need several GPUs have most layouts: Llama-3.1-70B, Qwen3-235B-A22B,
# DeepSeek-V3.
LARGE: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "deepseek-v3": {},
}


def specs(count: int) -> list[ModelSpec]:
    """Published configs with a quantization block each, every third without: all blocks and all
    families come up."""
    found = []
    configs = [json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))]
    blocks = [block for quant in QUANTS.values() for block in (quant, quant, None)]
    for index in range(len(configs) * len(blocks)):
        config = configs[index % len(configs)]
        block = blocks[(index + index // len(configs)) % len(blocks)]
        changed = config if block is None else config | {"quantization_config": block}
        try:
            found.append(
                read_model(f"{config['model_type']}-{index}", None, changed, None, None, (), None)
            )
        except BadModel:
            continue
    return list(islice(found, count))


def large() -> list[ModelSpec]:
    configs = {
        name: json.loads((MODELS / f"{name}.json").read_text()) | changed
        for name, changed in LARGE.items()
    }
    return [
        read_model(name, None, config, None, None, (), None) for name, config in configs.items()
    ]


def process(folder: Path, data: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one `fitserve plan` over every engine version."""
    command = [
        sys.executable,
        "-m",
        "gateway.__main__",
        "plan",
        str(folder),
        "--hardware",
        "2x3090",
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, "FITSERVE_DATA_DIR": str(data)},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):
        raise SystemExit(f"fitserve plan ended with {done.returncode}")
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    gc.set_threshold(_OBJECTS)
    profiles = Profiles()
    engines = profiles.engines(ENGINES, device="cuda")
    rules = profiles.rules(engines)
    machines = [profiles.hardware(name) for name in MACHINES]
    eight = [profiles.hardware("8xh100"), profiles.hardware("8xh200")]
    models = specs(100)
    wish = Wish(name="m", source="-")
    newest = [engine for engine in engines if engine.kind == "vllm"][:1]

    def cpu_ms(spec: ModelSpec, chosen: list[Engine], machine: Hardware = machines[1]) -> float:
        facts, gpus, pace, parsers = (
            profiles.facts,
            profiles.gpus,
            profiles.speed_knowledge,
            profiles.parsers,
        )
        began = time.process_time()
        planning_input = PlanningInput(
            spec,
            machine,
            wish,
            KnownFacts(facts),
            gpus=gpus,
            speed_knowledge=pace,
            parsers=parsers,
        )
        decide(planning_input, chosen, rules)
        return (time.process_time() - began) * 1000

    def time_new_model(
        spec: ModelSpec, chosen: list[Engine], machine: Hardware = machines[1]
    ) -> float:
        for remembered in (_blueprint, _schemes, layer_kernels, choose_backend):
            remembered.cache_clear()
        return cpu_ms(spec, chosen, machine)

    def second_cpu_ms(spec: ModelSpec) -> float:
        cpu_ms(spec, engines)
        return cpu_ms(spec, engines)

    for spec in models[::5]:
        cpu_ms(spec, engines)
    for what, most, times in (
        (
            "one plan, one engine version, 2x3090",
            15,
            [min(time_new_model(m, newest) for _ in range(args.rounds)) for m in models[::5]],
        ),
        (
            f"one plan, all {len(engines)} engine versions",
            40,
            [min(time_new_model(m, engines) for _ in range(args.rounds)) for m in models[::5]],
        ),
        (
            f"one plan, all {len(engines)} engine versions, of a model that was planned before",
            40,
            [min(second_cpu_ms(m) for _ in range(args.rounds)) for m in models[::5]],
        ),
        (
            "a large model on eight GPUs, one engine version",
            15,
            [
                min(time_new_model(m, newest, h) for _ in range(args.rounds))
                for m in large()
                for h in eight
            ],
        ),
        (
            f"a large model on eight GPUs, all {len(engines)} engine versions",
            40,
            [
                min(time_new_model(m, engines, h) for _ in range(args.rounds))
                for m in large()
                for h in eight
            ],
        ),
    ):
        print(
            f"{what}: median {statistics.median(times):.1f} ms, worst {max(times):.1f} ms   to"
            f" reach {most} ms"
        )

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(models[0].config))
        first = process(Path(folder), Path(folder) / "data")
        rest = [process(Path(folder), Path(folder) / "data") for _ in range(args.rounds)]
    walls, cpus = [wall for wall, _ in rest], [cpu for _, cpu in rest]
    print(
        f"fitserve plan, {len(engines)} engine versions: median {statistics.median(walls):.2f} s,"
        f" best {min(walls):.2f} s, CPU {min(cpus):.2f} s; the first {first[0]:.2f} s   to reach"
        " 0.6 s"
    )

    began = time.process_time()
    facts = KnownFacts(profiles.facts)
    plans = sum(
        bool(decide(PlanningInput(spec, machine, wish, facts), engines, rules).plans)
        for spec in models
        for machine in machines
    )
    took = time.process_time() - began
    size = f"{len(models)} models x {len(machines)} machines x {len(engines)} engine versions"
    print(
        f"matrix of {size}: {took:.1f} s, {plans} of {len(models) * len(machines)} have a plan   to"
        " reach 60 s"
    )
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"memory of all this: {resident:.0f} MiB   to reach 150 MiB")


if __name__ == "__main__":
    main()
