"""Expressions of the dashboard."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.paths import ROOT
from tests.support.yaml_file import read_yaml

DASHBOARD = ROOT / "docker" / "grafana" / "dashboards" / "fitserve.json"


ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"


# Prometheus' own.
OTHERS = {"up": {"job", "instance"}}


NAME = re.compile(r"\b((?:fitserve|process)_[a-z_]+)\b(?:\{([^}]*)\})?")


def panels() -> list[str]:
    return [
        target["expr"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


def rules() -> list[dict[str, Any]]:
    return list(read_yaml(ALERTS)["groups"][0]["rules"])


def expressions() -> list[str]:
    return [*panels(), *(rule["expr"] for rule in rules())]
