"""The images found under allowed names, in a file of the agent.

A locally built image has no other proof of its name once the name has moved.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from gateway.domain import EngineRef
from gateway.errors import HostError
from gateway.store import atomic_file

# Beyond this number the oldest are forgotten.
_MAX_IMAGES = 1000


class ResolvedImages:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._turn = threading.Lock()
        try:
            document = json.loads(path.read_bytes())
            self.digests: dict[str, str] = {
                str(digest): str(image) for digest, image in document.items()
            }
        except (OSError, ValueError, AttributeError):
            self.digests = {}
        """Image names by digest."""

    def store(self, engine: EngineRef) -> None:
        """Remember an image. Raises HostError, as a forgotten image could not be started again."""
        if (
            engine.digest is None
            or engine.image is None
            or self.digests.get(engine.digest) == engine.image
        ):
            return
        with self._turn:
            other_images = {
                digest: image for digest, image in self.digests.items() if digest != engine.digest
            }
            images = {
                **dict([*other_images.items()][1 - _MAX_IMAGES :]),
                engine.digest: engine.image,
            }
            try:
                atomic_file.write(self._path, json.dumps(images).encode())
            except OSError as error:
                raise HostError(
                    f"The agent cannot write {self._path}: {error.strerror}.",
                    hint="Free disk space.",
                ) from None
            self.digests = images
