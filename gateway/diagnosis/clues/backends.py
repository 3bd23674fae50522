"""The flag that chooses the implementation of the part whose code failed. Pure.

An engine has a folder for each part (`layers/attention/`), a file for each implementation of it
(`trtllm_mha_backend`), and a flag that lists the implementations (--attention-backend). So the
path of a frame leads to the flag and, where a file is named so, to the implementation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    for frame in reversed(own_frames[-_REACH:]):
        words = _path_words(frame)
        parts = [
            (part, flag, spec)
            for part, flag, spec in flags
            if {_FORMS.get(word, word) for word in part.split("-")} <= words
        ]
        if parts:
            _, flag, spec = max(parts, key=lambda item: (len(item[0]), item[1]))
            return _choices(frame, flag, spec, options)
    return {}


def _choices(
    frame: str, flag: str, spec: Mapping[str, Any], options: StartOptions
) -> dict[str, Scalar]:
    """The other implementations that a flag offers."""
    names = [str(name) for name in spec["choices"]]
    file = frame.rpartition(":")[0].rpartition("/")[2]
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
