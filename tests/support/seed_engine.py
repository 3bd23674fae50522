"""An engine of a reported failure, as a child process: its flags and environment decide whether it
serves.

    python -S seed_engine.py VERSION STARTS ARGUMENTS...

It reads the model's config.json, its flags and its environment, as the engine does, and prints the
log of that engine (tests/logs) wherever the real one fails. Each start is a line of JSON in the
file STARTS. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.fake_engine import parse, run
else:
    from fake_engine import parse, run

LOGS = Path(__file__).resolve().parents[1] / "logs"
CUTLASS = "CutlassFP8ScaledMMLinearKernel"


def log(version: str, flags: dict[str, str], config: dict[str, Any]) -> str:
    """The log of its end, by the name in tests/logs; empty: the engine starts."""
    tp, ranks = (int(flags.get(f"{name}-parallel-size", "1")) for name in ("tensor", "pipeline"))
    if len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) != tp * ranks:
        return "failed-no-gpu-visible"
    text, quant = config.get("text_config", config), config.get("quantization_config", {})
    # 000 and 002: Marlin's tiles, which 0.26.0 pads to; Exllama takes any size in float16.
    if (
        version == "0.19.1"
        and quant.get("quant_method") in ("auto-round", "compressed-tensors")
        and flags["dtype"] != "float16"
    ):
        gates = 2 * text.get("linear_num_value_heads", 0) // tp
        if gates % 64:
            return "failed-000-wna16-n32-0.19.1"
        if text["hidden_size"] == 4096 and text["intermediate_size"] // tp % 128:
            return "failed-002-wna16-k2112-0.19.1"
    if "speculative-config" in flags:
        return "failed-003-no-backend-0.26.0"
    if (
        version == "0.18.0"
        and flags.get("quantization") == "fp8"
        and CUTLASS not in os.environ.get("VLLM_DISABLED_KERNELS", "")
    ):
        return "failed-004-error-internal-gdn"
    return "failed-wrapper-only" if version == "0.33.0" else ""


def main() -> int:
    version, starts, *argv = sys.argv[1:]
    flags = dict(
        item.removeprefix("--").partition("=")[::2] for item in argv if item.startswith("--")
    )
    config = json.loads((Path(flags["model"]) / "config.json").read_text())
    ending = log(version, flags, config)
    start_record = {
        "at": time.time(),
        "version": version,
        "argv": argv,
        "env": dict(os.environ),
        "ending": ending,
    }
    with Path(starts).open("a") as file:
        file.write(json.dumps(start_record) + "\n")
    script, host, port = parse(argv)
    if ending:
        script = replace(script, lines=printed_lines(ending), serve=False, exit_code=1)
    elif config.get("quantization_config", {}).get("format") == "mxfp4-pack-quantized":
        # 001: its lines before the trace are a healthy start; then /health says 200, and short
        # prompts are answered.
        lines = printed_lines("failed-001-marlin-moe-first-request")
        cut = next(number for number, (_, line) in enumerate(lines) if "ERROR" in line)
        script = replace(
            script,
            lines=lines[:cut],
            crash_prompt=1000,
            crash_lines=tuple(line for _, line in lines[cut:]),
        )
    return asyncio.run(run(script, host, port))


def printed_lines(name: str) -> tuple[tuple[float, str], ...]:
    return tuple((0.0, line) for line in (LOGS / f"{name}.log").read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main())
