"""Folders of the project, independent of the folder of a test."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "tests" / "logs"
MODELS = ROOT / "tests" / "models"
HUB = ROOT / "tests" / "hub"
SNAPSHOTS = ROOT / "profiles" / "hardware"
FAKE_ENGINE = ROOT / "tests" / "support" / "fake_engine.py"
