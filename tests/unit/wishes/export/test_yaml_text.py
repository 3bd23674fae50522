"""The YAML of exported documents."""

from __future__ import annotations

import pytest

from gateway.wishes.export.yaml_text import yaml_text


@pytest.mark.parametrize("text", ["1234e56", "1e-3", "-2E5", "0o17", "09", "1.", ".5", "y", "N"])
def test_text_that_kubernetes_reads_as_another_type_has_quotes(text: str) -> None:
    assert yaml_text([{"value": text}]) == f"value: '{text}'"


@pytest.mark.parametrize("text", ["v1", "12ab34", "1234e", "e5", "1.2.3", "yaml", "--port"])
def test_other_text_stays_plain(text: str) -> None:
    assert yaml_text([{"value": text}]) == f"value: {text}"


def test_number_and_boolean_stay_plain() -> None:
    assert yaml_text([{"a": 8, "b": 0.9, "c": True, "d": None}]) == (
        "a: 8\nb: 0.9\nc: true\nd: null"
    )
