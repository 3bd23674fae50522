"""docs/api.md has each call of the admin API with the statuses of its answers, and each field of a
model."""

from __future__ import annotations

import re

import pytest

from gateway.domain.wish import Policy
from gateway.server.admin.model_views import ModelView
from gateway.server.app import create_app
from gateway.settings import Settings
from gateway.wishes.model_request import ModelRequest
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
ROW = re.compile(r"^\| `([A-Z]+ /[^`]*)` \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
STATUS = re.compile(r"\b(?:2\d\d|409)\b")


def documented_statuses() -> dict[str, set[str]]:
    """Success statuses, and 409, of each row of the admin API."""
    rows = ROW.findall(PAGE.partition("\n## Admin\n")[2])
    assert len({call for call, _ in rows}) == len(rows)
    return {call: set(STATUS.findall(answers)) for call, answers in rows}


def route_statuses() -> dict[str, set[str]]:
    """The same of the routes, by method and path."""
    statuses = {}
    for route in create_app(Settings()).scopes.routes:
        if not route.path.startswith(("/admin", "/metrics", "/version", "/healthz", "/readyz")):
            continue
        answers = {
            str(getattr(route, "status_code", None) or 200),
            *map(str, getattr(route, "responses", {})),
        }
        for method in {*(route.methods or ())} - {"HEAD"}:
            call = f"{method} {route.path.replace(':path}', '}')}"
            statuses[call] = {answer for answer in answers if STATUS.fullmatch(answer)}
    return statuses


def test_each_call_has_a_row_with_its_answers() -> None:
    assert documented_statuses() == route_statuses()


def words_of_tables(section: str) -> set[str]:
    """Words between backticks in the first cells of the tables of a section."""
    text = PAGE.partition(f"\n{section}\n")[2].partition("\n### ")[0]
    cells = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("kind", [ModelRequest, Policy, ModelView])
def test_each_field_of_a_model_has_a_row(kind: type[ModelRequest | Policy | ModelView]) -> None:
    assert set(kind.model_fields) - words_of_tables("### A model") == set()
