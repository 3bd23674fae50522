"""The kernels that a starting engine compiles, by the command lines of its compilers. Pure.

The log of the engine is silent meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

COMPILATION = "compiling kernels"
# CUDA's toolkit (nvcc and its programs), and ninja, which runs it. A host compiler alone does not
# count: Triton runs one for a moment for each kernel.
_TOOLS = re.compile(r"(?:\S*/)?(?:nvcc|cicc|ptxas|fatbinary|nvlink|cudafe\+\+|ninja)(?:\s|$)")
# Folders of modules. FlashInfer: below its workspace. PyTorch's extensions: by module and version
# of Python. SGLang: below its cache by target. DeepGEMM: one for each kernel.
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
    """The work of these processes, as "compiling kernels: flashinfer sampling".

    Without names where the command lines have none; empty if no process compiles.
    """
    modules: list[str] = []
    runs = False
    for command in commands:
        if not _TOOLS.match(command):
            continue
        runs = True
        for pattern, form in _MODULES:
            if match := pattern.search(command):
                name = next((text for text in match.groups() if text), "")
                modules.append(form.format(name.rstrip(".")).strip())
                break
    if modules:
        names = (
            ", ".join(dict.fromkeys(modules[:64]))
            if len({*modules}) <= 3
            else f"{modules[0]} and {len({*modules}) - 1} others"
        )
        return f"{COMPILATION}: {names}"
    return COMPILATION if runs else ""
