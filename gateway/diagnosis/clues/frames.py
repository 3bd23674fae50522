"""Frames of a traceback that say nothing of the part, and those of an engine's own code. Pure."""

from __future__ import annotations

import re

# Frames on the way of every call, which say nothing of the part.
WAY = re.compile(
    r"(?:\A|/)(?:torch/(?:nn/modules/|utils/|_ops\.py|_library/|library\.py|jit/"
    r"|_dynamo/(?:eval_frame|external_utils)|cuda/graphs\.py)"
    r"|(?:contextlib|functools|threading|runpy)\.py|concurrent/|asyncio/)|/tracing/otel\.py"
)
OWN_FRAME = re.compile(r"(?:\A|/)(?:vllm|sglang)/")
