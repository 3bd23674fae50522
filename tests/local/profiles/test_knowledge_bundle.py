"""scripts/knowledge makes a pair of keys, and a bundle that only its public key opens."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from gateway.profiles.knowledge_bundle import read_bundle, trusted_keys
from tests.support.paths import ROOT
from tests.support.patience import hang_s


def run(folder: Path, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "knowledge"), *arguments]
    subprocess.run(command, cwd=folder, check=True, timeout=hang_s())


def test_a_bundle_of_all_profiles_is_opened_by_the_public_key(tmp_path: Path) -> None:
    run(tmp_path, "key", "team")
    private_key = tmp_path / "team.private.pem"
    assert stat.S_IMODE(private_key.stat().st_mode) == 0o600
    options = ("--key", str(private_key), "--number", "12", "--versions", ">=0.1,<0.2")
    run(tmp_path, "pack", "k12.zip", *options)
    (tmp_path / "trusted").mkdir()
    (tmp_path / "team.pem").rename(tmp_path / "trusted" / "team.pem")
    bundle = read_bundle((tmp_path / "k12.zip").read_bytes(), trusted_keys([tmp_path / "trusted"]))
    assert (bundle.manifest.number, bundle.signer) == (12, "team")
    assert bundle.files["facts.yaml"] == (ROOT / "profiles" / "facts.yaml").read_bytes()
