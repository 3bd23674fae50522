"""The engine versions that ship: those of profiles/engines, so that no test names them in a list.

The standard library alone: scripts/engine-answers imports this with a bare Python, and engines that
    are asked import it too.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.paths import ROOT

PROFILES = ROOT / "profiles"


def order(version: str) -> tuple[int, ...]:
    """The sort key of versions: 0.5.10.post1 is (0, 5, 10, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def since(version: str, bound: str) -> bool:
    """Whether `version` is `bound` or later."""
    return order(version) >= order(bound)


def kinds(profiles: Path = PROFILES) -> tuple[str, ...]:
    """The engine kinds: vllm, sglang, ..."""
    return tuple(sorted({path.parent.name for path in (profiles / "engines").glob("*/*.yaml")}))


def versions(kind: str, profiles: Path = PROFILES) -> tuple[str, ...]:
    """The versions of a kind, oldest first."""
    return tuple(
        sorted((path.stem for path in (profiles / "engines" / kind).glob("*.yaml")), key=order)
    )


VLLM = versions("vllm")
SGLANG = versions("sglang")
NEWEST_VLLM = VLLM[-1]
NEWEST_SGLANG = SGLANG[-1]
VLLM_REF = f"vllm=={NEWEST_VLLM}"
SGLANG_REF = f"sglang=={NEWEST_SGLANG}"


def vllm_since(bound: str) -> tuple[str, ...]:
    """The vLLM versions from `bound` on."""
    return tuple(version for version in VLLM if since(version, bound))


def vllm_before(bound: str) -> tuple[str, ...]:
    return tuple(version for version in VLLM if not since(version, bound))
