"""Facts that follow from the figures of a failure. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.domain import Scalar

_SHAPES = re.compile(r"shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)")
_SIZES = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_OWN_MEMORY = re.compile(r"(\d{1,4}(?:\.\d+)?) GiB is allocated by PyTorch")
_UPPER_BOUND = re.compile(r"<=? ?(\d+)\b")
# A table of positions has more rows than one of experts or requests.
_MIN_ROWS = 1024
# Memory for the driver's own needs in addition to an allocation.
_MARGIN = 2**30
_CHANNELS = 3


def short_table(assertion: str, context: int | None) -> dict[str, Scalar]:
    """The check of a kernel that failed, as `assertion`, and as `position_rows` the rows of the
    table that it guards, where the start asked for a longer context."""
    if not assertion:
        return {}
    rows = [int(number) for number in _UPPER_BOUND.findall(assertion)]
    is_short = context is not None and len(rows) == 1 and _MIN_ROWS <= rows[0] < context
    return {"assertion": assertion} | ({"position_rows": rows[0]} if is_short else {})


def conclude(message: str, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The circumstances that the sizes in a message, or in the values of its proof, show.

    `enough_free`: far more memory was free than an allocation asked for, so that no lack of it
    refused the allocation. `own_memory`: the failed process itself holds most of the GPU.
    `one_channel`: pixels have a third of the expected values, as those of an image in shades of
    gray. `other_interface`: NCCL uses another address than the engine was given. `unsplit`: a
    weight is as many times larger than its layer as there are ranks.
    """
    circumstances: dict[str, Scalar] = {}
    # Ray's log has the lines of several machines.
    if "host_ip" in values and "nccl_ip" in values and "ray_workers" not in values:
        is_other = values["host_ip"] != values["nccl_ip"]
        circumstances |= {"other_interface": "yes"} if is_other else {}
    tried_bytes = values.get("tried_bytes")
    free_bytes = values.get("free_bytes")
    if (
        isinstance(tried_bytes, int)
        and isinstance(free_bytes, int)
        and free_bytes > 2 * tried_bytes + _MARGIN
    ):
        circumstances["enough_free"] = "yes"
    if (match := _SHAPES.search(message)) and int(match[3]) == _CHANNELS * int(match[2]):
        circumstances["one_channel"] = "yes"
    total = values.get("total_bytes")
    ranks = values.get("ranks")
    allocated = _OWN_MEMORY.search(message)
    if allocated and isinstance(total, int) and 2 * float(allocated[1]) * 2**30 > total:
        circumstances["own_memory"] = "yes"
    if isinstance(ranks, int) and (match := _SIZES.search(message)):
        less, larger = sorted((int(match[1]), int(match[2])))
        if ranks > 1 and larger == ranks * less:
            circumstances["unsplit"] = "yes"
    return circumstances
