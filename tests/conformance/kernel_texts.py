"""The code by which each linear kernel of vLLM takes or refuses a layer, as digests.

A version without rules is forecast by the rules of another one. Where a kernel's code is that of a
further version with rules instead, the rules of this kernel are better taken from there:
`kernels_as` of profiles/engine_diffs. kernel_texts.json keeps the digests of all versions;
`scripts/engine-profile` writes both.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

from gateway.domain.release import release
from gateway.profiles.profiles import Profiles

KEPT = Path(__file__).parent / "kernel_texts.json"
_FOLDERS = (
    "vllm/model_executor/kernels/linear",
    "vllm/model_executor/layers/quantization/kernels",
)
_METHODS = {"can_implement", "get_min_capability", "is_supported"}


def kernel_texts(sources: Path) -> dict[str, str]:
    """Kernel class -> digest of its methods that select it; `sources` is an unpacked wheel."""
    result: dict[str, str] = {}
    for folder in _FOLDERS:
        for path in sorted((sources / folder).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and (text := _selection(node)):
                    result[node.name] = hashlib.sha256(text.encode()).hexdigest()[:8]
    return result


def _selection(node: ast.ClassDef) -> str:
    methods = [
        ast.dump(member)
        for member in node.body
        if isinstance(member, ast.FunctionDef) and member.name in _METHODS
    ]
    return "\n".join(methods)


def read_texts() -> dict[str, dict[str, str]]:
    """The kept digests, by version."""
    texts: dict[str, dict[str, str]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return texts


def keep_texts(version: str, texts: Mapping[str, str]) -> None:
    """Write the digests of a version beside those of the others."""
    texts_by_version = read_texts() | {version: dict(sorted(texts.items()))}
    KEPT.write_text(json.dumps(dict(sorted(texts_by_version.items())), indent=1) + "\n")


def kernels_as(ref: str, near: str, profiles: Profiles) -> dict[str, tuple[str, ...]]:
    """Version with rules -> the kernels whose code in `ref` is that version's, and not `near`'s.

    Only kernels that the rules of both describe count. Of several versions with this code, the
    latest one before `ref` counts, or else the first one after it.
    """
    kept_texts = read_texts()
    texts, base = (kept_texts.get(_version(name), {}) for name in (ref, near))
    other_names = sorted(
        (name for name in profiles.engine_files if _version(name) in kept_texts), key=_order
    )
    earlier_names = [name for name in other_names if _order(name) < _order(ref)]
    result: dict[str, list[str]] = {}
    for kernel, digest in texts.items():
        if base.get(kernel, digest) == digest or kernel not in _described_kernels(profiles, near):
            continue
        for earlier_name in (*reversed(earlier_names), *other_names[len(earlier_names) :]):
            if kept_texts[_version(earlier_name)].get(
                kernel
            ) == digest and kernel in _described_kernels(profiles, earlier_name):
                result.setdefault(earlier_name, []).append(kernel)
                break
    return {earlier_name: tuple(names) for earlier_name, names in result.items()}


def _described_kernels(profiles: Profiles, ref: str) -> set[str]:
    rules = profiles.rules([profiles.engine(ref)]).get(ref)
    return set() if rules is None or rules.linear is None else {*rules.linear.kernels}


def _order(ref: str) -> Version:
    return release(_version(ref))


def _version(ref: str) -> str:
    return ref.partition("==")[2]
