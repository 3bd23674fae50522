"""Estimates of aiconfigurator-core for the grid, as lines of JSON.

    python benchmarks/speed/aiconfigurator_estimates.py [--system h200_sxm]

Needs the environment of benchmarks/speed/requirements-aiconfigurator.txt. aiconfigurator knows the
tokens of a step, tensor parallelism and the type of the KV cache. Settings with other flags get the
estimate of the defaults, marked with the ignored flags. Formats without an operator (AWQ, GPTQ) are
named without figures.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from speed import models
from speed.grid import GRID, LOADS, Load, Setting

TOKENS_A_STEP = 8192
SEEN = (
    "max-num-batched-tokens",
    "max-num-seqs",
    "kv-cache-dtype",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
)
QUANTIZED = {
    "compressed-tensors": {"gemm_quant_mode": "fp8"},
    "mxfp4": {"moe_quant_mode": "w4a16_mxfp4"},
    "awq": {"gemm_quant_mode": "int4_wo"},
    "gptq": {"gemm_quant_mode": "int4_wo"},
}


def flags(setting: Setting) -> dict[str, str]:
    return dict(flag.removeprefix("--").partition("=")[::2] for flag in setting.flags)


def estimate(setting: Setting, folder: Path, system: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each load the figures, named as those that are measured."""
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config import RuntimeConfig
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database

    given_flags = flags(setting)
    tensor = int(given_flags.get("tensor-parallel-size", 1))
    pipeline = int(given_flags.get("pipeline-parallel-size", 1))
    replicas = int(given_flags.get("data-parallel-size", 1))
    quantization = (
        models.config(setting.model).get("quantization_config", {}).get("quant_method", "")
    )
    modes = {
        **QUANTIZED.get(quantization, {}),
        **({"kvcache_quant_mode": "fp8"} if "kv-cache-dtype" in given_flags else {}),
    }
    # It takes quantization as an argument where it does not know the checkpoint's block.
    (folder / setting.model).mkdir(exist_ok=True)
    config = {
        key: value
        for key, value in models.config(setting.model).items()
        if key != "quantization_config"
    }
    (folder / setting.model / "config.json").write_text(json.dumps(config))
    model = get_model(
        str(folder / setting.model),
        build_model_config(tensor, pipeline, 1, tensor, 1, **modes),
        "vllm",
    )
    database, backend = get_database(system, "vllm", "current"), get_backend("vllm")
    step = int(given_flags.get("max-num-batched-tokens", TOKENS_A_STEP))
    for load in LOADS:
        busy = min(replicas, load.concurrency)
        streams = load.concurrency // busy
        batch = min(max(1, streams // pipeline), int(given_flags.get("max-num-seqs", streams)))
        shape = RuntimeConfig(batch_size=batch, isl=load.tokens_in, osl=max(2, load.tokens_out))
        said = (
            backend.run_agg(model, database, shape, ctx_tokens=min(step, batch * load.tokens_in))
            .get_summary_df()
            .iloc[0]
        )
        if load.tokens_out > 1:
            # The tool fills a pipeline with streams of its own.
            rate = float(said["tokens/s"]) * min(1, streams / float(said["concurrency"]))
            yield (
                load.name,
                {
                    "tokens_s": busy * rate,
                    "ttft_ms": float(said["ttft"]),
                    "tpot_ms": float(said["tpot"]),
                },
            )
        else:
            yield load.name, {"ttft_ms": prefill_ms(model, backend, database, load, step)}


def prefill_ms(model: Any, backend: Any, database: Any, load: Load, step: int) -> float:
    """A prompt longer than a step takes several steps: here one after the other, each with what is
    in the cache by then."""
    from aiconfigurator_core.sdk.config import RuntimeConfig

    total = 0.0
    for begin in range(0, load.tokens_in, step):
        tokens = min(step, load.tokens_in - begin)
        shape = RuntimeConfig(batch_size=1, isl=begin + tokens, osl=2, prefix=begin)
        said = (
            backend.run_static(model, database, shape, mode="static_ctx").get_summary_df().iloc[0]
        )
        total += float(said["ttft"])
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", default="h200_sxm")
    parser.add_argument("--only", action="append", default=[], help="MODEL; default: all")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        for setting in GRID:
            if args.only and setting.model not in args.only:
                continue
            unseen = [name for name in flags(setting) if name not in SEEN]
            said: dict[str, Any] = {
                "model": setting.model,
                "setting": setting.name,
                "system": args.system,
                "unseen": unseen,
                "loads": {},
            }
            try:
                for name, figures in estimate(setting, Path(folder), args.system):
                    said["loads"][name] = {key: round(value, 3) for key, value in figures.items()}
            except Exception as error:
                said["none"] = re.sub(
                    r"(/[\w.@+-]+)+/?", "PATH", f"{type(error).__name__}: {error}"
                )[:160]
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
