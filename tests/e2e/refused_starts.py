"""Starts that vLLM 0.33.0 and SGLang 0.5.23 refuse before they load weights, one for each `raise`,
and some that crash their code (refused_starts.txt).

Each row: a model of tests/models with changes of its config.json, flags and variables, words of the
refusal. A change that is named like a file (`hf_quant_config.json`) is that file. Rows are
harmless: they ask for nothing but a contradiction.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from gateway.domain.units import GIB
from tests.support.published import config


class RefusedStart(NamedTuple):
    model: str
    changes: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    words: str
    kv_bytes: int

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """By name, config.json first; a change to null removes a field."""
        changes: dict[str, Any] = json.loads(self.changes or "{}")
        json_changes = {name: text for name, text in changes.items() if name.endswith(".json")}
        fields = {name: value for name, value in changes.items() if name not in json_changes}
        return {"config.json": change_config(config(self.model), fields), **json_changes}


def change_config(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config.json with these changes; null removes a field."""
    result = dict(fields)
    for name, value in changes.items():
        inner = fields.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(inner, dict):
            result[name] = change_config(inner, value)
        else:
            result[name] = value
    return result


def _refused_starts(kind: str) -> list[RefusedStart]:
    section = Path(__file__).with_suffix(".txt").read_text().split(f"[{kind}]\n")[1]
    rows = []
    for line in section.split("\n[")[0].strip().splitlines():
        model, flags, words, *options = (part.strip() for part in line.split("|"))
        name, _, changes = model.partition(" ")
        size = round(float(options[0]) * GIB) if options else 4 * GIB
        argv = tuple(word for word in flags.split() if word.startswith("--"))
        variables = (word.partition("=") for word in flags.split() if not word.startswith("--"))
        env = tuple((key, value) for key, _, value in variables)
        rows.append(RefusedStart(name, changes, argv, env, words, max(0, size)))
    return rows


VLLM, SGLANG = _refused_starts("vllm"), _refused_starts("sglang")
