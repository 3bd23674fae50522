"""An engine's image is asked: a container without network, privileges, devices or anything to write
to but its own memory, which gets
its questions on standard input and is removed."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from gateway.engines.inquiry import script
from gateway.errors import HostError
from gateway.hosts.docker.container import gpu_request

if TYPE_CHECKING:
    from docker.api import APIClient

_PIDS = 1024
_BYTES_OF_A_GPU = 4 << 30
_SHM_BYTES = 1 << 30
_SCRATCH_BYTES = 1 << 30
# An inquiry that is older has lost whoever asked, and does not heed the end of its input.
_LOST_S = script.LONGEST_S + 60


def create_inquiry(client: APIClient, image: str, owner: str, gpus: tuple[str, ...] = ()) -> str:
    """A container, not started, that asks its engine what comes in on its standard input. Docker
    removes it when it ends. gpus: those that
    it gets, by UUID: then each has a process of its own that imports the engine's torch."""
    from docker.types import LogConfig, Mount

    python, *arguments = script.command("python3")
    # Docker makes a folder on the disk for each volume that an image declares, unless something is
    # mounted there.
    volumes = client.inspect_image(image)["Config"].get("Volumes") or {}  # type: ignore[no-untyped-call]
    memory = script.MOST_MEMORY + len(gpus) * _BYTES_OF_A_GPU
    # Where NVIDIA's runtime is the default one it would give an image the GPUs that the image
    # names.
    hidden = {} if gpus else {"NVIDIA_VISIBLE_DEVICES": "void"}
    made = client.create_container(
        image,
        entrypoint=[python],
        command=arguments,
        name=f"fitserve-{owner}-inquiry-{secrets.token_hex(4)}",
        # Docker ends standard input with the connection that attached to it, unless the container
        # is to be detached.
        stdin_open=True,
        environment={"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", **hidden},  # noqa: S108
        use_config_proxy=False,
        labels={"fitserve.inquiry": owner},
        host_config=client.create_host_config(
            auto_remove=True,
            network_mode="none",
            ipc_mode="private",
            read_only=True,
            mounts=[
                Mount(folder, None, type="tmpfs", tmpfs_size=_SCRATCH_BYTES)
                for folder in {"/tmp", *volumes}  # noqa: S108
            ],
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pids_limit=_PIDS,
            mem_limit=memory,
            memswap_limit=memory,
            device_requests=[gpu_request(client.info(), gpus)] if gpus else [],
            # Where GPUs do not reach each other, what they send goes through it.
            shm_size=_SHM_BYTES if gpus else None,
            # What it says is read as it comes, and never kept on the disk.
            log_config=LogConfig(type="none"),
        ),
    )
    return str(made["Id"])


def start_inquiry(client: APIClient, container: str, image: str) -> None:
    """Raises HostError for an image without Python, and docker's APIError."""
    from docker.errors import APIError

    try:
        client.start(container)
    except APIError as error:
        if "executable file not found" not in str(error.explanation):
            raise
        raise HostError(
            f"The image {image} cannot be asked: it has no python3.",
            hint="The forecast by the rules stays. See whether the image is what it says it is.",
        ) from None


def remove_lost(client: APIClient, owner: str, older_s: float = _LOST_S) -> None:
    """Inquiries of this owner that run on though whoever asked is gone: a gateway that was killed,
    and an image that ignores it."""
    from docker.errors import APIError

    for found in client.containers(all=True, filters={"label": [f"fitserve.inquiry={owner}"]}):
        if time.time() - found["Created"] >= older_s:
            try:
                client.remove_container(found["Id"], v=True, force=True)
            except APIError as error:
                if error.status_code not in (
                    404,
                    409,
                ):  # somebody else has removed it, or is about to
                    raise
