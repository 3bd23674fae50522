"""A process that makes calls of an engine's kernel functions, so that the kernels get compiled.

    python kernel_compiler.py MODULE DEVICE REPLIES

MODULE: the module of the functions. DEVICE: the number of the GPU. REPLIES: a file descriptor that
gets one byte for each line of standard input: `.` for a call that was made, `!` for one that
failed. A line is a call, as kernel_warmups.py writes it. The tensors of a call exist for this call
alone, and their values do not matter.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main(module_name: str, device: int, replies: int) -> None:
    import torch

    module = importlib.import_module(module_name)
    torch.cuda.set_device(device)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            make(call, module, torch)
            reply = b"."
        except Exception:
            # The engine makes the same call later, and its own log reports the error.
            reply = b"!"
        # A kept block would take memory that other processes count on.
        torch.cuda.empty_cache()
        os.write(replies, reply)


def make(call: Any, module: Any, torch: Any) -> None:
    """Make a call, and wait until the GPU is done with it."""
    arguments = [tensors(value, torch) for value in call["arguments"]]
    options = {name: tensors(value, torch) for name, value in call["options"].items()}
    getattr(module, call["function"])(*arguments, **options)
    torch.cuda.synchronize()


def tensors(value: Any, torch: Any) -> Any:
    """The value with an empty tensor for each description of one. Indices are zero, thus valid."""
    if isinstance(value, list):
        return tuple(tensors(item, torch) for item in value)
    if not isinstance(value, dict):
        return value
    dtype = getattr(torch, value["dtype"])
    tensor = torch.empty_strided(value["shape"], value["strides"], dtype=dtype, device="cuda")
    return tensor.zero_() if value["dtype"].startswith("int") else tensor


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
