"""python -m tests.conformance.engine --sources FOLDER --version 0.33.0 --capability 8.6
QUESTIONS_MODULE > answers.json

QUESTIONS_MODULE has `answers(version) -> JSON value`, called once the engine is booted. Of several
capabilities (8.6,9.0) the answers are a JSON object: a process for each has torch from one import.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from gateway.engines.inside import stubs
from gateway.engines.sglang.inside import boot as sglang_boot
from gateway.engines.vllm.inside import boot as vllm_boot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument(
        "--sources", required=True, help="folder that holds the engine's Python package"
    )
    parser.add_argument("--version", required=True)
    parser.add_argument(
        "--capability", required=True, help="compute capability, e.g. 8.6, or several: 8.6,9.0"
    )
    parser.add_argument("--memory-gib", type=int, default=24, help="of each GPU")
    parser.add_argument(
        "--packages",
        choices=["image", "all", "none"],
        default="image",
        help="optional packages installed",
    )
    parser.add_argument("questions", help="e.g. tests.conformance.linear_questions")
    args = parser.parse_args()
    # Engines print to standard output: that is ours alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    capabilities = args.capability.split(",")
    answers_by_gpu = (
        {capability: _ask_apart(args, capability) for capability in capabilities}
        if len(capabilities) > 1
        else _ask(args, args.capability)
    )
    json.dump(answers_by_gpu, answers)
    answers.flush()
    sys.stderr.flush()
    os._exit(0)  # the engine's import leaves threads and half-made objects that need not end well


def _ask(args: argparse.Namespace, capability: str) -> Any:
    """The answers of this process, which is then of no use for another capability."""
    major, minor = map(int, capability.split("."))
    if args.engine == "sglang":
        sglang_boot.boot(args.sources, (major, minor), memory_bytes=args.memory_gib << 30)
    else:
        vllm_boot.boot(
            args.sources,
            (major, minor),
            present_packages=packages(args.sources, args.packages),
            memory_bytes=args.memory_gib << 30,
        )
    return importlib.import_module(args.questions).answers(args.version)


def _ask_apart(args: argparse.Namespace, capability: str) -> Any:
    """The answers of a forked process."""
    stubs.import_torch()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answers.json")
        process = os.fork()
        if not process:
            status = 1
            try:
                file.write_text(json.dumps(_ask(args, capability)))
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(process, 0)[1]:
            sys.exit(f"The process for compute capability {capability} failed, as shown above.")
        return json.loads(file.read_text())


def packages(sources: str, selection: str) -> set[str]:
    """Optional packages that are installed beside this version of vLLM."""
    image, optional = vllm_boot.required_packages(sources), vllm_boot.OPTIONAL
    return {"image": image, "all": image | optional, "none": image - optional}[selection]


if __name__ == "__main__":
    main()
