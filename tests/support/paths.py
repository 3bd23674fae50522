"""Where the files of this project are, for every test, whatever folder it is in."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "tests" / "logs"
MODELS = ROOT / "tests" / "models"
SNAPSHOTS = ROOT / "profiles" / "hardware"
FAKE_ENGINE = ROOT / "tests" / "support" / "fake_engine.py"
