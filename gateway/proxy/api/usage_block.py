"""The usage block of an answer, as msgspec reads it. Not compiled, like `request_fields`."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]


class UsageBlock(msgspec.Struct):
    """Usage block in OpenAI's form without nested blocks."""

    prompt_tokens: _Count
    completion_tokens: _Count
