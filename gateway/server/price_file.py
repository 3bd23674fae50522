"""The file of prices (FITSERVE_PRICES), whose form is in gateway/proxy/access/prices.py."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from gateway.domain import Value
from gateway.errors import SettingsError, plain_problem
from gateway.file_reading import read_file
from gateway.proxy.access.prices import ModelPrice, Prices
from gateway.wishes import yaml_document

_MAX_BYTES = 1024 * 1024
_MAX_PRICE = 10.0**6


class PriceRow(Value):
    """The price of a model. Tokens are counted in millions."""

    prompt: float = Field(0.0, ge=0, le=_MAX_PRICE, allow_inf_nan=False)
    completion: float = Field(0.0, ge=0, le=_MAX_PRICE, allow_inf_nan=False)
    cached: float | None = Field(None, ge=0, le=_MAX_PRICE, allow_inf_nan=False)
    gpu_hour: float = Field(0.0, ge=0, le=_MAX_PRICE, allow_inf_nan=False)


class PriceList(Value):
    """The content of the file."""

    currency: str = Field("", max_length=16)
    models: dict[str, PriceRow] = Field(min_length=1, max_length=10_000)


def read_prices(file: Path | None) -> Prices:
    """The prices of a file; none without one. Raises SettingsError."""
    if file is None:
        return Prices()
    try:
        text = read_file(file.expanduser(), _MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        raise _file_error(file, str(error)) from None
    content = yaml_document.read(text)
    if content.mistakes:
        raise SettingsError(
            f"The prices cannot be read: {content.mistakes[0].describe_in(file)}.",
            hint="docs/keys.md has an example.",
        )
    try:
        prices = PriceList.model_validate(content.data)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "the file"
        raise _file_error(file, f"{place}: {plain_problem(problem['msg'])}") from None
    rows = {name: ModelPrice(**row.model_dump()) for name, row in prices.models.items()}
    return Prices(rows, prices.currency)


def _file_error(file: Path, problem: str) -> SettingsError:
    return SettingsError(
        f"The prices of {file} cannot be read: {problem}.", hint="docs/keys.md has an example."
    )
