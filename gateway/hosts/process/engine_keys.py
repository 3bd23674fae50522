"""The keys that engines want from the gateway: one for each cache folder, whatever the start.

vLLM before 0.30.0 names its compiled graphs by its variables, and VLLM_API_KEY is among them
(compile_factors in vllm/envs.py). With a new key each start would compile all graphs again.
"""

from __future__ import annotations

import hmac
import secrets
from contextlib import suppress
from pathlib import Path

from gateway.secret import Secret
from gateway.store import atomic_file

_BYTES = 32


class EngineKeys:
    """Keys that follow from one secret of a data folder. A lost secret costs compiled graphs."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def key(self, cache: Path | None) -> Secret:
        """64 hexadecimal digits; of a start without a cache they are new each time.

        Raises OSError if the secret cannot be kept.
        """
        if cache is None:
            return Secret(secrets.token_hex(_BYTES))
        return Secret(hmac.digest(self._secret(), str(cache).encode(), "sha256").hex())

    def _secret(self) -> bytes:
        with suppress(FileNotFoundError):
            content = self._file.read_bytes()
            if len(content) == _BYTES:
                return content
        new_secret = secrets.token_bytes(_BYTES)
        atomic_file.write(self._file, new_secret)
        return new_secret
