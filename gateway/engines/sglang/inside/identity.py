"""Version of the SGLang that is installed for this Python."""

from __future__ import annotations

from importlib.metadata import version

# Older versions install vLLM as a dependency, so SGLang is looked for first.
ORDER = 0


def identity() -> dict[str, str]:
    """Kind and version without the build (+cu129). Raises PackageNotFoundError."""
    return {"kind": "sglang", "version": version("sglang").partition("+")[0]}
