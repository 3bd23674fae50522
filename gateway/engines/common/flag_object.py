"""The JSON object that a flag of an engine holds. Pure."""

from __future__ import annotations

import json
from typing import Any

from gateway.domain import Scalar


def flag_object(value: Scalar | None) -> dict[str, Any]:
    """The object; empty for no flag, and for another form, which is refused elsewhere."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else {}
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
