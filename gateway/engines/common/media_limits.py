"""The number of images, videos and sounds in a prompt that flags of a user allow. Pure.

Sources: limit_per_prompt and language_model_only of MultiModalConfig (vllm/config/multimodal.py,
0.33.0), where a limit is a number or an object with `count`; limit_mm_data_per_request of
ServerArgs (sglang/srt/server_args.py, 0.5.23), where it is a number.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Scalar
from gateway.engines.common.flag_object import flag_object

MEDIA_FLAGS = ("language-model-only", "limit-mm-per-prompt", "limit-mm-data-per-request")
_TEXT_ONLY, *_LIMIT_FLAGS = MEDIA_FLAGS


def media_limit(args: Mapping[str, Scalar], kind: str) -> int | None:
    """The most items of this kind in a prompt; None: flags limit none.

    args: values by the names of flags, as engines spell them without dashes in front.
    """
    if str(args.get(_TEXT_ONLY, False)).lower() == "true":
        return 0
    limits = [flag_object(args.get(flag)).get(kind) for flag in _LIMIT_FLAGS]
    counts = [limit.get("count") if isinstance(limit, Mapping) else limit for limit in limits]
    return min((count for count in counts if type(count) is int), default=None)
