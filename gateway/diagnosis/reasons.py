"""The reasons that an engine itself gives for each backend or kernel that it refuses. Pure."""

from __future__ import annotations

import re

from gateway.domain.value import Scalar

# `{FLASH_ATTN: [head_size not supported], TRITON_MLA: [...]}`, as vLLM prints them
# (vllm/platforms/cuda.py:473, 0.33.0), and `Reason: ['head_size not supported']` of one backend.
_BACKEND_REASON = re.compile(r"\b([A-Za-z]\w{2,60}): \[([^\[\]]*[A-Za-z]{3}[^\[\]]*)\]")
_SINGLE_REASON = re.compile(r"\bReasons?: \[([^\[\]]{1,300})\]")
# A reason that something can be installed or set for: a GPU or a model cannot be changed so.
_DEMAND = re.compile(
    r"\b(?:requires?|needs?|not (?:installed|found|available)|missing|unavailable|must be"
    r" (?:set|installed))\b",
    re.IGNORECASE,
)
_FIXED_CAUSE = re.compile(
    r"compute capability|\bsm_?\d|head_?(?:size|dim)|dtype|\bGPU\b|\bHopper|Blackwell|Ampere",
    re.IGNORECASE,
)
_MAX_CHARACTERS = 500
# Settings that a backend can refuse, with the change that it then accepts.
_CHANGES = {
    "kv_cache_dtype": "the dtype of the KV cache (--kv-cache-dtype auto)",
    "kv cache dtype": "the dtype of the KV cache (--kv-cache-dtype auto)",
    "block_size": "the block size (omit --block-size)",
    "block size": "the block size (omit --block-size)",
    "dtype": "the dtype (--dtype bfloat16 or float16)",
}


def reasons(message: str) -> dict[str, Scalar]:
    """The reasons of a message as `reasons`, the demand of one of them as `demand`, and settings
    that are the only reasons against a backend as `change` and `backend`."""
    named_reasons = [(name, text.strip(" '\"")) for name, text in _BACKEND_REASON.findall(message)]
    named_reasons = [
        (name, text)
        for name, text in named_reasons
        # A build tool reports `FAILED: [code=1] FILE` in the same form.
        if name not in ("Reason", "Reasons") and " " in text
    ]
    named_reasons = named_reasons or [
        ("", text.strip(" '\"")) for text in _SINGLE_REASON.findall(message)
    ]
    if not named_reasons:
        return {}
    joined_reasons = "; ".join(f"{name}: {text}" if name else text for name, text in named_reasons)
    demand = next(
        (
            text
            for _, text in named_reasons
            if _DEMAND.search(text) and not _FIXED_CAUSE.search(text)
        ),
        "",
    )
    values: dict[str, Scalar] = {"reasons": joined_reasons[:_MAX_CHARACTERS]}
    for name, text in named_reasons:
        changes = [_setting_change(reason) for reason in text.split(",")]
        if name and all(changes):
            values |= {"change": " and ".join(dict.fromkeys(changes)), "backend": name}
            break
    return values | ({"demand": demand} if demand else {})


def _setting_change(reason: str) -> str:
    """The change of a setting that a reason asks for; empty if none helps."""
    setting = reason.strip(" '\"").removesuffix(" not supported")
    return _CHANGES.get(setting, "")
