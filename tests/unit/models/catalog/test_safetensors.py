"""gateway.models.catalog.safetensors: the content of a header, and every fault that it can have."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadModel
from gateway.models.catalog.safetensors import FIRST_READ_BYTES, read_header
from gateway.models.tensor import Tensor
from tests.support.model_files import entries, pack, safetensors


def header_of(data: bytes, size: int | None = None) -> dict[str, Tensor]:
    return read_header(
        "x.safetensors",
        len(data) if size is None else size,
        lambda at, count: data[at : at + count],
    )


def read_or_refusal(data: bytes) -> dict[str, Tensor] | BadModel:
    try:
        return header_of(data)
    except BadModel as error:
        return error


def one_tensor(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]} | changes}


def test_tensors_have_dtype_and_shape_and_metadata_is_no_tensor() -> None:
    assert header_of(safetensors({"a": (2, 3), "b": (4,)})) == {
        "a": Tensor("BF16", (2, 3)),
        "b": Tensor("BF16", (4,)),
    }


def test_a_scalar_an_empty_tensor_and_no_tensor_are_fine() -> None:
    assert header_of(safetensors({"scalar": (), "empty": (0, 5)}, "F32")) == {
        "scalar": Tensor("F32", ()),
        "empty": Tensor("F32", (0, 5)),
    }
    assert header_of(safetensors({})) == {}


def test_a_dtype_that_is_not_known_yet_is_taken_as_it_is() -> None:
    assert header_of(pack(one_tensor(dtype="F2_NEW"), 12)) == {"a": Tensor("F2_NEW", (2, 3))}


def test_weights_are_not_read() -> None:
    data = safetensors({"a": (1024, 1024)})
    reads: list[int] = []

    def read(at: int, count: int) -> bytes:
        reads.append(count)
        return data[at : at + count]

    read_header("x", len(data), read)
    assert reads == [FIRST_READ_BYTES]


def test_a_header_longer_than_the_first_read_is_read_in_two() -> None:
    shapes = {f"tensor.{n}": (1,) for n in range(2000)}
    data = safetensors(shapes)
    reads: list[tuple[int, int]] = []

    def read(at: int, count: int) -> bytes:
        reads.append((at, count))
        return data[at : at + count]

    assert len(read_header("x", len(data), read)) == 2000
    assert reads == [(0, FIRST_READ_BYTES), (FIRST_READ_BYTES, len(data) - 4000 - FIRST_READ_BYTES)]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "has 0 bytes"),
        (b"\x01\0\0", "has 3 bytes"),
        (struct.pack("<Q", 100_000_001) + b"{}", "over the limit"),
        (struct.pack("<Q", 2**63) + b"{}", "over the limit"),
        (struct.pack("<Q", 50) + b"{}", "ends at byte 58, but the file has 10"),
        (pack(b"{nonsense", 0), "not JSON"),
        (pack(b"\xff\xfe", 0), "not JSON"),
        (pack(b"[" * 100_000, 0), "not JSON"),
        (pack(b"[]", 0), "not a JSON object"),
        (pack({"a": 7}, 0), "tensor a: "),
        (pack({"a": {"shape": [1], "data_offsets": [0, 2]}}, 2), "`dtype`"),
        (pack({"a": {"dtype": "F16", "data_offsets": [0, 2]}}, 2), "`shape`"),
        (pack({"a": {"dtype": "F16", "shape": [1]}}, 2), "`data_offsets`"),
        (pack(one_tensor(shape=[-2, -3]), 12), "tensor a: "),
        (pack(one_tensor(shape=[2.0, 3]), 12), "tensor a: "),
        (pack(one_tensor(shape=[2**62, 2**62]), 12), "cannot be the bytes"),
        (pack(one_tensor(shape=[1] * 33), 12), "tensor a: "),
        (
            pack(one_tensor(shape=[2, 4]), 12),
            "shape [2, 4] and dtype F16 cannot be the bytes 0 to 12",
        ),
        (pack(one_tensor(data_offsets=[-12, 0]), 12), "tensor a: "),
        (pack(one_tensor(data_offsets=[12, 0]), 12), "cannot be the bytes"),
        (pack(one_tensor(data_offsets=[0]), 12), "tensor a: "),
        (
            pack(one_tensor(), 11),
            "describes 12 bytes of weights and the file has 11, so it is cut off",
        ),
        (
            pack(one_tensor(), 13),
            "describes 12 bytes of weights and the file has 13, so it is longer",
        ),
        (pack(one_tensor() | {"b": one_tensor()["a"]}, 12), "overlap"),
        (
            pack(one_tensor() | {"b": {"dtype": "U8", "shape": [1], "data_offsets": [13, 14]}}, 14),
            "holes",
        ),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_a_remedy(data: bytes, reason: str) -> None:
    with pytest.raises(BadModel) as error:
        header_of(data)
    assert reason in error.value.message
    assert "x.safetensors" in error.value.message
    assert error.value.hint == "Download or copy it again."


def test_a_header_that_breaks_off_while_it_is_read_is_refused() -> None:
    data = safetensors({f"tensor.{n}": (1,) for n in range(2000)})
    with pytest.raises(BadModel, match="only 65536 of the"):
        header_of(data[: FIRST_READ_BYTES + 8], size=len(data))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_as_a_bad_model(data: bytes) -> None:
    outcome = read_or_refusal(data)
    assert outcome == {} if isinstance(outcome, dict) else "x.safetensors" in outcome.message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
_ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F16", "U8", "", "X"]) | _JSON,
        "shape": st.lists(st.integers(-2, 4), max_size=3) | _JSON,
        "data_offsets": st.lists(st.integers(-2, 40), max_size=3) | _JSON,
    },
)


@given(st.dictionaries(st.text(max_size=8), _ENTRY | _JSON, max_size=3), st.integers(0, 40))
def test_any_json_is_tensors_within_the_file_or_a_bad_model(
    header: dict[str, Any], data_bytes: int
) -> None:
    outcome = read_or_refusal(pack(header, data_bytes))
    if isinstance(outcome, dict):
        assert outcome.keys() == header.keys() - {"__metadata__"}


@given(st.integers(0), st.integers(0, 255))
def test_one_wrong_byte_is_a_bad_model_or_another_header(position: int, value: int) -> None:
    data = bytearray(pack(entries({"a": (2, 3), "b": (4,)}), 20))
    data[position % len(data)] = value
    outcome = read_or_refusal(bytes(data))
    assert len(outcome) == 2 if isinstance(outcome, dict) else "x.safetensors" in outcome.message


def test_a_header_of_empty_tensors_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{%b}" % b",".join(entry % number for number in range(20_000))
    file = len(header).to_bytes(8, "little") + header
    monkeypatch.setattr(msgspec.json, "decode", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(BadModel, match="20000 tensors have 0 bytes in all"):
        read_header("m", len(file), lambda start, size: file[start : start + size])
