"""Starts that vLLM 0.33.0 and SGLang 0.5.23 refuse before they load weights, one for each `raise`
(refused_starts.txt).

Each row: a model of tests/models, flags, words of the refusal. Flags are harmless: they ask for
nothing but a contradiction.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from gateway.domain.units import GIB


class RefusedStart(NamedTuple):
    model: str
    argv: tuple[str, ...]
    words: str
    kv_bytes: int


def _refused_starts(kind: str) -> list[RefusedStart]:
    section = Path(__file__).with_suffix(".txt").read_text().split(f"[{kind}]\n")[1]
    rows = []
    for line in section.split("\n[")[0].strip().splitlines():
        model, flags, words, *kept = (part.strip() for part in line.split("|"))
        size = round(float(kept[0]) * GIB) if kept else 4 * GIB
        rows.append(RefusedStart(model, tuple(flags.split()), words, max(0, size)))
    return rows


VLLM, SGLANG = _refused_starts("vllm"), _refused_starts("sglang")
