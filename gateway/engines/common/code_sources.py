"""Places in an engine's code that the planner's choices and refusals name as their source. Pure."""

from __future__ import annotations

from typing import NamedTuple


class CodeSources(NamedTuple):
    """Sources of one engine kind; "planner": a limit of this planner, not of the engine.

    auto_dtype: the dtype of activations where a model has float32 weights.
    bfloat16: the least compute capability for bfloat16.
    other_dtype: another dtype of activations than that of the weights, which a GPU cannot compute.
    ranks: layers and heads that ranks of tensor parallelism cannot share.
    stages: layers that stages of a pipeline cannot share.
    unlike_ranks: ranks whose GPUs take different kernels.
    expert_adapters: adapters of a model with experts.
    balanced_ranks: ranks with unlike free memory; "": the kind takes them.
    """

    auto_dtype: str
    bfloat16: str
    other_dtype: str
    ranks: str
    stages: str
    unlike_ranks: str
    expert_adapters: str
    balanced_ranks: str = ""
