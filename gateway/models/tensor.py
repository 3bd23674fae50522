"""A tensor as the header of a safetensors file describes it."""

from __future__ import annotations

from typing import NamedTuple


class Tensor(NamedTuple):
    """The type and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]
