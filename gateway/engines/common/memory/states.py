"""Bytes of the state that a recurrent layer keeps of a sequence. Pure."""

from __future__ import annotations

from gateway.domain import AttentionGroup, Recurrent
from gateway.engines.common.memory.kv_cache import ITEM_BYTES


def state_bytes(recurrent: Recurrent, tp: int, *, inputs: str, matrices: str) -> int:
    """Bytes of one layer's state on one rank, unpadded.

    inputs: dtype of the convolution's last inputs.
    matrices: dtype of the matrices.
    """
    channels = recurrent.conv_channels
    if recurrent.kind == "mamba2" and recurrent.groups % tp:
        # Groups that do not divide are repeated, so that each rank has those of its heads.
        channels += 2 * max(0, tp - recurrent.groups) * recurrent.columns
    convolution = channels // tp * (recurrent.conv_kernel - 1) * ITEM_BYTES[inputs]
    values = recurrent.heads // tp * recurrent.rows * recurrent.columns
    return convolution + values * ITEM_BYTES.get(matrices, 4)


def replace_matrix_dtype(
    attention: tuple[AttentionGroup, ...], dtype: str
) -> tuple[AttentionGroup, ...]:
    """The groups, with matrices of recurrent layers in this dtype."""
    return tuple(
        group.evolve(recurrent=group.recurrent.evolve(dtype=dtype)) if group.recurrent else group
        for group in attention
    )
