"""What is installed beside the engine: Python, packages, torch, CUDA."""

from __future__ import annotations

import importlib
import platform
from importlib.metadata import distributions
from typing import Any


def installed() -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    found = {
        str(one.metadata["Name"]).lower().replace("_", "-"): one.version for one in distributions() if one.metadata["Name"]
    }
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "packages": dict(sorted(found.items())),
    }
