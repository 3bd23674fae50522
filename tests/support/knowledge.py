"""Knowledge bundles of tests: keys, and bundles of a folder of profiles."""

from __future__ import annotations

from pathlib import Path

from joserfc.jwk import OKPKey

from gateway.profiles.knowledge_bundle import pack_bundle
from gateway.profiles.knowledge_folder import Manifest


def new_key(folder: Path, name: str) -> OKPKey:
    """A private key, whose public part is `NAME.pem` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    key = OKPKey.generate_key("Ed25519")
    (folder / f"{name}.pem").write_bytes(key.as_pem(private=False))
    return key


def bundle_of(
    profiles: Path, key: OKPKey, number: int, *, versions: str = ">=0.1", note: str = ""
) -> bytes:
    """A signed bundle of the folder of profiles."""
    manifest = Manifest(
        form=1,
        number=number,
        date="2026-11-30",
        versions=versions,
        note=note,
        files={"facts.yaml": ""},
    )
    return pack_bundle(profiles, manifest, key)
