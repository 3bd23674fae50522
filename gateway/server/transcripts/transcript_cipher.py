"""The encryption of transcripts with the operator's keys: Fernet of the library `cryptography`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from gateway.errors import SettingsError, short_reason
from gateway.secret import Secret

_MAX_FILE_BYTES = 64 * 1024
_OTHERS_MODE = 0o007
_MAKE_HINT = "`fitserve transcripts new-key > FILE` makes a key; `chmod 600 FILE` protects it."


class TranscriptCipher:
    """Encrypts with the first key, and decrypts with each of them."""

    def __init__(self, keys: Sequence[Secret]) -> None:
        self._fernet = MultiFernet([Fernet(key.reveal()) for key in keys])

    def encrypt(self, data: bytes) -> bytes:
        """The data in letters of base64, without a line end."""
        return self._fernet.encrypt(data)

    def decrypt(self, token: bytes) -> bytes | None:
        """The data; None: no key fits, or the token is damaged."""
        try:
            return self._fernet.decrypt(token)
        except InvalidToken:
            return None


def read_keys(path: Path, data: Path) -> tuple[Secret, ...]:
    """The keys in the operator's file, the first for new transcripts. Raises SettingsError.

    data: the data folder, where a copy would hold the keys with the transcripts.
    """
    path = path.expanduser().absolute()
    if path.resolve().is_relative_to(data.resolve()):
        raise SettingsError(
            f"FITSERVE_TRANSCRIPT_KEY_FILE names {path}, which is in the data folder: a copy of"
            " the folder would hold the transcripts with their key.",
            hint="Move the file to another folder.",
        )
    try:
        if path.stat().st_mode & _OTHERS_MODE:
            raise SettingsError(
                f"Every user of this machine may use {path}, which FITSERVE_TRANSCRIPT_KEY_FILE"
                " names.",
                hint=f"Run `chmod 600 {path}`.",
            )
        text = path.read_bytes()[:_MAX_FILE_BYTES].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"FITSERVE_TRANSCRIPT_KEY_FILE names {path}, which cannot be read:"
            f" {short_reason(error)}.",
            hint=_MAKE_HINT,
        ) from None
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(Secret(line) for line in lines if line and not line.startswith("#"))
    if not keys:
        raise SettingsError(f"{path} has no key for transcripts.", hint=_MAKE_HINT)
    for number, key in enumerate(keys, 1):
        try:
            TranscriptCipher((key,))
        except ValueError:
            raise SettingsError(
                f"Key {number} of {path} is not the base64 of 32 bytes.", hint=_MAKE_HINT
            ) from None
    return keys
