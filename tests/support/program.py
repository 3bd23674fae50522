"""The program `fitserve` with all its commands."""

from __future__ import annotations

from gateway.cli.main import app
from gateway.cli.registry import add_commands

add_commands(app)

__all__ = ["app"]
