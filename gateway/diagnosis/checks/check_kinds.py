"""The kind of failure that a check of an engine's source speaks for, by its conditions. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gateway.diagnosis.checks.check_site import CheckSite
from gateway.diagnosis.clues.frames import OWN_FRAME

if TYPE_CHECKING:
    from gateway.diagnosis.structure import ExceptionShape

_SIZES = re.compile(
    r"(?:tensor-parallel|pipeline-parallel|tp|pp|ep|moe-dp|attn-cp|decode-context-parallel"
    r"|prefill-context-parallel)-size\Z"
)
_DIVISION = re.compile(r"(?i)\b(?:not )?(?:evenly )?divisi(?:ble|on)|\bdivides?\b|\bmultiple of\b")
_SHAPES = re.compile(r"model\.\w*(?:head|size|layer|expert|rank|dim|group)\w*\Z")
_NO_MEMORY = re.compile(
    r"(?i)out of memory|not enough (?:gpu )?memory|no (?:free |available )?memory"
)
_SMALL_CACHE = re.compile(
    r"(?i)kv[ -]cache.{0,80}(?:too small|not enough|larger than|insufficient|no available|at least)"
    r"|(?:not enough|no available|insufficient).{0,40}(?:kv[ -]?cache|cache blocks|slots)"
)
_ABSENCE = re.compile(
    r"(?i)\b(?:not found|cannot find|can't find|could not find|no such|missing)\b"
)
_PACKAGES = re.compile(
    r"(?i)\b(?:pip install|is not installed|please (?:re)?install|not available\. install)\b"
)
_REFUSAL = re.compile(r"(?i)\b(?:not|un|only)[ -]?(?:yet )?(?:support|implement)|does not support")
# A message that repeats another error is not a check.
_REPETITION = re.compile(r"(?i)\b(?:fail(?:ed|ure)|errors?|exception)\b[^{}]*\{\}")
_DTYPES = re.compile(r"(?i)\bdtype\b|\bbfloat16\b|\bfloat16\b")
# Folders of an engine and files in them, by the kind of failure of their checks.
_PLACES = (
    (re.compile(r"/quantization/|/quant\w*\.py\Z"), "unsupported_quantization"),
    (re.compile(r"/lora/|/lora\w*\.py\Z"), "lora"),
    (re.compile(r"tokenizer(?!_manager)|/chat_template"), "tokenizer"),
    (re.compile(r"/multimodal/|/mm_utils|/processors?/"), "multimodal"),
    (re.compile(r"/model_loader/|weight_utils|/load_weights"), "weights_corrupt"),
    (re.compile(r"/models/registry|/model_loader/utils"), "unsupported_architecture"),
    (re.compile(r"/attention/|/attention\w*\.py\Z"), "no_backend"),
    (re.compile(r"/fused_moe/|/moe/|/mamba/|/fla/|/kernels?/"), "no_kernel"),
    (
        re.compile(r"/envs\.py\Z|/environ\.py\Z|arg_utils|server_args|/configs?/"),
        "config_refused",
    ),
)
# Exceptions of checks that only a fault of the program meets, where no setting is read.
_FAULTS = frozenset({"AssertionError", "AttributeError", "IndexError", "KeyError", "TypeError"})
# Names that are not settings of the engine: an object `config` may be of any part.
_OTHER_ROOTS = frozenset({"gpu", "model", "config"})
# Parts that read files of the model, or settings: a failure below them is one of these.
_FILE_KINDS = frozenset({"lora", "tokenizer", "multimodal", "weights_corrupt", "config_refused"})
_KERNEL_KINDS = frozenset({"no_backend", "no_kernel", "unsupported_quantization"})


def check_kind(site: CheckSite) -> str:
    """The kind of failure; empty where the check says nothing of one."""
    text = site.template
    if _REPETITION.search(text):
        return ""
    if site.exception in ("ImportError", "ModuleNotFoundError") or _PACKAGES.search(text):
        return "package"
    if _NO_MEMORY.search(text):
        return "gpu_oom"
    if _SMALL_CACHE.search(text):
        return "kv_too_small"
    names = {condition.name for condition in site.conditions}
    if _is_division(site) and any(map(_SIZES.match, names)):
        return "illegal_parallelism"
    place = _part_kind(site.path)
    settings = [name for name in names if name.partition(".")[0] not in _OTHER_ROOTS]
    if "gpu.capability" in names:
        return _hardware_kind(site, place)
    if place in ("weights_corrupt", "tokenizer") and _ABSENCE.search(text):
        return "weights_missing"
    if place == "no_backend" and any(name.endswith("attention-backend") for name in settings):
        return "forced_choice_invalid"
    if place and place not in ("no_backend", "no_kernel", "unsupported_quantization"):
        return place
    if settings:
        return "config_refused"
    if place:
        return "engine_bug" if site.exception in _FAULTS and not _REFUSAL.search(text) else place
    return _kind_of_model(site)


def _is_division(site: CheckSite) -> bool:
    if any(condition.relation == "%" for condition in site.conditions):
        return True
    return bool(_DIVISION.search(site.template)) or any(
        _SHAPES.match(condition.name) or _SHAPES.match(condition.value)
        for condition in site.conditions
    )


def _hardware_kind(site: CheckSite, place: str) -> str:
    """The kind of a check of the GPU, by the part of the engine that asks."""
    if _DTYPES.search(site.template) and place not in ("no_backend", "unsupported_quantization"):
        return "unsupported_dtype"
    return place if place in (*_KERNEL_KINDS, "config_refused") else "no_kernel"


def _kind_of_model(site: CheckSite) -> str:
    """The kind of a check without settings in no folder of a field."""
    if site.exception == "NotImplementedError" or _REFUSAL.search(site.template):
        return "unsupported_architecture" if "/models/" in site.path else "config_refused"
    return "engine_bug" if site.exception in _FAULTS else ""


def _part_kind(path: str) -> str:
    """The kind of failure of the engine's part in a file; empty for other parts."""
    return next((kind for pattern, kind in _PLACES if pattern.search(path)), "")


def context_kind(shape: ExceptionShape) -> str:
    """The kind that the deepest frame of the engine speaks for; empty without such a frame.

    An error of a library belongs to the part of the engine that called it.
    """
    own_frames = [frame for frame in shape.frames if OWN_FRAME.search(frame)]
    if not own_frames:
        return ""
    path = own_frames[-1].rpartition(":")[0]
    place = _part_kind(path)
    is_own = own_frames[-1] == shape.frames[-1]
    if place in _FILE_KINDS:
        return place
    if is_own:
        return "engine_bug" if shape.exception in _FAULTS else ""
    return "kernel_runtime" if place in _KERNEL_KINDS else ""
