"""Knowledge bundles: a folder of profiles as one signed file, for a running gateway.

    manifest.jws       -> Manifest as a compact JWS, signed with Ed25519
    profiles/PATH      -> a file of the profiles

The file is a ZIP archive. Nothing in it is read before the signature of its manifest is known to be
good, and no file without an entry in the manifest is read at all. joserfc checks signatures.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import OKPKey

from gateway.domain.base import ValidationError
from gateway.domain.value import first_problem
from gateway.errors import BadRequest, Forbidden, SettingsError
from gateway.file_reading import read_file
from gateway.profiles.knowledge_folder import PROFILES, Manifest

SIGNED_MANIFEST = "manifest.jws"
# The profiles of today take 4 MB.
_PROFILE_BYTES = 64 * 1024 * 1024
_MANIFEST_BYTES = 2 * 1024 * 1024
_KEY_BYTES = 16 * 1024
_ALGORITHM = "Ed25519"
# A fixed time, so that equal profiles give equal bundles.
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
# The names that a folder of profiles may have at its top. Keys are not among them, so a bundle
# cannot make another key trusted.
_TOP_NAMES = frozenset(
    {
        "cards.yaml",
        "chat_templates.yaml",
        "engine_checks",
        "engine_diffs",
        "engine_history",
        "engines",
        "facts.yaml",
        "failures",
        "gpus.yaml",
        "hardware",
        "instances.yaml",
        "parsers.yaml",
        "speed.yaml",
        "xids.yaml",
    }
)
_PACK_HINT = "`scripts/knowledge pack` writes bundles."


class Bundle(NamedTuple):
    """A bundle with a good signature.

    files: their content, by path below `profiles/`.
    signer: the name of the trusted key.
    """

    manifest: Manifest
    files: Mapping[str, bytes]
    signer: str


def trusted_keys(folders: Iterable[Path]) -> dict[str, OKPKey]:
    """The public keys of `NAME.pem` in these folders, by name. Raises SettingsError.

    A folder that does not exist has none.
    """
    keys: dict[str, OKPKey] = {}
    for path in (file for folder in folders for file in sorted(folder.glob("*.pem"))):
        try:
            key = OKPKey.import_key(read_file(path, _KEY_BYTES))
        except (OSError, ValueError, TypeError, JoseError) as error:
            raise SettingsError(
                f"The key {path} cannot be read: {error}.",
                hint="Give the PEM file of an Ed25519 public key, or remove the file.",
            ) from None
        if key.curve_name != _ALGORITHM or key.is_private:
            raise SettingsError(
                f"The key {path} is not the public key of an Ed25519 pair.",
                hint="`scripts/knowledge key` makes a pair. Only its public part belongs here.",
            )
        keys.setdefault(path.stem, key)
    return keys


def read_bundle(content: bytes, keys: Mapping[str, OKPKey]) -> Bundle:
    """The bundle of an archive. Raises BadRequest, Forbidden for a signature of no trusted key."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            signed_manifest = _read_member(archive, SIGNED_MANIFEST, _MANIFEST_BYTES)
            signer, payload = _verified_payload(signed_manifest.decode(), keys)
            manifest = _manifest(payload)
            return Bundle(manifest, _read_files(archive, manifest), signer)
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        ValueError,
        EOFError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise BadRequest(
            f"This is not a knowledge bundle: {str(error)[:200] or type(error).__name__}.",
            hint=_PACK_HINT,
        ) from None


def pack_bundle(folder: Path, manifest: Manifest, key: OKPKey) -> bytes:
    """The bundle of a folder of profiles. manifest: its `files` are those of the folder.

    key: the private key. Raises BadRequest for a file that no bundle may have.
    """
    contents = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] != "keys"
    }
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    whole_manifest = Manifest.model_validate(
        {**manifest.model_dump(exclude={"files"}), "files": digests}
    )
    for name in contents:
        _check_path(name)
    header = {"alg": _ALGORITHM, "kid": key.thumbprint()}
    token = jws.serialize_compact(
        header, whole_manifest.model_dump_json().encode(), key, algorithms=[_ALGORITHM]
    )
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(SIGNED_MANIFEST, _ZIP_TIME), token)
        for name, content in contents.items():
            entry = zipfile.ZipInfo(f"{PROFILES}/{name}", _ZIP_TIME)
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return output.getvalue()


def _verified_payload(token: str, keys: Mapping[str, OKPKey]) -> tuple[str, bytes]:
    """The name of the key that signed the manifest, and its text. Raises Forbidden."""
    if not keys:
        raise Forbidden(
            "No key for knowledge bundles is trusted.",
            hint=(
                "Put the signer's public key as NAME.pem into a folder, and set"
                " FITSERVE_KNOWLEDGE_KEYS to that folder."
            ),
        )
    for name, key in keys.items():
        try:
            return name, jws.deserialize_compact(token, key, algorithms=[_ALGORITHM]).payload
        except (JoseError, ValueError):
            continue
    raise Forbidden(
        "The knowledge bundle has no signature of a trusted key, or was changed after its"
        f" signature. Trusted keys: {', '.join(sorted(keys))}.",
        hint="Get the bundle again, or trust its signer's key with FITSERVE_KNOWLEDGE_KEYS.",
    )


def _manifest(payload: bytes) -> Manifest:
    try:
        return Manifest.model_validate_json(payload)
    except ValidationError as error:
        raise BadRequest(
            f"The manifest of the knowledge bundle is wrong at {first_problem(error)}.",
            hint="The bundle may need a newer fitserve: upgrade, or get a bundle for this version.",
        ) from None


def _read_files(archive: zipfile.ZipFile, manifest: Manifest) -> dict[str, bytes]:
    """The files of the manifest. Raises BadRequest for one that is missing or another."""
    files: dict[str, bytes] = {}
    room_bytes = _PROFILE_BYTES
    for name, digest in manifest.files.items():
        _check_path(name)
        content = _read_member(archive, f"{PROFILES}/{name}", room_bytes)
        room_bytes -= len(content)
        if hashlib.sha256(content).hexdigest() != digest:
            raise BadRequest(
                f"The file {name[:200]} of the knowledge bundle is not the one that was signed.",
                hint="Get the bundle again.",
            )
        files[name] = content
    return files


def _read_member(archive: zipfile.ZipFile, name: str, most_bytes: int) -> bytes:
    """The content of a file in the archive. Raises KeyError if absent, ValueError if too large."""
    with archive.open(name) as member:
        content = member.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{name[:200]} is larger than a bundle may be")
    return content


def _check_path(name: str) -> None:
    """Refuse a path that leaves the folder, or that profiles do not have. Raises BadRequest."""
    path = PurePosixPath(name)
    is_plain = name == path.as_posix() and not path.is_absolute() and ".." not in path.parts
    if not is_plain or "\0" in name or "\\" in name or path.parts[0] not in _TOP_NAMES:
        raise BadRequest(
            f"A knowledge bundle cannot have the file {name[:200]!r}.",
            hint="It has the files of a folder of profiles, without links and keys.",
        )
