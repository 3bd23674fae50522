"""gateway.domain: its names, each loaded with its module when it is first used."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from gateway import domain
from tests.support.paths import ROOT

PACKAGE = ROOT / "gateway" / "domain" / "__init__.py"


def test_every_name_that_type_checkers_see_is_found_in_its_module() -> None:
    imports = [
        node
        for node in ast.walk(ast.parse(PACKAGE.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gateway.domain.")
    ]
    modules = {name.name: node.module for node in imports for name in node.names}
    assert modules.keys() == {*domain.__all__}
    for name, module in modules.items():
        assert getattr(domain, name) is vars(sys.modules[str(module)])[name]


def test_a_wrong_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"gateway\.domain has no Plam"):
        domain.Plam  # noqa: B018


def test_a_program_that_uses_no_value_loads_none() -> None:
    code = "import sys, gateway.domain, gateway.domain.units; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pydantic" not in result.stdout.split()
