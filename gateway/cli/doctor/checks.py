"""What `fitserve doctor` makes of what it read. Each check is one function of values that were
read; nothing is read here.

ok        nothing needs doing
warn      it works, or will for most; `do` says what is better
fail      engines cannot start, or not all
unknown   the check could not be made, which says nothing
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gateway.cli.doctor.readings import Containers, GpuCondition, HubAnswer, Toolchain
from gateway.domain import Engine, Hardware
from gateway.domain.release import release
from gateway.domain.units import GIB, gib

# What engines raise their own limit to: set_ulimit in vllm/utils/system_utils.py:264 (0.33.0) and
# sglang/srt/utils/common.py:2585 (0.5.23).
_OPEN_FILES = 65_535
_WEIGHTS_BYTES, _CACHES_BYTES, _TEMPORARY_BYTES = 20 * GIB, 5 * GIB, 2 * GIB
# Signed addresses of downloads are valid for some minutes around their time.
_SKEW_S, _MUCH_SKEW_S = 30.0, 300.0

State = Literal["ok", "warn", "fail", "unknown"]


class MachineCheck(NamedTuple):
    """`do` is empty when nothing needs doing. fixed: what `--fix` did."""

    name: str
    state: State
    found: str
    do: str = ""
    fixed: str = ""


def short_list(names: Sequence[str]) -> str:
    """The first three, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def memory_errors(cards: Sequence[GpuCondition]) -> MachineCheck | None:
    """ECC. Cards without it say nothing."""
    broken = [
        f"GPU {card.number}: {card.uncorrected} uncorrected errors"
        for card in cards
        if card.uncorrected
    ]
    waiting = [
        f"GPU {card.number}: rows of its memory wait to be remapped"
        for card in cards
        if card.remapping
    ]
    if broken or waiting:
        cure = (
            "Reset it when no engine runs (`sudo nvidia-smi --gpu-reset -i INDEX`) or reboot; if it"
            " comes back, the card is failing."
        )
        return MachineCheck("GPU memory", "warn", "; ".join([*broken, *waiting]), cure)
    known = [card for card in cards if card.ecc is not None]
    if not known:
        return None
    off = [str(card.number) for card in known if not card.ecc]
    return MachineCheck(
        "GPU memory",
        "ok",
        f"ECC is off on GPU {', '.join(off)}" if off else "ECC is on, no uncorrected error",
    )


def persistence(cards: Sequence[GpuCondition]) -> MachineCheck | None:
    if not cards:
        return None
    if all(card.persistence is None for card in cards):
        return MachineCheck("persistence mode", "unknown", "the driver does not say")
    off = [str(card.number) for card in cards if card.persistence is False]
    if not off:
        return MachineCheck("persistence mode", "ok", "on")
    found = (
        f"off on GPU {', '.join(off)}: the driver is loaded anew for the first program, which costs"
        " seconds at each start"
    )
    return MachineCheck(
        "persistence mode",
        "warn",
        found,
        "Run `sudo nvidia-smi -pm 1`, or enable nvidia-persistenced.",
    )


def display(cards: Sequence[GpuCondition]) -> MachineCheck | None:
    """A desktop takes memory when it likes, and a long kernel on its card makes it stand still."""
    shown = [f"GPU {card.number}" for card in cards if card.display]
    if not shown:
        return None
    cure = (
        "Plans leave what it holds now; log out of the desktop, use another card for it, or keep"
        " this one out with FITSERVE_GPUS."
    )
    return MachineCheck(
        "display",
        "warn",
        f"{', '.join(shown)} drives a display, whose programs take GPU memory",
        cure,
    )


def mig(hardware: Hardware) -> MachineCheck | None:
    parts = [gpu for gpu in hardware.gpus if gpu.uuid.startswith("MIG-")]
    empty = [str(gpu.index) for gpu in hardware.gpus if gpu.mig and not gpu.uuid.startswith("MIG-")]
    if empty:
        cure = (
            "Make devices (`sudo nvidia-smi mig -cgi PROFILE -C`) or turn it off (`sudo nvidia-smi"
            " -i INDEX -mig 0`)."
        )
        return MachineCheck(
            "MIG",
            "warn",
            f"GPU {', '.join(empty)} is in MIG mode without a device: no engine can use it",
            cure,
        )
    if parts:
        return MachineCheck(
            "MIG", "ok", f"{len(parts)} devices; an engine gets one, and none takes two together"
        )
    return None


def driver(hardware: Hardware, engines: Iterable[Engine]) -> MachineCheck | None:
    """The driver against the CUDA of every engine that could be started here."""
    if not any(gpu.kept is None for gpu in hardware.gpus):
        return None
    wanted = {engine.ref: engine.min_driver for engine in engines if engine.device == "cuda"}
    if not wanted:
        return None
    if hardware.driver is None:
        return MachineCheck("driver", "unknown", "NVML does not tell its version")
    told = {ref: least for ref, least in wanted.items() if least is not None}
    old = {ref: least for ref, least in told.items() if release(hardware.driver) < release(least)}
    if old:
        most = max(old.values(), key=release)
        found = f"{hardware.driver} is too old for {short_list(sorted(old))}"
        return MachineCheck(
            "driver",
            "fail" if len(old) == len(wanted) else "warn",
            found,
            f"Install driver {most} or newer.",
        )
    if len(told) < len(wanted):
        return MachineCheck(
            "driver",
            "unknown",
            f"which driver {short_list(sorted(wanted.keys() - told.keys()))} needs is not known",
        )
    return MachineCheck(
        "driver", "ok", f"{hardware.driver} runs the CUDA of {short_list(sorted(wanted))}"
    )


def wsl(version: str | None) -> MachineCheck | None:
    """vLLM and SGLang pin no memory there: vllm/platforms/interface.py:1186 of 0.33.0."""
    if version is None:
        return MachineCheck("kernel", "unknown", "/proc/version cannot be read")
    if "microsoft" not in version.lower():
        return None
    found = (
        "WSL2: engines cannot pin memory (slower loads and offloading), GPUs do not reach each"
        " other, and Windows gives it half of the RAM"
    )
    return MachineCheck(
        "kernel",
        "warn",
        found,
        "Raise `memory=` in .wslconfig, keep models inside WSL's own disk, or run Linux itself.",
    )


def open_files(soft: int | None, hard: int | None) -> MachineCheck:
    """Engines raise their own soft limit, as far as the hard one allows."""
    if hard is not None and hard < _OPEN_FILES:
        cure = (
            f"Raise the hard limit: LimitNOFILE={_OPEN_FILES} in a systemd unit, or `{_OPEN_FILES}`"
            " in /etc/security/limits.conf."
        )
        return MachineCheck(
            "open files",
            "warn",
            f"at most {hard:,}; engines with many clients want {_OPEN_FILES:,}",
            cure,
        )
    said = ["unlimited" if limit is None else f"{limit:,}" for limit in (soft, hard)]
    return MachineCheck("open files", "ok", f"{said[0]}, may be raised to {said[1]}")


def locked_memory(hard: int | None, hardware: Hardware) -> MachineCheck | None:
    """RDMA pins its buffers; CUDA's own pinned memory is not counted. Of interest where GPUs talk
    to each other."""
    if len(hardware.gpus) < 2:
        return None
    if hard is None:
        return MachineCheck("locked memory", "ok", "unlimited")
    cure = (
        "Only for NCCL over InfiniBand or RoCE: LimitMEMLOCK=infinity in a systemd unit, or `ulimit"
        " -l unlimited`."
    )
    return MachineCheck("locked memory", "warn", f"at most {gib(hard)}", cure)


def toolchains(found: Sequence[Toolchain]) -> list[MachineCheck]:
    """Triton compiles a launcher with a C compiler and Python.h at the first start of every engine
    (triton/runtime/build.py:28); FlashInfer
    and DeepGEMM build kernels with nvcc and ninja where no package brings them."""
    checks = []
    for one in found:
        lacking = [
            name
            for name, there in (("a C compiler", one.compiler), ("Python.h", one.headers))
            if there is None
        ]
        if lacking:
            cure = (
                "Install them: `sudo apt-get install gcc python3-dev`, or build the environment"
                " anew with `fitserve engine install` (its Python has headers)."
            )
            checks.append(
                MachineCheck(
                    "compiler", "fail", f"{one.engine}: Triton needs {' and '.join(lacking)}", cure
                )
            )
        missing = [
            name for name, there in (("nvcc", one.nvcc), ("ninja", one.ninja)) if there is None
        ]
        if missing and not one.prebuilt:
            found_ = (
                f"{one.engine}: without {' and '.join(missing)}, kernels of FlashInfer and DeepGEMM"
                " cannot be built at a start"
            )
            cure = (
                "Install the CUDA toolkit of the engine's CUDA and ninja-build, and name it with"
                " FITSERVE_ENGINE_ENV=CUDA_HOME=/usr/local/cuda."
            )
            checks.append(MachineCheck("CUDA compiler", "warn", found_, cure))
        if not lacking and (not missing or one.prebuilt):
            built = f", kernels of FlashInfer come with {one.prebuilt[0]}" if missing else ""
            checks.append(MachineCheck("compiler", "ok", f"{one.engine}: {one.compiler}{built}"))
    return checks


def disk(free: Mapping[str, tuple[str, int | None]]) -> list[MachineCheck]:
    """Of each use the folder, and what is free there."""
    least = {
        "weights": _WEIGHTS_BYTES,
        "caches": _CACHES_BYTES,
        "temporary files": _TEMPORARY_BYTES,
    }
    cures = {
        "weights": (
            "Models take tens of GiB: free some, or set FITSERVE_MODELS_DIR to a larger disk."
        ),
        "caches": (
            "Engines and compiled kernels take up to 20 GiB: free some, or set FITSERVE_DATA_DIR to"
            " a larger disk."
        ),
        "temporary files": "Compilers need some: free it, or set TMPDIR to a larger disk.",
    }
    checks = []
    for use, (folder, count) in free.items():
        if count is None:
            checks.append(MachineCheck(f"disk for {use}", "unknown", f"{folder} could not be read"))
            continue
        low = count < least[use]
        checks.append(
            MachineCheck(
                f"disk for {use}",
                "warn" if low else "ok",
                f"{gib(count)} free in {folder}",
                cures[use] if low else "",
            )
        )
    return checks


def hub(answer: HubAnswer) -> list[MachineCheck]:
    """The Hub, the token, and the clock against the Hub's."""
    if answer.status is None:
        cure = (
            "Models in folders of this machine need no Hub; else set HTTPS_PROXY, or"
            " FITSERVE_HF_ENDPOINT to a mirror."
        )
        return [
            MachineCheck(
                "Hugging Face Hub",
                "warn",
                f"{answer.place} is not reached ({answer.problem})",
                cure,
            ),
            MachineCheck("clock", "unknown", "nobody was reached who tells the time"),
        ]
    return [_reached(answer), *_token(answer), _clock(answer.skew_s)]


def _reached(answer: HubAnswer) -> MachineCheck:
    if answer.status is not None and (answer.status < 400 or answer.status == 401):
        return MachineCheck("Hugging Face Hub", "ok", f"{answer.place} answers")
    cure = "Correct FITSERVE_HF_ENDPOINT, or try later: a Hub that limits requests answers 429."
    return MachineCheck(
        "Hugging Face Hub", "warn", f"{answer.place} answers with status {answer.status}", cure
    )


def _token(answer: HubAnswer) -> list[MachineCheck]:
    if not answer.asked_with_token:
        return [
            MachineCheck(
                "Hub token",
                "ok",
                "none: gated and private models cannot be downloaded (FITSERVE_HF_TOKEN)",
            )
        ]
    if answer.status == 401:
        return [
            MachineCheck(
                "Hub token",
                "fail",
                "the Hub does not know this token",
                "Make one at huggingface.co/settings/tokens, and set FITSERVE_HF_TOKEN.",
            )
        ]
    if answer.status != 200:
        return [
            MachineCheck("Hub token", "unknown", f"the Hub answered with status {answer.status}")
        ]
    whose = f"of {answer.user}" if answer.user else "valid"
    if answer.gated is False:
        cure = (
            "Allow it at huggingface.co/settings/tokens: read access to public gated repositories."
        )
        return [MachineCheck("Hub token", "warn", f"{whose}, and may not read gated models", cure)]
    return [
        MachineCheck("Hub token", "ok", f"{whose}; a gated model must be accepted on its page too")
    ]


def _clock(skew_s: float | None) -> MachineCheck:
    if skew_s is None:
        return MachineCheck("clock", "unknown", "the Hub did not tell the time")
    if abs(skew_s) <= _SKEW_S:
        return MachineCheck("clock", "ok", "agrees with the Hub's")
    found = (
        f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the Hub's: certificates and"
        " signed addresses fail by it"
    )
    return MachineCheck(
        "clock",
        "fail" if abs(skew_s) > _MUCH_SKEW_S else "warn",
        found,
        "Turn on time synchronisation: `sudo timedatectl set-ntp true`.",
    )


def container_gpus(found: Containers | None, hardware: Hardware) -> MachineCheck | None:
    """Whether Docker can give GPUs to engines: by NVIDIA's runtime, or through CDI."""
    if not hardware.gpus:
        return None
    if found is None:
        return MachineCheck("container toolkit", "unknown", "Docker does not tell its runtimes")
    if "nvidia" in found.runtimes:
        return MachineCheck("container toolkit", "ok", "NVIDIA's runtime is there")
    missing = [
        gpu.uuid for gpu in hardware.usable().gpus if f"nvidia.com/gpu={gpu.uuid}" not in found.cdi
    ]
    if found.cdi and not missing:
        return MachineCheck("container toolkit", "ok", "Docker knows the GPUs through CDI")
    if found.cdi:
        cure = (
            "Write the list anew, by UUID: `sudo nvidia-ctk cdi generate"
            " --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml`."
        )
        return MachineCheck(
            "container toolkit", "fail", f"CDI does not name {short_list(missing)}", cure
        )
    cure = (
        "Install the NVIDIA Container Toolkit, run `sudo nvidia-ctk runtime configure"
        " --runtime=docker`, and restart Docker."
    )
    return MachineCheck(
        "container toolkit",
        "fail",
        "Docker has neither NVIDIA's runtime nor GPUs through CDI",
        cure,
    )
