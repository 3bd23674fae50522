"""Memory that vLLM measures at a start, and the planned memory, for models with dummy weights.

    PYTHONPATH=. python benchmarks/speed/memory_starts.py plan FOLDER NAME NAME
        here, with the tests' packages
    python benchmarks/speed/memory_starts.py run FOLDER [--gpu 0] [--until SECONDS]
        on a GPU, in the engine's Python

NAME: of tests/models. `plan` writes FOLDER/plans.json; `run` starts each with the planner's own
flags, asks one prompt of a full batch and 256 concurrent requests, and adds a line of JSON to
FOLDER/starts.jsonl: what the engine logged, the most that nvidia-smi saw in use, and the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from speed import models
from speed.grid import Load
from speed.run import Engine, run_load

PORT = 18700
START_S = 240
LOADS = (Load("batch", 1, 1, 8192 - 64, 4), Load("many", 256, 256, 512, 16))
SAID = {
    "weights_gib": r"Actual usage is ([\d.]+) GiB for weight",
    "activation_gib": r"([\d.]+) GiB for peak activation",
    "non_torch_gib": r"([\d.]+) GiB for non-torch memory",
    "graphs_gib": r"and ([\d.]+) GiB for CUDAGraph memory",
    "kv_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "kv_tokens": r"GPU KV cache size: ([\d,]+) tokens",
}


def plan(folder: Path, names: list[str]) -> None:
    from gateway.domain.units import GIB
    from tests.conformance.layer_cases import case
    from tests.support.makers import wish
    from tests.support.planning import decide
    from tests.support.published import model_from_config
    from tests.unit.engines.vllm.test_memory import ENGINES, PROFILES, RULES, machine

    rows = []
    for name in names:
        spec = model_from_config(case(name, "none"))
        best = decide(
            spec, machine(1), ENGINES, wish(tensor_parallel=1), PROFILES.facts, rules=RULES
        ).plans[0]
        size = best.memory
        assert size is not None
        rows.append(
            {
                "name": name,
                "argv": best.argv,
                "env": best.env,
                "weights_gib": size.weights_bytes / GIB,
                "activation_gib": size.activation_bytes / GIB,
                "kv_gib": size.kv_bytes / GIB,
                "kv_tokens": round(size.full_requests * best.max_model_len.value),
                "beside_gib": [size.low / GIB, size.high / GIB],
                "kernels": sorted({kernel.kernel or "" for kernel in best.kernels}),
                "backends": sorted({row.backend or "" for row in best.attention}),
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans.json").write_text(json.dumps(rows, indent=1) + "\n")


class Usage(threading.Thread):
    """The most GiB in use on one GPU."""

    def __init__(self, gpu: int) -> None:
        super().__init__(daemon=True)
        self.most_gib, self._gpu, self._over = 0.0, gpu, threading.Event()

    def run(self) -> None:
        question = ["nvidia-smi", f"--id={self._gpu}", "--query-gpu=memory.used"]
        while not self._over.wait(0.3):
            done = subprocess.run(
                [*question, "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.stdout.strip().isdigit():
                self.most_gib = max(self.most_gib, int(done.stdout) / 1024)

    def end(self) -> float:
        self._over.set()
        self.join()
        return round(self.most_gib, 2)


def run(folder: Path, gpu: int, until: float) -> None:
    ahead = Engine(folder)
    for row in json.loads((folder / "plans.json").read_text()):
        if until and time.time() > until - 45:
            break
        engine, ahead = ahead, Engine(folder)
        usage = Usage(gpu)
        usage.start()
        began, log = time.time(), folder / "logs" / f"{row['name']}.log"
        said: dict[str, Any] = {"name": row["name"], "planned": row}
        try:
            start(engine, row, folder, gpu, log, until)
            said["ready_s"] = round(time.time() - began, 1)
            vocabulary = models.config(row["name"])["vocab_size"]
            cores = sorted(os.sched_getaffinity(0))
            said["loads"] = {
                load.name: run_load(load, PORT, 1, vocabulary, cores) for load in LOADS
            }
        except RuntimeError as error:
            said["failed"] = str(error)
        engine.kill()
        said["used_gib"] = usage.end()
        said |= read_log(log)
        with (folder / "starts.jsonl").open("a") as results:
            results.write(json.dumps(said) + "\n")
        print(json.dumps({**said, "planned": 0})[:500], flush=True)
        wait_until_free(gpu)
    ahead.kill()


def start(
    engine: Engine, row: dict[str, Any], folder: Path, gpu: int, log: Path, until: float
) -> None:
    """Raises RuntimeError where it does not get ready."""
    models.MODELS.setdefault(row["name"], (row["name"], {}))
    model = models.write(folder / "models", row["name"])
    argv = ["serve", str(model), "--served-model-name=m", "--host=127.0.0.1", f"--port={PORT}"]
    argv += ["--load-format=dummy", *row["argv"]]
    env = {"CUDA_VISIBLE_DEVICES": str(gpu), "VLLM_WORKER_MULTIPROC_METHOD": "fork", **row["env"]}
    engine.serve(argv, env, sorted(os.sched_getaffinity(0)), log)
    end = min(time.time() + START_S, until or time.time() + START_S)
    while time.time() < end:
        if engine.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    words = log.read_text(errors="replace").splitlines() if log.is_file() else []
    raise RuntimeError(" | ".join(line[-200:] for line in words if "Error" in line)[:900])


def read_log(log: Path) -> dict[str, float]:
    """The last figure of each kind."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    return {
        name: float(found[-1].replace(",", ""))
        for name, pattern in SAID.items()
        if (found := re.findall(pattern, text))
    }


def wait_until_free(gpu: int) -> None:
    for _ in range(100):
        usage = Usage(gpu)
        usage.start()
        time.sleep(0.5)
        if usage.end() < 2:
            return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("plan", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--until", type=float, default=0.0, help="by the clock, in Unix seconds")
    asked = parser.parse_args()
    if asked.step == "plan":
        plan(asked.folder, asked.names)
    else:
        run(asked.folder.absolute(), asked.gpu, asked.until)


if __name__ == "__main__":
    main()
