"""Routes of other programs, and the words about them."""

from __future__ import annotations

import re

import pytest

from gateway.cli.registry import SECTIONS
from gateway.errors import NotFound
from gateway.proxy.api.endpoints import find, is_inference
from gateway.proxy.api.foreign_routes import foreign_hint, foreign_routes

COMMANDS = {name for section in SECTIONS.values() for name in section}


@pytest.mark.parametrize("route", foreign_routes())
def test_a_foreign_route_has_a_hint_and_no_endpoint(route: str) -> None:
    hint = foreign_hint(route)
    assert hint
    assert foreign_hint(f"{route}/more/parts") == hint
    assert set(re.findall(r"`fitserve ([a-z]+)", hint)) <= COMMANDS
    for path in re.findall(r"(?<![\w`])/v1/[\w/]+", hint):
        assert is_inference(path), path
    if is_inference(route):
        with pytest.raises(NotFound, match=re.escape(hint)):
            find(route, b"", "GET")


@pytest.mark.parametrize("path", ["/", "", "/runningx", "/v1/nosuch", "/admin/models", "//"])
def test_other_paths_are_of_no_known_program(path: str) -> None:
    assert not foreign_hint(path)
