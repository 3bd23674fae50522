"""The container of one engine: its name, labels, creation and state."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from gateway.domain import EngineRef, Instance, LaunchSpec, Mount
from gateway.domain.image_name import repository
from gateway.domain.running import SCRATCH_OPTIONS
from gateway.errors import HostError
from gateway.hosts.docker.cache_volumes import (
    FOLDER,
    cache_volume,
    engine_key,
    make_folders,
    volume_labels,
)
from gateway.secret import Secret

if TYPE_CHECKING:
    from docker.api import APIClient
    from docker.errors import APIError
    from docker.types import DeviceRequest
    from docker.types import Mount as DockerMount

Attributes = dict[str, Any]

RUNNING_STATES = ("running", "paused", "restarting")
# The limit is this share of the machine's RAM. Only an engine that takes more is killed, before
# Linux chooses another process.
_MAX_RAM_SHARE = 0.95


def container_name(name: str, owner: str) -> str:
    """The container name of an instance, with the installation's id: two gateways may share a
    Docker Engine.

    An illegal name is changed, and made unique by its hash.
    """
    legal = re.sub(r"[^a-zA-Z0-9_.-]", "-", name)
    if legal != name:
        legal = f"{legal}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"fitserve-{owner}-{legal}"


def image_of(engine: EngineRef) -> str:
    """The reference for Docker: the digest if known, so that a moved name changes nothing."""
    if engine.image is None:
        raise HostError(
            f"{engine} has no container image.",
            hint="Use another engine, or set FITSERVE_HOST_KIND=process.",
        )
    return engine.digest or engine.image


def read_digest(attributes: Attributes, image: str) -> str:
    """The permanent reference of an inspected image: its repository digest, which can be pulled
    again, or its id if it was built here."""
    names = sorted(attributes.get("RepoDigests") or ())
    return next(
        (name for name in names if repository(name) == repository(image)), str(attributes["Id"])
    )


def create(client: APIClient, spec: LaunchSpec, network: str, owner: str) -> str:
    """Create the container, not started, and return its id. Raises docker's APIError (409: the name
    is taken)."""
    # Any process of the machine reaches the container network. Readers of the label may command
    # Docker anyway.
    cache = cache_volume(client, client.inspect_image(image_of(spec.engine)), spec, owner)  # type: ignore[no-untyped-call]
    labels = volume_labels(client, cache)
    key = engine_key(labels)
    mounted = (
        {name: f"{FOLDER}/{folder}" for name, folder in spec.caches.items()}
        if cache is not None
        else {}
    )
    volumes = (Mount(source=cache, target=FOLDER, is_read_only=False),) if cache is not None else ()
    container = client.create_container(
        image_of(spec.engine),
        # argv is the whole command: it replaces the image's entry point.
        entrypoint=[spec.argv[0]],
        command=[*spec.argv[1:]],
        name=container_name(spec.name, owner),
        detach=True,
        # CUDA would number mixed GPUs by speed; stages are assigned in bus order.
        environment=spec.env
        | mounted
        | ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if spec.gpus else {})
        | ({spec.key_env: key.reveal()} if spec.key_env is not None else {}),
        # Proxies in the Docker client's configuration may carry passwords.
        use_config_proxy=False,
        labels={
            "fitserve.instance": owner,
            "fitserve.name": spec.name,
            "fitserve.model": spec.model,
            "fitserve.attempt": str(spec.attempt),
            "fitserve.fingerprint": spec.fingerprint,
            "fitserve.port": str(spec.port),
        }
        | ({"fitserve.key": key.reveal()} if spec.key_env is not None else {}),
        stop_signal="SIGTERM",
        host_config=_host_config(client, spec, network, volumes),
    )
    if cache is not None:
        make_folders(client, container["Id"], labels, spec)
    return str(container["Id"])


def _host_config(
    client: APIClient, spec: LaunchSpec, network: str, volumes: tuple[Mount, ...]
) -> Attributes:
    """The limits, GPUs, mounts and network of an engine's container."""
    from docker.types import LogConfig

    info = client.info()
    config: Attributes = client.create_host_config(
        restart_policy={"Name": "no"},
        network_mode=network,
        mounts=[_mount(mount) for mount in (*spec.mounts, *volumes)],
        device_requests=[gpu_request(info, spec.gpus)] if spec.gpus else [],
        shm_size=spec.shm_bytes,
        ipc_mode="private",
        # Linux drops signals without a handler for the first process of a container, and makes
        # it reap orphans. Engines do neither well. "N/A": this Docker has no init.
        init=info["InitCommit"]["ID"] != "N/A",
        cap_drop=["ALL"],
        # Engines on a CPU bind memory to NUMA nodes, which Docker's seccomp profile allows with
        # this capability only (vLLM 0.32.0 without it: "numa_set_membind failed", and memory
        # placement is left to Linux).
        cap_add=[] if spec.gpus else ["SYS_NICE"],
        security_opt=["no-new-privileges"],
        read_only=spec.scratch is not None,
        tmpfs=dict.fromkeys(spec.scratch or (), SCRATCH_OPTIONS),
        pids_limit=spec.pids,
        mem_limit=_memory_limit(spec, info["MemTotal"]),
        log_config=LogConfig(type="json-file", config={"max-size": "64m", "max-file": "2"}),
    )
    return config


def _memory_limit(spec: LaunchSpec, machine_bytes: int) -> int | None:
    max_bytes = int(machine_bytes * _MAX_RAM_SHARE)
    return min(spec.memory_bytes, max_bytes) if spec.memory_bytes is not None else None


def _mount(mount: Mount) -> DockerMount:
    """A folder, which must exist (`Binds` of Docker's API would create it), or a named volume."""
    from docker.types import Mount as DockerMount

    return DockerMount(mount.target, mount.source, type=mount.kind, read_only=mount.is_read_only)


def gpu_request(info: Attributes, gpus: tuple[str, ...]) -> DeviceRequest:
    """GPUs by UUID: as `docker run --gpus device=UUID`, or through CDI if Docker has no NVIDIA
    runtime."""
    from docker.types import DeviceRequest

    devices = [f"nvidia.com/gpu={uuid}" for uuid in gpus]
    device_ids = {device["ID"] for device in info.get("DiscoveredDevices") or ()}
    if "nvidia" not in info["Runtimes"] and device_ids.issuperset(devices):
        return DeviceRequest(driver="cdi", device_ids=devices)
    return DeviceRequest(device_ids=[*gpus], capabilities=[["gpu"]])


def running_instance(
    labels: dict[str, str], networks: dict[str, Attributes], network: str
) -> Instance:
    address = networks.get(network, {}).get("IPAddress")
    return _instance_of_labels(
        labels,
        state="running",
        url=f"http://{address}:{labels['fitserve.port']}" if address else None,
    )


def build_instance(attributes: Attributes, network: str) -> Instance:
    """The instance by an inspected container of ours."""
    labels = attributes["Config"]["Labels"]
    state = attributes["State"]
    if state["Status"] in RUNNING_STATES:
        return running_instance(labels, attributes["NetworkSettings"]["Networks"], network)
    if state["Status"] == "created":
        return _instance_of_labels(labels, state="created")
    return _instance_of_labels(
        labels, state="exited", exit_code=state["ExitCode"], is_oom_killed=state["OOMKilled"]
    )


def _instance_of_labels(labels: dict[str, str], **state: Any) -> Instance:
    return Instance(
        name=labels["fitserve.name"],
        model=labels["fitserve.model"],
        attempt=int(labels["fitserve.attempt"]),
        fingerprint=labels["fitserve.fingerprint"],
        key=Secret(labels["fitserve.key"]) if "fitserve.key" in labels else None,
        origin="container",
        **state,
    )


def start_error(spec: LaunchSpec, error: APIError) -> HostError:
    reason = str(error.explanation or error).strip().rstrip(".")
    if "No such image" in reason:
        hint = (
            f"Pull or build it: `docker pull {spec.engine.image}`. `fitserve retry {spec.model}`"
            " takes the image of that name as it is now."
        )
    elif "could not select device driver" in reason:
        hint = (
            "Install the NVIDIA Container Toolkit, run `nvidia-ctk runtime configure"
            " --runtime=docker` and restart Docker."
        )
    elif "bind source path does not exist" in reason:
        hint = (
            "The folder must exist where Docker runs; for a gateway in a container, set"
            " FITSERVE_MODELS_SOURCE."
        )
    else:
        hint = "See Docker's log: `journalctl -u docker`."
    return HostError(f"Docker could not start the engine of {spec.model}: {reason}.", hint=hint)
