"""Images as archives, and their containers."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping

from tests.contract.docker_harness import DockerHarness


def archive(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar_file:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o755
            tar_file.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def containers(harness: DockerHarness) -> list[str]:
    return [
        container["Id"]
        for container in harness.docker.containers(
            all=True, filters={"label": f"fitserve.inquiry={harness.instance}"}
        )
    ]
