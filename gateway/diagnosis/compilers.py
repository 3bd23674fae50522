"""What an engine compiles while it starts, told by the command lines of the compilers that it runs:
its log is silent meanwhile. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

COMPILING = "compiling kernels"
# Of CUDA's toolkit (nvcc and what it runs), and what drives it. A host compiler alone is none of
# them: Triton runs one for a moment for each kernel.
_TOOLS = re.compile(r"(?:\S*/)?(?:nvcc|cicc|ptxas|fatbinary|nvlink|cudafe\+\+|ninja)(?:\s|$)")
# The folder of a module, as those who compile lay theirs out: FlashInfer below its workspace,
# PyTorch's extensions by module and version of Python, SGLang below its cache by target, DeepGEMM
# one for each kernel.
_MODULES = (
    (
        re.compile(r"/cached_ops/(?P<what>[\w.+-]+)|(?:^|[\s=])cached_ops/(?P<other>[\w.+-]+)"),
        "flashinfer {}",
    ),
    (re.compile(r"/deep_gemm/(?:cache|tmp)/(?:kernel\.)?(?P<what>[A-Za-z_]\w+)?"), "deep_gemm {}"),
    (re.compile(r"/sglang/jit/[^/\s]+/(?P<what>[\w-]+)/"), "sglang {}"),
    (re.compile(r"/torch_extensions/py\w+/(?P<what>[\w-]+)"), "{}"),
)


def compiling(commands: Iterable[str]) -> str:
    """What these processes do, as "compiling kernels: flashinfer sampling", without the names where
    none is told; empty where none of them compiles."""
    found: list[str] = []
    runs = False
    for command in commands:
        if not _TOOLS.match(command):
            continue
        runs = True
        for pattern, words in _MODULES:
            if match := pattern.search(command):
                named = next((text for text in match.groups() if text), "")
                found.append(words.format(named.rstrip(".")).strip())
                break
    if found:
        names = (
            ", ".join(dict.fromkeys(found[:64]))
            if len({*found}) <= 3
            else f"{found[0]} and {len({*found}) - 1} others"
        )
        return f"{COMPILING}: {names}"
    return COMPILING if runs else ""
