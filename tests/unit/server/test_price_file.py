"""The file of prices, and its mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import SettingsError
from gateway.proxy.access.prices import ModelPrice, Prices
from gateway.server.price_file import read_prices


def test_prices_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(
        'currency: EUR\nmodels:\n  qwen: {prompt: 0.1, completion: 0.4}\n  "*": {gpu_hour: 2}\n'
    )
    prices = read_prices(file)
    assert prices == Prices(
        {"qwen": ModelPrice(0.1, 0.4), "*": ModelPrice(gpu_hour=2.0)}, currency="EUR"
    )
    assert prices.find("qwen") == ModelPrice(0.1, 0.4)
    assert prices.find("other") == ModelPrice(gpu_hour=2.0)
    assert Prices({"a": ModelPrice()}).find("b") is None
    assert read_prices(None) == Prices()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: {a: {prompt: -1}}", "models.a.prompt"),
        ("models: {a: {promt: 1}}", "models.a.promt"),
        ("models: {}", "models"),
        ("- a", "the file"),
        ("models: {a: {prompt: 1}, a: {prompt: 2}}", ":1:"),
        ("models: [", ":1:"),
    ],
)
def test_a_mistake_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as refusal:
        read_prices(file)
    assert problem in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"prices\.yaml"):
        read_prices(tmp_path / "prices.yaml")
