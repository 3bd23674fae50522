"""Headers of safetensors files: names, dtypes and shapes of tensors, without one byte of weights.

A file is 8 bytes (little-endian length n), n bytes of JSON {name: {dtype, shape, data_offsets}},
then the data, which the tensors cover without holes. The limits and checks are those of the
reference implementation, which engines use, so a file that is refused here would fail there.
Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import msgspec

from gateway.errors import BadModel
from gateway.models.spec import Tensor

MAX_HEADER_BYTES = 100_000_000
# Of a whole model. The largest that are published, with a quantized matrix for each of 384 experts
# in 60 layers, have 280,000.
MOST_TENSORS = 500_000
# Over nine of ten headers are shorter, so one read does for most files.
FIRST_READ_BYTES = 64 * 1024

_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_BITS |= {
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}

# Bounds on what is multiplied: a hostile header must not cost minutes.
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct, gc=False):
    dtype: Annotated[str, msgspec.Meta(min_length=1, max_length=16)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=32)]
    data_offsets: tuple[_Size, _Size]


def read_header(where: str, size: int, read: Callable[[int, int], bytes]) -> dict[str, Tensor]:
    """The tensors of the file `where` of `size` bytes; `read(offset, length)` gives fewer bytes
    only at its end.

    Raises BadModel saying what is wrong with the file.
    """
    first = read(0, min(size, FIRST_READ_BYTES))
    if len(first) < 8:
        _refuse(where, f"it has {len(first)} bytes, fewer than the 8 of the header's length")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        _refuse(
            where, f"its header would be {length} bytes long, over the limit of {MAX_HEADER_BYTES}"
        )
    if length > size - 8:
        _refuse(where, f"its header ends at byte {8 + length}, but the file has {size}")
    if len(first) < 8 + length:
        first += read(len(first), 8 + length - len(first))
    header = first[8 : 8 + length]
    if len(header) < length:
        _refuse(where, f"only {len(header)} of the {length} bytes of its header can be read")
    return _tensors(where, header, size - 8 - length)


def _tensors(where: str, header: bytes, data_bytes: int) -> dict[str, Tensor]:
    # Counted before anything is read: each tensor takes a hundred times the memory of its text.
    if (count := header.count(b'"data_offsets"')) > MOST_TENSORS:
        _refuse(where, f"its header has {count} tensors, over the limit of {MOST_TENSORS}")
    try:
        entries = msgspec.json.decode(header)
    except (ValueError, RecursionError) as error:
        _refuse(where, f"its header is not JSON ({error})")
    if not isinstance(entries, dict):
        _refuse(where, "its header is not a JSON object")
    entries.pop("__metadata__", None)
    try:
        checked = msgspec.convert(entries, dict[str, _Entry])
    except msgspec.ValidationError:
        _refuse_entry(where, entries)
    tensors: dict[str, Tensor] = {}
    end = covered = 0
    for name, entry in checked.items():
        dtype, shape, (start, stop) = entry.dtype, entry.shape, entry.data_offsets
        bits = _BITS.get(dtype)
        if start > stop or (bits is not None and math.prod(shape) * bits != (stop - start) * 8):
            _refuse(
                where,
                f"tensor {name} of shape {list(shape)[:8]} and dtype {dtype} cannot be the bytes"
                f" {start} to {stop}",
            )
        end = max(end, stop)
        covered += stop - start
        tensors[name] = Tensor(dtype, shape)
    if end != data_bytes:
        other = "is cut off" if end > data_bytes else "is longer than that"
        _refuse(
            where,
            f"its header describes {end} bytes of weights and the file has {data_bytes}, so it"
            f" {other}",
        )
    if covered != end:
        _refuse(where, "its tensors overlap or leave holes")
    return tensors


def _refuse_entry(where: str, entries: dict[str, Any]) -> NoReturn:
    for name, entry in entries.items():
        try:
            msgspec.convert(entry, _Entry)
        except msgspec.ValidationError as error:
            _refuse(where, f"tensor {name[:200]}: {error}")
    _refuse(where, "its header does not describe tensors")


def _refuse(where: str, reason: str) -> NoReturn:
    raise BadModel(
        f"{where} is not a whole safetensors file: {reason}.", hint="Download or copy it again."
    ) from None
