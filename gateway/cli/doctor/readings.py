"""What `fitserve doctor` reads beside the probe. What cannot be read is None, never a guess."""

from __future__ import annotations

import email.utils
import os
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gateway.errors import in_brief
from gateway.machine.nvml import Nvml

# Whom `fitserve doctor` asks waits no longer than this.
_PATIENCE_S = 5.0
_PUBLIC_HUB = "https://huggingface.co"


class GpuCondition(NamedTuple):
    """One card. uncorrected: memory errors since the driver was loaded that ECC could not correct.
    remapping: rows wait for a reset."""

    number: int
    name: str
    persistence: bool | None = None
    ecc: bool | None = None
    uncorrected: int | None = None
    remapping: bool | None = None
    display: bool | None = None


class Toolchain(NamedTuple):
    """What engines of one environment find for kernels that are compiled at a start. `prebuilt`:
    packages with FlashInfer's kernels."""

    engine: str
    compiler: str | None
    headers: str | None
    nvcc: str | None
    ninja: str | None
    prebuilt: tuple[str, ...] = ()


class HubAnswer(NamedTuple):
    """What a Hub said. status: of HTTP, None: it was not reached, and `problem` says why. skew_s:
        this machine's clock less the Hub's. user: whose
    token it is. gated: whether a fine-grained token may read gated repositories."""

    place: str
    status: int | None = None
    problem: str = ""
    skew_s: float | None = None
    asked_with_token: bool = False
    user: str | None = None
    gated: bool | None = None


class Containers(NamedTuple):
    """What Docker says of GPUs: its runtimes, and the devices that it knows through CDI."""

    runtimes: tuple[str, ...]
    cdi: tuple[str, ...]


def gpu_conditions(nvml: Nvml | None = None) -> list[GpuCondition]:
    """Of every card that can be read; none where NVML cannot be."""
    import pynvml

    own: Any = nvml or pynvml
    found: list[GpuCondition] = []
    try:
        own.nvmlInit()
    except pynvml.NVMLError:
        return found
    try:
        for index in range(_read(own.nvmlDeviceGetCount) or 0):
            card = _read(own.nvmlDeviceGetHandleByIndex, index)
            if card is None:
                continue
            name = _read(own.nvmlDeviceGetName, card) or b"?"
            persistence, display = (
                _read(own.nvmlDeviceGetPersistenceMode, card),
                _read(own.nvmlDeviceGetDisplayActive, card),
            )
            modes, rows = (
                _read(own.nvmlDeviceGetEccMode, card),
                _read(own.nvmlDeviceGetRemappedRows, card),
            )
            kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            found.append(
                GpuCondition(
                    index,
                    name.decode(errors="replace") if isinstance(name, bytes) else name,
                    persistence=None if persistence is None else bool(persistence),
                    ecc=None if modes is None else bool(modes[0]),
                    uncorrected=_read(own.nvmlDeviceGetTotalEccErrors, card, *kind),
                    remapping=None if rows is None else bool(rows[2]),
                    display=None if display is None else bool(display),
                )
            )
    finally:
        _read(own.nvmlShutdown)
    return found


def _read(call: Callable[..., Any], *args: Any) -> Any:
    from pynvml import NVMLError

    try:
        return call(*args)
    except (NVMLError, OSError, AttributeError):  # an old library lacks the newer functions
        return None


def limits() -> dict[str, tuple[int | None, int | None]]:
    """Soft and hard limits of this process; None: there is none."""
    kinds = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
    endless = resource.RLIM_INFINITY
    return {
        name: tuple(None if one == endless else one for one in resource.getrlimit(kind))  # type: ignore[misc]
        for name, kind in kinds.items()
    }


def kernel_version(proc: Path = Path("/proc")) -> str | None:
    try:
        return (proc / "version").read_text()
    except OSError:
        return None


def free_bytes(path: Path) -> int | None:
    """Free bytes where the path is, or would be."""
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return None


def toolchain(
    engine: str, environment: Path, given: Mapping[str, str], system: Mapping[str, str] = os.environ
) -> Toolchain:
    """What an engine in this virtual environment finds, with the variables that it is given. CUDA's
    compiler is sought as vLLM 0.33.0 does
    (vllm/utils/flashinfer.py:58), C's as Triton does (triton/runtime/build.py:28)."""
    path = f"{environment / 'bin'}{os.pathsep}{system.get('PATH', os.defpath)}"
    seen = {**{name: system[name] for name in ("CUDA_HOME",) if name in system}, **given}
    nvcc = shutil.which("nvcc", path=path)
    cuda = (
        seen.get("CUDA_HOME")
        or seen.get("CUDA_PATH")
        or (str(Path(nvcc).parent.parent) if nvcc else "/usr/local/cuda")
    )
    compiler = given.get("CC")
    compiler = (
        shutil.which(compiler, path=path)
        if compiler
        else shutil.which("gcc", path=path) or shutil.which("clang", path=path)
    )
    packages = [
        one.name
        for one in environment.glob("lib/python3*/site-packages/flashinfer_*")
        if one.is_dir()
    ]
    return Toolchain(
        engine,
        compiler,
        _headers(environment),
        shutil.which(str(Path(cuda) / "bin" / "nvcc")),
        shutil.which("ninja", path=path),
        tuple(
            sorted(
                name for name in packages if name in ("flashinfer_cubin", "flashinfer_jit_cache")
            )
        ),
    )


def _headers(environment: Path) -> str | None:
    """Python.h of the Python that the environment was made with."""
    try:
        rows = (
            line.partition("=") for line in (environment / "pyvenv.cfg").read_text().splitlines()
        )
    except OSError:
        return None
    said = {name.strip(): value.strip() for name, _, value in rows}
    version = ".".join((said.get("version_info") or said.get("version") or "").split(".")[:2])
    found = Path(said.get("home", "/")).parent / "include" / f"python{version}" / "Python.h"
    return str(found) if found.is_file() else None


def containers(base_url: str | None = None) -> Containers | None:
    """None where Docker does not say."""
    from gateway.hosts.docker.client import information

    said = information(base_url)
    if said is None:
        return None
    devices = (str(device.get("ID")) for device in said.get("DiscoveredDevices") or ())
    return Containers(
        tuple(said.get("Runtimes") or ()),
        tuple(one for one in devices if one.startswith("nvidia.com/")),
    )


def hub(endpoint: str | None, token: str | None) -> HubAnswer:
    """Who the Hub says that we are, or whether it answers at all. Its words are not trusted further
    than their types."""
    import httpx

    place = (endpoint or _PUBLIC_HUB).rstrip("/")
    url, headers = (
        (f"{place}/api/whoami-v2", {"authorization": f"Bearer {token}"})
        if token
        else (f"{place}/api/models?limit=1", {})
    )
    try:
        answer = httpx.get(url, headers=headers, timeout=_PATIENCE_S)
        said = answer.json() if token and answer.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return HubAnswer(place, problem=in_brief(error), asked_with_token=bool(token))
    skew_s = None
    if date := answer.headers.get("date"):
        try:
            skew_s = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
        except ValueError:
            skew_s = None
    name = said.get("name") if isinstance(said, dict) else None
    return HubAnswer(
        place,
        answer.status_code,
        "",
        skew_s,
        bool(token),
        name if isinstance(name, str) else None,
        _gated(said),
    )


def _gated(said: Any) -> bool | None:
    for key in ("auth", "accessToken", "fineGrained", "canReadGatedRepos"):
        said = said.get(key) if isinstance(said, dict) else None
    return said if isinstance(said, bool) else None
