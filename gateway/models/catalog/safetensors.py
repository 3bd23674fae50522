"""Headers of safetensors files: names, dtypes and shapes of tensors, without the weights.

A file is 8 bytes (little-endian length n), n bytes of JSON {name: {dtype, shape, data_offsets}},
then the data, which the tensors cover without holes. The limits and checks are those of the
reference implementation, which engines use: an engine also refuses each file refused here.
Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import msgspec

from gateway.errors import BadModel
from gateway.models.tensor import Tensor

MAX_HEADER_BYTES = 100_000_000
# The limit of a whole model. The largest published models have 280,000 tensors: a quantized matrix
# for each of 384 experts in 60 layers.
MAX_TENSORS = 500_000
# Tensors of a file whose header takes no second to read. More of them have to hold more bytes than
# their descriptions: a model of empty tensors would cost a minute and a gigabyte.
_MANY_TENSORS = 10_000
# More than nine in ten headers are shorter, so most files need one read.
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

# Bounds of the factors of a product, so that a hostile header does not cost minutes.
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _HeaderEntry(msgspec.Struct, gc=False):
    dtype: Annotated[str, msgspec.Meta(min_length=1, max_length=16)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=32)]
    data_offsets: tuple[_Size, _Size]


def read_header(location: str, size: int, read: Callable[[int, int], bytes]) -> dict[str, Tensor]:
    """The tensors in the header of a safetensors file.

    location: the file's path for messages.
    size: bytes of the file.
    read: `read(offset, length)` returns fewer bytes only at the end of the file.

    Raises BadModel.
    """
    first = read(0, min(size, FIRST_READ_BYTES))
    if len(first) < 8:
        _refuse_file(
            location, f"it has {len(first)} bytes, fewer than the 8 of the header's length"
        )
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        _refuse_file(
            location,
            f"its header would be {length} bytes long, over the limit of {MAX_HEADER_BYTES}",
        )
    if length > size - 8:
        _refuse_file(location, f"its header ends at byte {8 + length}, but the file has {size}")
    if len(first) < 8 + length:
        first += read(len(first), 8 + length - len(first))
    header = first[8 : 8 + length]
    if len(header) < length:
        _refuse_file(
            location, f"only {len(header)} of the {length} bytes of its header can be read"
        )
    return _read_tensors(location, header, size - 8 - length)


def _read_tensors(location: str, header: bytes, data_bytes: int) -> dict[str, Tensor]:
    """The tensors of a header that describes all bytes of its file. Raises BadModel."""
    # Counted before parsing: each tensor takes a hundred times the memory of its text.
    if (count := header.count(b'"data_offsets"')) > MAX_TENSORS:
        _refuse_file(location, f"its header has {count} tensors, over the limit of {MAX_TENSORS}")
    if count > _MANY_TENSORS and data_bytes < len(header):
        _refuse_file(
            location, f"its {count} tensors have {data_bytes} bytes in all, fewer than their header"
        )
    try:
        entries = msgspec.json.decode(header)
    except (ValueError, RecursionError) as error:
        _refuse_file(location, f"its header is not JSON ({error})")
    if not isinstance(entries, dict):
        _refuse_file(location, "its header is not a JSON object")
    entries.pop("__metadata__", None)
    try:
        checked = msgspec.convert(entries, dict[str, _HeaderEntry])
    except msgspec.ValidationError:
        _refuse_entry(location, entries)
    tensors: dict[str, Tensor] = {}
    end = covered_bytes = 0
    for name, entry in checked.items():
        dtype, shape, (start, stop) = entry.dtype, entry.shape, entry.data_offsets
        bits = _BITS.get(dtype)
        if start > stop or (bits is not None and math.prod(shape) * bits != (stop - start) * 8):
            _refuse_file(
                location,
                f"tensor {name} of shape {list(shape)[:8]} and dtype {dtype} cannot be the bytes"
                f" {start} to {stop}",
            )
        end = max(end, stop)
        covered_bytes += stop - start
        tensors[name] = Tensor(dtype, shape)
    if end != data_bytes:
        fault = "is cut off" if end > data_bytes else "is longer"
        _refuse_file(
            location,
            f"its header describes {end} bytes of weights and the file has {data_bytes}, so it"
            f" {fault}",
        )
    if covered_bytes != end:
        _refuse_file(location, "its tensors overlap or leave holes")
    return tensors


def _refuse_entry(location: str, entries: dict[str, Any]) -> NoReturn:
    for name, entry in entries.items():
        try:
            msgspec.convert(entry, _HeaderEntry)
        except msgspec.ValidationError as error:
            _refuse_file(location, f"tensor {name[:200]}: {error}")
    _refuse_file(location, "its header does not describe tensors")


def _refuse_file(location: str, reason: str) -> NoReturn:
    raise BadModel(
        f"{location} is not a complete safetensors file: {reason}.",
        hint="Download or copy it again.",
    ) from None
