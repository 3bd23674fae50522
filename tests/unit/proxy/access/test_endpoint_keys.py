"""Keys for endpoints are read from the files laid for them, and from nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.domain import Wish
from gateway.proxy.access.endpoint_keys import FOLDER, EndpointKeys, NoKeyError

ENDPOINTS = ("http://h:1/v1",)


def keys(data: Path, **environment: str) -> EndpointKeys:
    (data / FOLDER).mkdir()
    return EndpointKeys(data, environment)


def test_a_key_is_read_where_it_is_laid_and_each_time(tmp_path: Path) -> None:
    endpoint_keys = keys(
        tmp_path, FITSERVE_ENDPOINT_KEY_LAB="sk-lab", FITSERVE_ENDPOINT_KEY=" sk-one\n"
    )
    assert endpoint_keys.read("env:FITSERVE_ENDPOINT_KEY_LAB").reveal() == "sk-lab"
    assert endpoint_keys.read("env:FITSERVE_ENDPOINT_KEY").reveal() == "sk-one"
    file = tmp_path / FOLDER / "lab.key"
    for key in ("first", "second"):
        file.write_text(f"{key}\n")
        assert endpoint_keys.read("file:lab.key").reveal() == key


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "its file: No such file or directory"),
        (b"", "it is empty"),
        (b"  \n", "it is empty"),
        (b"secret one\n", "blanks"),
        (b"secret\r\nx-admin: 1", "several lines"),
        (b"secret\xff", "characters"),
        (b"secret" * 1000, "more than 4 KiB"),
    ],
)
def test_a_missing_key_is_reported_without_its_text_and_place(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    endpoint_keys = keys(tmp_path)
    if content is not None:
        (tmp_path / FOLDER / "lab").write_bytes(content)
    with pytest.raises(NoKeyError, match=reason) as error:
        endpoint_keys.read("file:lab")
    assert not {"secret", "lab", str(tmp_path)} & {
        word for word in ("secret", "lab", str(tmp_path)) if word in str(error.value)
    }
    with pytest.raises(NoKeyError, match="not set") as error:
        endpoint_keys.read("env:FITSERVE_ENDPOINT_KEY_LAB")
    assert "LAB" not in str(error.value)


@pytest.mark.parametrize(
    "reference",
    [
        "sk-live-0123456789",
        "env:HF_TOKEN",
        "env:FITSERVE_ADMIN_KEY",
        "env:FITSERVE_ENDPOINT_KEYS",
        "env:FITSERVE_ENDPOINT_KEYX",
        "file:/etc/shadow",
        "file:../keys.json",
        "file:..",
        "file:a/b",
        "file:",
        "file:a\n",
        "FILE:a",
        "env:",
        "",
    ],
)
def test_only_an_allowed_reference_can_name_a_key(reference: str) -> None:
    with pytest.raises(ValidationError) as error:
        Wish(name="m", endpoints=ENDPOINTS, endpoint_key=reference)
    message = error.value.errors(include_url=False, include_input=False, include_context=False)[0][
        "msg"
    ]
    assert message.startswith("this is not allowed here: it says where the key is")
    assert reference in ("", "env:", "file:") or reference not in message


def test_a_key_in_its_place_can_be_named() -> None:
    for reference in (
        "env:FITSERVE_ENDPOINT_KEY",
        "env:FITSERVE_ENDPOINT_KEY_LAB_2",
        "file:lab",
        "file:lab-2.key",
    ):
        assert Wish(name="m", endpoints=ENDPOINTS, endpoint_key=reference).endpoint_key == reference
