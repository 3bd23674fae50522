"""The flag that chooses the implementation of the part whose code failed. Pure.

An engine has a folder for each part (`layers/attention/`), a file for each implementation of it
(`trtllm_mha_backend`), and a flag that lists the implementations (--attention-backend). So the
path of a frame leads to the flag and, where a file is named so, to the implementation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gateway.diagnosis.clues.frames import OWN_FRAME, WAY
from gateway.domain import Scalar

if TYPE_CHECKING:
    from gateway.diagnosis.clues.features import VersionSettings
    from gateway.diagnosis.options import StartOptions

# The innermost frames that may be of the part.
_REACH = 3
_SUFFIX = "-backend"
_SUFFIX_CHARACTERS = len(_SUFFIX)
# Words of flags that folders have in another form.
_FORMS = {"attn": "attention"}
# Words of flags that choose for one step of the work only.
_STEPS = frozenset({"prefill", "decode", "verify"})
# Layers with a state in place of a cache: the flag of attention does not choose their kernels.
_STATE_WORDS = frozenset({"gdn", "kda", "linear", "mamba", "fla"})
_ATTENTION = frozenset({"attention"})
# The folder of kernels that are all written in Triton.
_TRITON_FOLDER = re.compile(r"/fla/(?:ops/)?|triton")
# Implementations for every GPU and model. Others are for single ones.
_GENERAL = re.compile(
    r"(?:native|torch|pytorch|torch_native|triton|triton_attn|flash_attn|flashinfer|cutlass"
    r"|flashinfer_cutlass|marlin)\Z",
    re.IGNORECASE,
)
# A shorter name may stand in any other.
_MIN_CHARACTERS = 3
_MAX_CHOICES = 3


def implementation(
    frames: Sequence[str], settings: VersionSettings, options: StartOptions
) -> dict[str, Scalar]:
    """The `backend_flag` of the part whose code failed, with `backend_choices`: other ones.

    `failed_backend`: the implementation that failed, where a file or the start names it. Empty
    where no frame is of a part with such a flag, or where the flag has no other choice.
    """
    own_frames = [frame for frame in frames if OWN_FRAME.search(frame) and not WAY.search(frame)]
    if not own_frames:
        return {}
    flags = [
        (flag[:-_SUFFIX_CHARACTERS], flag, spec)
        for flag, spec in settings.flags.items()
        if flag[-_SUFFIX_CHARACTERS:] == _SUFFIX and spec.get("choices") and not spec.get("ours")
    ]
    flag_words = {part: _flag_words(part) for part, _, _ in flags}
    for number, frame in enumerate(reversed(own_frames[-_REACH:]), 1):
        words = _path_words(frame)
        parts = [
            (part, flag, spec)
            for part, flag, spec in flags
            if _chooses(flag_words[part], words, flag_words.values())
        ]
        if parts:
            _, flag, spec = max(parts, key=lambda item: (len(item[0]), item[1]))
            return _choices(own_frames[-number:], flag, spec, options)
    return {}


def _flag_words(part: str) -> frozenset[str]:
    return frozenset(_FORMS.get(word, word) for word in part.split("-"))


def _chooses(
    flag_words: frozenset[str], path_words: set[str], other_flags: Collection[frozenset[str]]
) -> bool:
    """Whether a flag of these words chooses the implementation of a part with this path.

    A flag for one step of the work counts for all steps where no flag does.
    """
    if flag_words == _ATTENTION and not _STATE_WORDS.isdisjoint(path_words):
        return False
    kept_words = flag_words - _STEPS
    return flag_words <= path_words or (
        bool(kept_words) and kept_words <= path_words and kept_words not in other_flags
    )


def _choices(
    frames: Sequence[str], flag: str, spec: Mapping[str, Any], options: StartOptions
) -> dict[str, Scalar]:
    """The other implementations that a flag offers. frames: the part's frame, and those further
    in."""
    names = [str(name) for name in spec["choices"]]
    file = frames[0].rpartition(":")[0].rpartition("/")[2]
    if any(map(_TRITON_FOLDER.search, frames[1:])):
        file += " triton"
    failed_names = [name for name in names if options.gives(flag, name) or _is_in(name, file)]
    failed_name = max(failed_names, key=len, default="")
    other_names = [
        name for name in names if _GENERAL.match(name) and name.lower() != failed_name.lower()
    ]
    other_names = [name for name in other_names if name != spec.get("default") or failed_name]
    if not other_names:
        return {}
    values: dict[str, Scalar] = {
        "backend_flag": f"--{flag}",
        "backend_choices": ", ".join(other_names[:_MAX_CHOICES]),
    }
    return values | ({"failed_backend": failed_name} if failed_name else {})


def _is_in(name: str, file: str) -> bool:
    """Whether the name of a file has the name of an implementation."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return len(letters) >= _MIN_CHARACTERS and letters in re.sub(r"[^a-z0-9]", "", file.lower())


def _path_words(frame: str) -> set[str]:
    """The words of a frame's folders and file, in the forms of flags too."""
    path = frame.rpartition(":")[0].removesuffix(".py")
    words = {word.lower() for word in re.split(r"[/_]", path)}
    return words | {_FORMS.get(word, word) for word in words}
