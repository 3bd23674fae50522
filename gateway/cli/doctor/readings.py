"""Readings of `fitserve doctor` other than the probe. An unreadable value is None, never a
guess."""

from __future__ import annotations

import email.utils
import os
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gateway.errors import short_reason
from gateway.machine.meminfo import memory_sizes
from gateway.machine.nvml import Nvml
from gateway.secret import Secret, shown_address

# Time limit of each request.
_PATIENCE_S = 5.0
_PUBLIC_HUB = "https://huggingface.co"
# Their names in /proc/PID/comm, of which Linux keeps 15 characters.
_GUARDS = frozenset({"earlyoom", "nohang", "systemd-oomd"})


class GpuCondition(NamedTuple):
    """The condition of a card.

    uncorrected: memory errors since the driver was loaded that ECC could not correct.
    awaits_remap: memory rows wait for a reset.
    """

    number: int
    name: str
    has_persistence: bool | None = None
    has_ecc: bool | None = None
    uncorrected: int | None = None
    awaits_remap: bool | None = None
    drives_display: bool | None = None


class Toolchain(NamedTuple):
    """Compilers of one engine's environment. prebuilt: packages with FlashInfer's kernels."""

    engine: str
    compiler: str | None
    headers: str | None
    nvcc: str | None
    ninja: str | None
    prebuilt: tuple[str, ...] = ()


class HubAnswer(NamedTuple):
    """The answer of a Hub.

    status: the HTTP status; None if the Hub was not reached, with the reason in `problem`.
    skew_s: this machine's clock minus the Hub's.
    user: owner of the token.
    is_gated: whether a fine-grained token may read gated repositories.
    """

    hub_address: str
    status: int | None = None
    problem: str = ""
    skew_s: float | None = None
    was_asked_with_token: bool = False
    user: str | None = None
    is_gated: bool | None = None


class HostMemory(NamedTuple):
    """Memory of the host, in bytes.

    available: free bytes, and pages of files that Linux would drop for a program.
    guards: programs that end others before memory runs out.
    """

    free_bytes: int
    available: int
    swap: int
    guards: tuple[str, ...] = ()


class Containers(NamedTuple):
    """Docker's runtimes, and its GPUs known through CDI."""

    runtimes: tuple[str, ...]
    cdi: tuple[str, ...]


def gpu_conditions(nvml: Nvml | None = None) -> list[GpuCondition]:
    """The conditions of all readable cards; empty without NVML."""
    import pynvml

    library: Any = nvml or pynvml
    conditions: list[GpuCondition] = []
    try:
        library.nvmlInit()
    except pynvml.NVMLError:
        return conditions
    try:
        for index in range(_read_or_none(library.nvmlDeviceGetCount) or 0):
            card = _read_or_none(library.nvmlDeviceGetHandleByIndex, index)
            if card is None:
                continue
            name = _read_or_none(library.nvmlDeviceGetName, card) or b"?"
            persistence = _read_or_none(library.nvmlDeviceGetPersistenceMode, card)
            display = _read_or_none(library.nvmlDeviceGetDisplayActive, card)
            modes = _read_or_none(library.nvmlDeviceGetEccMode, card)
            rows = _read_or_none(library.nvmlDeviceGetRemappedRows, card)
            kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            conditions.append(
                GpuCondition(
                    index,
                    name.decode(errors="replace") if isinstance(name, bytes) else name,
                    has_persistence=None if persistence is None else bool(persistence),
                    has_ecc=None if modes is None else bool(modes[0]),
                    uncorrected=_read_or_none(library.nvmlDeviceGetTotalEccErrors, card, *kind),
                    awaits_remap=None if rows is None else bool(rows[2]),
                    drives_display=None if display is None else bool(display),
                )
            )
    finally:
        _read_or_none(library.nvmlShutdown)
    return conditions


def _read_or_none(call: Callable[..., Any], *args: Any) -> Any:
    from pynvml import NVMLError

    try:
        return call(*args)
    except (NVMLError, OSError, AttributeError):  # an old library lacks newer functions
        return None


def limits() -> dict[str, tuple[int | None, int | None]]:
    """Soft and hard limits of this process; None is unlimited."""
    kinds = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
    endless = resource.RLIM_INFINITY
    limits = {}
    for name, kind in kinds.items():
        soft, hard_limit = resource.getrlimit(kind)
        limits[name] = (
            None if soft == endless else soft,
            None if hard_limit == endless else hard_limit,
        )
    return limits


def kernel_version(proc: Path = Path("/proc")) -> str | None:
    try:
        return (proc / "version").read_text()
    except OSError:
        return None


def host_memory(proc: Path = Path("/proc")) -> HostMemory | None:
    """None where /proc/meminfo lacks a line."""
    try:
        sizes = memory_sizes((proc / "meminfo").read_text())
    except OSError:
        return None
    free_bytes, available, swap = map(sizes.get, ("MemFree", "MemAvailable", "SwapTotal"))
    if free_bytes is None or available is None or swap is None:
        return None
    names = set()
    for entry in proc.glob("[0-9]*/comm"):
        with suppress(OSError):
            names.add(entry.read_text(errors="replace").strip())
    return HostMemory(free_bytes, available, swap, tuple(sorted(names & _GUARDS)))


def free_bytes(path: Path) -> int | None:
    """Free bytes on the disk of a path that may not exist yet."""
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return None


def toolchain(
    engine: str,
    environment: Path,
    engine_variables: Mapping[str, str],
    system: Mapping[str, str] = os.environ,
) -> Toolchain:
    """The compilers that an engine finds in this virtual environment, with its own variables.

    nvcc is found as in vLLM 0.33.0 (vllm/utils/flashinfer.py:58), the C compiler as in Triton
    (triton/runtime/build.py:28).
    """
    path = f"{environment / 'bin'}{os.pathsep}{system.get('PATH', os.defpath)}"
    variables = {
        **{name: system[name] for name in ("CUDA_HOME",) if name in system},
        **engine_variables,
    }
    nvcc = shutil.which("nvcc", path=path)
    cuda = (
        variables.get("CUDA_HOME")
        or variables.get("CUDA_PATH")
        or (str(Path(nvcc).parent.parent) if nvcc else "/usr/local/cuda")
    )
    compiler = engine_variables.get("CC")
    compiler = (
        shutil.which(compiler, path=path)
        if compiler
        else shutil.which("gcc", path=path) or shutil.which("clang", path=path)
    )
    packages = [
        folder.name
        for folder in environment.glob("lib/python3*/site-packages/flashinfer_*")
        if folder.is_dir()
    ]
    return Toolchain(
        engine=engine,
        compiler=compiler,
        headers=_headers(environment),
        nvcc=shutil.which(str(Path(cuda) / "bin" / "nvcc")),
        ninja=shutil.which("ninja", path=path),
        prebuilt=tuple(
            sorted(
                name for name in packages if name in ("flashinfer_cubin", "flashinfer_jit_cache")
            )
        ),
    )


def _headers(environment: Path) -> str | None:
    """The path of Python.h for the environment's Python."""
    try:
        rows = (
            line.partition("=") for line in (environment / "pyvenv.cfg").read_text().splitlines()
        )
    except OSError:
        return None
    values = {name.strip(): value.strip() for name, _, value in rows}
    version = ".".join((values.get("version_info") or values.get("version") or "").split(".")[:2])
    header = Path(values.get("home", "/")).parent / "include" / f"python{version}" / "Python.h"
    return str(header) if header.is_file() else None


def containers(base_url: str | None = None) -> Containers | None:
    """The runtimes and GPUs of Docker. None where Docker does not answer."""
    from gateway.hosts.docker.client import information

    information_reply = information(base_url)
    if information_reply is None:
        return None
    devices = (str(device.get("ID")) for device in information_reply.get("DiscoveredDevices") or ())
    return Containers(
        tuple(information_reply.get("Runtimes") or ()),
        tuple(name for name in devices if name.startswith("nvidia.com/")),
    )


def hub(endpoint: Secret | None, token: Secret | None) -> HubAnswer:
    """The answer of the Hub to a question about the token, or about models without a token. Only
    values of expected types are used."""
    import httpx

    address = (endpoint.reveal() if endpoint is not None else _PUBLIC_HUB).rstrip("/")
    hub_address = shown_address(address)
    url, headers = (
        (f"{address}/api/whoami-v2", {"authorization": f"Bearer {token.reveal()}"})
        if token is not None
        else (f"{address}/api/models?limit=1", {})
    )
    try:
        answer = httpx.get(url, headers=headers, timeout=_PATIENCE_S)
        account = answer.json() if token is not None and answer.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        problem = Secret(address).hidden_in(short_reason(error))
        return HubAnswer(hub_address, problem=problem, was_asked_with_token=token is not None)
    skew_s = None
    if date := answer.headers.get("date"):
        try:
            skew_s = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
        except ValueError:
            skew_s = None
    name = account.get("name") if isinstance(account, dict) else None
    return HubAnswer(
        hub_address=hub_address,
        status=answer.status_code,
        problem="",
        skew_s=skew_s,
        was_asked_with_token=token is not None,
        user=name if isinstance(name, str) else None,
        is_gated=_may_read_gated_models(account),
    )


def _may_read_gated_models(value: Any) -> bool | None:
    for key in ("auth", "accessToken", "fineGrained", "canReadGatedRepos"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, bool) else None
