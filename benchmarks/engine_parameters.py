"""python engine_parameters.py < questions.json: every parameter that vLLM builds of models, in an
engine's Python, without a GPU.

The document is the inquiry's (gateway/engines/inside/__main__.py). One line a question:

    {"model": 0, "question": 0, "parameters": [[name, dtype, shape], ...], "rows": {name: rows
    without the padding}, "buffers": [names]}

A parameter that two modules share is there once. rows: of vocabularies, whose rows the engine pads.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from gateway.engines.inside.meta import folder_of
from gateway.engines.vllm.inside import answers as vllm_answers
from gateway.engines.vllm.inside import boot as vllm_boot
from gateway.engines.vllm.inside.model import arguments_of, built_of, prepare


def main() -> None:
    out = os.fdopen(os.dup(1), "w")  # engines print to standard output
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    sys.argv[1:] = []
    os.environ.update(
        HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1"
    )
    gpu = asked["gpu"]
    major, minor = map(int, gpu["capability"].split("."))
    vllm_boot.boot(
        asked["sources"],
        (major, minor),
        memory_bytes=gpu["memory_bytes"],
        count=gpu["count"],
        name=gpu.get("name", "GPU"),
    )
    vllm_answers.stand_in_for_packages()
    prepare()
    vocabulary: Any = importlib.import_module(
        "vllm.model_executor.layers.vocab_parallel_embedding"
    ).VocabParallelEmbedding
    for index, model in enumerate(asked["models"]):
        files = {name: base64.b64decode(text) for name, text in model["files"].items()}
        for number, question in enumerate(model["questions"]):
            said: dict[str, Any] = {"model": index, "question": number}
            try:
                with (
                    folder_of(files) as folder,
                    built_of(arguments_of(folder, question["argv"])) as (_, whole),
                ):
                    said["parameters"] = [
                        (name, str(one.dtype).removeprefix("torch."), list(one.shape))
                        for name, one in whole.named_parameters()
                    ]
                    said["buffers"] = [name for name, _ in whole.named_buffers()]
                    said["rows"] = {
                        name: module.org_vocab_size
                        for name, module in whole.named_modules()
                        if isinstance(module, vocabulary)
                    }
            except Exception as error:
                said["refused"] = f"{type(error).__name__}: {error}"[:300]
            out.write(json.dumps(said) + "\n")
            out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
