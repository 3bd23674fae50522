"""Knowledge bundles: a trusted signature over every byte, and files that stay in their folder."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from joserfc import jws
from joserfc.jwk import ECKey, OKPKey

from gateway.errors import BadRequest, FitserveError, Forbidden, SettingsError
from gateway.profiles.knowledge_bundle import SIGNED_MANIFEST, read_bundle, trusted_keys
from gateway.profiles.knowledge_folder import Manifest
from tests.support.knowledge import bundle_of, new_key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small folder of profiles."""
    folder = tmp_path / "profiles"
    (folder / "failures").mkdir(parents=True)
    (folder / "facts.yaml").write_text("[]\n")
    (folder / "failures" / "words.yaml").write_text("- kind: x\n")
    return folder


@pytest.fixture
def key(tmp_path: Path) -> OKPKey:
    return new_key(tmp_path / "keys", "maker")


def with_member(bundle: bytes, name: str, content: bytes) -> bytes:
    """The bundle with another content of one of its files."""
    output = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(bundle)) as former,
        zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for entry in former.infolist():
            if entry.filename != name:
                archive.writestr(entry, former.read(entry))
        archive.writestr(name, content)
    return output.getvalue()


def manifest_bundle(manifest: Manifest, key: OKPKey) -> bytes:
    """A bundle of a manifest alone."""
    token = jws.serialize_compact(
        {"alg": "Ed25519"}, manifest.model_dump_json().encode(), key, algorithms=["Ed25519"]
    )
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr(SIGNED_MANIFEST, token)
    return output.getvalue()


def test_a_bundle_has_the_files_of_its_folder_and_the_name_of_its_signer(
    folder: Path, key: OKPKey, tmp_path: Path
) -> None:
    new_key(tmp_path / "keys", "another")
    bundle = read_bundle(bundle_of(folder, key, 7, note="news"), trusted_keys([tmp_path / "keys"]))
    assert bundle.signer == "maker"
    assert bundle.files == {"facts.yaml": b"[]\n", "failures/words.yaml": b"- kind: x\n"}
    assert (bundle.manifest.number, bundle.manifest.note) == (7, "news")


def test_equal_profiles_give_equal_bundles(folder: Path, key: OKPKey) -> None:
    assert bundle_of(folder, key, 7) == bundle_of(folder, key, 7)


def test_a_signature_of_another_key_is_refused(folder: Path, key: OKPKey, tmp_path: Path) -> None:
    keys = trusted_keys([tmp_path / "keys"])
    with pytest.raises(Forbidden, match="no signature of a trusted key"):
        read_bundle(bundle_of(folder, OKPKey.generate_key("Ed25519"), 7), keys)


def test_a_gateway_without_trusted_keys_takes_no_bundle(folder: Path, key: OKPKey) -> None:
    with pytest.raises(Forbidden, match="No key for knowledge bundles is trusted"):
        read_bundle(bundle_of(folder, key, 7), {})


@pytest.mark.parametrize("name", ["profiles/facts.yaml", "profiles/failures/words.yaml"])
def test_a_file_that_was_changed_after_the_signature_is_refused(
    folder: Path, key: OKPKey, tmp_path: Path, name: str
) -> None:
    bundle = with_member(bundle_of(folder, key, 7), name, b"[1]\n")
    with pytest.raises(BadRequest, match="not the one that was signed"):
        read_bundle(bundle, trusted_keys([tmp_path / "keys"]))


def test_a_file_outside_the_manifest_is_not_read(folder: Path, key: OKPKey, tmp_path: Path) -> None:
    bundle = with_member(bundle_of(folder, key, 7), "profiles/gpus.yaml", b"[1]\n")
    assert "gpus.yaml" not in read_bundle(bundle, trusted_keys([tmp_path / "keys"])).files


def test_a_manifest_that_was_changed_is_refused(folder: Path, key: OKPKey, tmp_path: Path) -> None:
    content = bundle_of(folder, key, 7)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        head, _, mark = archive.read(SIGNED_MANIFEST).decode().split(".")
    with zipfile.ZipFile(io.BytesIO(bundle_of(folder, key, 8))) as archive:
        payload = archive.read(SIGNED_MANIFEST).decode().split(".")[1]
    changed_bundle = with_member(content, SIGNED_MANIFEST, f"{head}.{payload}.{mark}".encode())
    with pytest.raises(Forbidden):
        read_bundle(changed_bundle, trusted_keys([tmp_path / "keys"]))


@pytest.mark.parametrize(
    "name",
    [
        "../facts.yaml",
        "/facts.yaml",
        "engines/../../a.yaml",
        "keys/evil.pem",
        "a\\b",
        "./facts.yaml",
    ],
)
def test_a_signed_path_outside_the_profiles_is_refused(
    key: OKPKey, tmp_path: Path, name: str
) -> None:
    manifest = Manifest(form=1, number=1, date="", versions="", files={name: "0" * 64})
    with pytest.raises(BadRequest, match="cannot have the file"):
        read_bundle(manifest_bundle(manifest, key), trusted_keys([tmp_path / "keys"]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda bundle: b"",
        lambda bundle: b"PK" + b"\0" * 100,
        lambda bundle: bundle[: len(bundle) // 2],
        lambda bundle: with_member(bundle, SIGNED_MANIFEST, b"\xff\xfe"),
    ],
)
def test_a_damaged_archive_is_refused(
    folder: Path, key: OKPKey, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(FitserveError) as raised:
        read_bundle(spoil(bundle_of(folder, key, 7)), trusted_keys([tmp_path / "keys"]))
    assert isinstance(raised.value, BadRequest | Forbidden)


def test_a_manifest_of_a_later_form_asks_for_an_upgrade(key: OKPKey, tmp_path: Path) -> None:
    token = jws.serialize_compact({"alg": "Ed25519"}, b'{"form": 2}', key, algorithms=["Ed25519"])
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr(SIGNED_MANIFEST, token)
    with pytest.raises(BadRequest, match="manifest") as raised:
        read_bundle(output.getvalue(), trusted_keys([tmp_path / "keys"]))
    assert "upgrade" in raised.value.hint


def test_an_archive_that_unpacks_to_more_than_a_bundle_may_have_is_refused(
    key: OKPKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr("gateway.profiles.knowledge_bundle._PROFILE_BYTES", 10)
    with pytest.raises(BadRequest, match="larger than a bundle may be"):
        read_bundle(bundle_of(folder, key, 7), trusted_keys([tmp_path / "keys"]))


@pytest.mark.parametrize(
    "content",
    [
        b"no key",
        OKPKey.generate_key("Ed25519").as_pem(private=True),
        OKPKey.generate_key("X25519").as_pem(private=False),
        ECKey.generate_key("P-256").as_pem(private=False),
    ],
    ids=["text", "private", "other_curve", "other_kind"],
)
def test_a_file_that_is_no_public_ed25519_key_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pem").write_bytes(content)
    with pytest.raises(SettingsError, match="The key"):
        trusted_keys([tmp_path])
