"""All checks of `fitserve doctor`, with the readings that they need."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gateway import health
from gateway.cli.doctor import checks, readings
from gateway.cli.doctor.checks import MachineCheck
from gateway.cli.doctor.fixes import apply_fixes
from gateway.cli.port import port_problem
from gateway.diagnosis.facts.scope import valid_facts
from gateway.domain import Engine, Hardware
from gateway.domain.units import GIB
from gateway.engines.common.speed.gpu_measurements import MachineMeasurements
from gateway.errors import FitserveError, HostError, SettingsError
from gateway.hosts.agent.host import AgentHost
from gateway.hosts.docker.client import cgroup_driver
from gateway.hosts.docker.host import is_available
from gateway.hosts.process.prepared.pool import PreparedEngines
from gateway.machine.collector_reach import connection_problem, missing_library
from gateway.machine.environment import engine_dir, is_installed
from gateway.machine.gpu_watch import allowed_devices
from gateway.machine.nvml import Nvml
from gateway.machine.probe import probe
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings
from gateway.store.measured_facts import measured_facts

_SHM_BYTES = GIB


def examine(
    settings: Settings, *, applies_fixes: bool = False, nvml: Nvml | None = None
) -> list[MachineCheck]:
    """All checks, in the order in which problems should be fixed. nvml: instead of the
    driver's."""
    hardware = allowed_devices(settings.data, settings).mark(probe(settings.data, nvml=nvml))
    docker = not settings.runs_processes and is_available()
    profiles = Profiles(settings.profiles_dir, data=settings.data)
    engines = profiles.engines_for(hardware)
    installed_engines = [engine for engine in engines if is_installed(settings.data, engine)]
    in_containers = docker or settings.host_kind == "agent"
    allowed_images = profiles.allowed_images(settings.allowed_images)
    startable = (
        [engine for engine in engines if allowed_images.allows(engine.image)]
        if in_containers
        else installed_engines
    )
    cards = readings.gpu_conditions(nvml)
    limits = readings.limits()
    toolchains = (
        []
        if in_containers or not hardware.gpus
        else [_read_toolchain(settings, engine) for engine in installed_engines]
    )
    machine_checks: Sequence[MachineCheck | None] = [
        _check_data(settings),
        _check_port(settings),
        checks.wsl(readings.kernel_version()),
        _check_gpus(hardware),
        *_speed(settings, hardware),
        checks.driver(hardware, startable),
        checks.shared_memory(hardware, readings.host_memory()),
        checks.mig(hardware),
        checks.memory_errors(cards),
        checks.persistence(cards),
        checks.display(cards),
        checks.container_gpus(readings.containers(), hardware) if docker else None,
        *_cgroups(hardware, has_docker=docker),
        _check_engines(settings, engines, installed_engines, has_docker=docker),
        _cluster(settings),
        *checks.toolchains(toolchains),
        _prepared_engines_check(settings) if not in_containers else None,
        _check_memory(hardware),
        _check_shared_memory(hardware, has_docker=in_containers),
        checks.open_files(*limits["open files"], has_containers=in_containers),
        checks.locked_memory(limits["locked memory"][1], hardware) if not in_containers else None,
        *checks.disk(_free(settings)),
        _check_collector(settings.otlp_endpoint),
        _check_transcripts(settings),
        *checks.hub(readings.hub(settings.hf_endpoint, settings.hf_token)),
    ]
    all_checks = [check for check in machine_checks if check is not None]
    return (
        apply_fixes(all_checks, settings.data, settings.models, lambda: _check_data(settings))
        if applies_fixes
        else all_checks
    )


def _read_toolchain(settings: Settings, engine: Engine) -> readings.Toolchain:
    return readings.toolchain(engine.ref, engine_dir(settings.data, engine), settings.engine_env)


def _prepared_engines_check(settings: Settings) -> MachineCheck | None:
    pool = PreparedEngines(settings.data, settings.prepared_engines)
    try:
        return checks.prepared_engines(pool.views(), settings.prepared_engines)
    finally:
        pool.close()


def _check_collector(address: str) -> MachineCheck | None:
    """The collector of OpenTelemetry; None where none is configured."""
    if not address:
        return None
    return checks.collector(address, missing_library(), connection_problem(address))


def _check_transcripts(settings: Settings) -> MachineCheck | None:
    """The recorder of requests; None where it is off."""
    path = settings.transcript_key_file
    if path is None:
        return None
    has_library = importlib.util.find_spec("cryptography") is not None
    return checks.transcripts(
        str(path),
        sorted(settings.transcribed_models),
        is_readable=os.access(path.expanduser(), os.R_OK),
        has_library=has_library,
    )


def _free(settings: Settings) -> dict[str, tuple[str, int | None]]:
    """The folder and the free bytes of each use of a disk."""
    folders = {
        "weights": settings.models,
        "caches": settings.data,
        "temporary files": Path(tempfile.gettempdir()),
    }
    return {use: (str(folder), readings.free_bytes(folder)) for use, folder in folders.items()}


def _check_data(settings: Settings) -> MachineCheck:
    folder = settings.data
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(existing, os.W_OK | os.X_OK) and existing.is_dir():
        if existing == folder and folder.stat().st_mode & 0o077:
            return MachineCheck(
                "data folder",
                "warn",
                f"{folder} is open to other users",
                "The gateway closes it at its start; `--fix` closes it now.",
            )
        return MachineCheck("data folder", "ok", str(folder))
    return MachineCheck(
        "data folder",
        "fail",
        f"{existing} cannot be written",
        "Set FITSERVE_DATA_DIR to a writable folder.",
    )


def _check_port(settings: Settings) -> MachineCheck:
    address = f"{settings.host}:{settings.port}"
    problem = port_problem(settings)
    if not problem:
        return MachineCheck("port", "ok", f"{address} is free")
    if _is_gateway(settings):
        return MachineCheck("port", "ok", f"a fitserve gateway answers at {address}")
    return MachineCheck(
        "port",
        "warn",
        f"{address}: {problem}",
        "Another program has this port. Set FITSERVE_PORT to a free one.",
    )


def _is_gateway(settings: Settings) -> bool:
    """Whether the program on the port of the settings is a fitserve gateway."""
    connection = health.connect(settings.host, settings.port, tls=bool(settings.tls_cert))
    try:
        # A route that does not exist: each error of a gateway has the header, with or without keys.
        connection.request("GET", "/admin/none")
        return connection.getresponse().getheader("x-gateway-source") == "gateway"
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _check_gpus(hardware: Hardware) -> MachineCheck:
    if not hardware.gpus:
        reason = hardware.notes[0] if hardware.notes else "none found"
        return MachineCheck(
            "GPUs", "warn", f"none ({reason})", "Without a GPU only the CPU engine can serve."
        )
    finding = f"{len(hardware.gpus)}: " + ", ".join(sorted({gpu.name for gpu in hardware.gpus}))
    finding += f", driver {hardware.driver}, CUDA {hardware.cuda_driver}"
    missing_notes = [note for note in hardware.notes if " is left out: " in note]
    missing_notes += [
        f"GPU {gpu.index}: {gpu.loss_reason}" for gpu in hardware.gpus if gpu.loss_reason
    ]
    excluded = [str(gpu.index) for gpu in hardware.gpus if gpu.reservation_reason]
    finding += f"; excluded from fitserve: {', '.join(excluded)}" if excluded else ""
    if missing_notes:
        reset = "Reset it (`nvidia-smi --gpu-reset`) or reboot. Until then no engine starts on it."
        return MachineCheck("GPUs", "warn", f"{finding}; {'; '.join(missing_notes)}", reset)
    return MachineCheck("GPUs", "ok", finding)


def _speed(settings: Settings, hardware: Hardware) -> list[MachineCheck]:
    """A warning for unmeasured cards without a data sheet in the profiles."""
    cards = Profiles(settings.profiles_dir, data=settings.data).card_table
    unknown_gpus = [gpu for gpu in hardware.gpus if cards.card(gpu.name, gpu.total_bytes) is None]
    measured_facts_of_gpus = (
        MachineMeasurements(
            valid_facts(measured_facts(settings.data / "fitserve.db"), hardware.driver, ())
        )
        if unknown_gpus
        else MachineMeasurements()
    )
    missing_names = sorted(
        {
            gpu.name
            for gpu in unknown_gpus
            if not (
                measured_facts_of_gpus.number(gpu, "bfloat16")
                or measured_facts_of_gpus.number(gpu, "float16")
            )
        }
    )
    if not missing_names:
        return []
    finding = (
        f"{', '.join(missing_names)} has no known data sheet and no measurement: plans with few"
        " GPUs come first"
    )
    return [
        MachineCheck("speed", "warn", finding, "Install an engine and run `fitserve calibrate`.")
    ]


def _cgroups(
    hardware: Hardware, *, has_docker: bool, char_devices: Path = Path("/dev/char")
) -> list[MachineCheck]:
    """Whether a reload of systemd removes the GPUs from running containers:
    github.com/NVIDIA/nvidia-docker/issues/1730."""
    if not has_docker or not hardware.gpus:
        return []
    driver = cgroup_driver()
    linked = any(
        "nvidia" in str(link.readlink()) for link in char_devices.glob("195:*") if link.is_symlink()
    )
    if driver != "systemd" or linked:
        return [
            MachineCheck(
                "GPUs in containers",
                "ok",
                f"cgroup driver: {driver or 'not reported by Docker'}",
            )
        ]
    return [
        MachineCheck(
            "GPUs in containers",
            "warn",
            "systemd manages cgroups: `systemctl daemon-reload` removes the GPUs from running"
            ' containers ("Failed to initialize NVML: Unknown Error"), and their engines restart',
            "Run `nvidia-ctk system create-dev-char-symlinks --create-all`, or let Docker use"
            " native.cgroupdriver=cgroupfs.",
        )
    ]


def _check_engines(
    settings: Settings, engines: list[Engine], installed_engines: list[Engine], *, has_docker: bool
) -> MachineCheck:
    if settings.host_kind == "agent":
        return _check_agent(settings)
    if has_docker:
        return MachineCheck("engines", "ok", "a Docker Engine answers: engines run in containers")
    if installed_engines:
        return MachineCheck(
            "engines",
            "ok",
            f"no Docker; installed: {', '.join(engine.ref for engine in installed_engines)}",
        )
    return MachineCheck(
        "engines",
        "fail",
        "no Docker Engine answers, and no engine is installed",
        f"Start Docker, or run `fitserve engine install {engines[0].ref}`.",
    )


def _check_agent(settings: Settings) -> MachineCheck:
    try:
        engines = asyncio.run(AgentHost(settings.agent).list())
    except HostError as error:
        return MachineCheck("engines", "fail", error.message, error.hint)
    return MachineCheck("engines", "ok", f"the agent answers; running engines: {len(engines)}")


def _cluster(settings: Settings) -> MachineCheck | None:
    """The membership of this machine; None where no cluster is wanted."""
    from gateway.hosts.cluster.commands import query_machines
    from gateway.hosts.cluster.exposure import exposed_servers
    from gateway.hosts.cluster.gateway_side import load_membership
    from gateway.hosts.cluster.head_check import check_head
    from gateway.hosts.cluster.membership import read_membership

    try:
        if settings.host_kind != "cluster" and read_membership(settings.data) is None:
            return None
        membership = load_membership(settings.data)
        asyncio.run(check_head(membership, os.environ))
    except SettingsError as error:
        return MachineCheck("cluster", "fail", error.message, error.hint)
    answers = f"the head at {membership.head} answers, with this machine's token, Ray and Python"
    try:
        _, views = query_machines(membership)
    except FitserveError as error:
        return MachineCheck("cluster", "fail", error.message, error.hint)
    if exposed_addresses := asyncio.run(exposed_servers(views, membership)):
        return MachineCheck(
            "cluster",
            "warn",
            f"{answers}; Ray or engines answer outside the network of the cluster:"
            f" {', '.join(exposed_addresses)}",
            "Let only the machines of the cluster in: docs/cluster.md has the firewall rule.",
        )
    return MachineCheck("cluster", "ok", answers)


def _check_memory(hardware: Hardware) -> MachineCheck:
    finding = (
        f"{hardware.ram_available_bytes / GIB:.1f} of {hardware.ram_total_bytes / GIB:.1f} GiB"
        " available"
    )
    is_low = hardware.ram_available_bytes < 4 * GIB
    return MachineCheck(
        "memory",
        "warn" if is_low else "ok",
        finding,
        "An engine needs at least 2 GiB of RAM." if is_low else "",
    )


def _check_shared_memory(hardware: Hardware, *, has_docker: bool) -> MachineCheck:
    if has_docker or hardware.shm_bytes is None:
        return MachineCheck("shared memory", "ok", "each container gets its own")
    finding = f"{hardware.shm_bytes / GIB:.1f} GiB"
    if hardware.shm_bytes < _SHM_BYTES:
        return MachineCheck(
            "shared memory",
            "warn",
            finding,
            "Tensor parallel ranks communicate through it: enlarge it, or start the container with"
            " --shm-size.",
        )
    return MachineCheck("shared memory", "ok", finding)
