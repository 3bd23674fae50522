"""An engine's image is asked: a container without network, privileges or mounts, which gets its questions with its files and is removed."""

from __future__ import annotations

import io
import secrets
import tarfile
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gateway.domain.units import GIB
from gateway.errors import HostError
from gateway.hosts.docker.stream import whole_frames
from gateway.inquiry import script

if TYPE_CHECKING:
    from docker.api import APIClient

# An image without GPUs builds models on the meta device: the import takes most of it.
_MEMORY_BYTES = 16 * GIB
_PIDS = 1024
_LAST_WORDS = 20
_ASKED = "fitserve-asked"


def create_inquiry(client: APIClient, image: str, owner: str, asked: bytes) -> str:
    """A container, not started, that answers `asked` on its standard output. What inquiries before left behind is removed."""
    label = f"fitserve.inquiry={owner}"
    for left in client.containers(all=True, filters={"label": [label], "status": ["exited", "created", "dead"]}):
        client.remove_container(left["Id"], v=True, force=True)
    python, *arguments = script.command("python3", f"/tmp/{_ASKED}")  # noqa: S108 - the container's own
    made = client.create_container(
        image,
        entrypoint=[python],
        command=arguments,
        name=f"fitserve-{owner}-inquiry-{secrets.token_hex(4)}",
        detach=True,
        environment={"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"},  # noqa: S108
        use_config_proxy=False,
        labels={"fitserve.inquiry": owner},
        host_config=client.create_host_config(
            restart_policy={"Name": "no"},
            network_mode="none",
            ipc_mode="private",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pids_limit=_PIDS,
            mem_limit=_MEMORY_BYTES,
            memswap_limit=_MEMORY_BYTES,
        ),
    )
    container = str(made["Id"])
    client.put_archive(container, "/tmp", _archive(script.packed() + asked))  # noqa: S108
    return container


def _archive(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(_ASKED)
        entry.size, entry.mode = len(content), 0o444
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


class SpokenLines:
    """Whole lines of standard output out of Docker's multiplexed stream; `words` are the last of standard error.

    A line of more than `most` bytes, or more than `most_bytes` in all, is a HostError.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.words: deque[bytes] = deque(maxlen=_LAST_WORDS)
        self._most, self._left = most, most_bytes
        self._frames = bytearray()
        self._line = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        self._frames += chunk
        for source, text in whole_frames(self._frames):
            if source == 2:
                self.words.extend(line for line in text.split(b"\n") if line.strip())
                continue
            self._left -= len(text)
            *whole, rest = text.split(b"\n")
            for piece in whole:
                yield bytes(self._line + piece)
                self._line.clear()
            self._line += rest
            if self._left < 0 or len(self._line) > self._most:
                raise HostError("The engine's answers have no end.", hint="See whether the image is what it says it is.")
