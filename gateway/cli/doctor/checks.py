"""The checks of `fitserve doctor`, each a pure function of readings.

ok        nothing to do
warn      most engines work; `do` names an improvement
fail      some or all engines cannot start
unknown   the check could not be made
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gateway.cli.doctor.readings import Containers, GpuCondition, HostMemory, HubAnswer, Toolchain
from gateway.domain import Engine, Hardware, PreparedView
from gateway.domain.release import release
from gateway.domain.units import GIB, gib
from gateway.engines.common.planning_input import host_reserve_bytes
from gateway.machine.collector_reach import EXTRA_HINT

# Engines raise their own limit to this number: set_ulimit in vllm/utils/system_utils.py:264
# (0.33.0) and sglang/srt/utils/common.py:2585 (0.5.23).
_OPEN_FILES = 65_535
_WEIGHTS_BYTES = 20 * GIB
_CACHES_BYTES = 5 * GIB
_TEMPORARY_BYTES = 2 * GIB
# Signed download addresses are valid for some minutes around their time.
_SKEW_S = 30.0
_MUCH_SKEW_S = 300.0

State = Literal["ok", "warn", "fail", "unknown"]


class MachineCheck(NamedTuple):
    """The result of a check.

    do: advice, or empty.
    fix: the change made by `--fix`.
    """

    name: str
    state: State
    finding: str
    do: str = ""
    fix: str = ""

    def fields(self) -> dict[str, str]:
        """The fields of the JSON output."""
        return {
            "name": self.name,
            "state": self.state,
            "found": self.finding,
            "do": self.do,
            "fixed": self.fix,
        }


def short_list(names: Sequence[str]) -> str:
    """The first three names, and the number of further ones."""
    suffix = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + suffix


def memory_errors(cards: Sequence[GpuCondition]) -> MachineCheck | None:
    """ECC errors; None where no card has ECC."""
    broken = [
        f"GPU {card.number}: {card.uncorrected} uncorrected errors"
        for card in cards
        if card.uncorrected
    ]
    waiting_cards = [
        f"GPU {card.number}: memory rows wait for a remap" for card in cards if card.awaits_remap
    ]
    if broken or waiting_cards:
        cure = (
            "Reset it when no engine runs (`sudo nvidia-smi --gpu-reset -i INDEX`) or reboot. If"
            " the error comes back, the card is failing."
        )
        return MachineCheck("GPU memory", "warn", "; ".join([*broken, *waiting_cards]), cure)
    with_ecc = [card for card in cards if card.has_ecc is not None]
    if not with_ecc:
        return None
    disabled = [str(card.number) for card in with_ecc if not card.has_ecc]
    return MachineCheck(
        "GPU memory",
        "ok",
        f"ECC is off on GPU {', '.join(disabled)}"
        if disabled
        else "ECC is on, no uncorrected error",
    )


def persistence(cards: Sequence[GpuCondition]) -> MachineCheck | None:
    if not cards:
        return None
    if all(card.has_persistence is None for card in cards):
        return MachineCheck("persistence mode", "unknown", "the driver does not say")
    disabled = [str(card.number) for card in cards if card.has_persistence is False]
    if not disabled:
        return MachineCheck("persistence mode", "ok", "on")
    finding = (
        f"off on GPU {', '.join(disabled)}: the first program has to load the driver, which adds"
        " seconds to each start"
    )
    return MachineCheck(
        "persistence mode",
        "warn",
        finding,
        "Run `sudo nvidia-smi -pm 1`, or enable nvidia-persistenced.",
    )


def display(cards: Sequence[GpuCondition]) -> MachineCheck | None:
    """Displays: a desktop takes GPU memory at any time, and long kernels freeze it."""
    cards_with_display = [f"GPU {card.number}" for card in cards if card.drives_display]
    if not cards_with_display:
        return None
    cure = (
        "Plans leave the memory free that the desktop uses now. Log out, use another card for the"
        " desktop, or exclude this one with FITSERVE_GPUS."
    )
    return MachineCheck(
        "display",
        "warn",
        f"{', '.join(cards_with_display)} drives a display, whose programs take GPU memory",
        cure,
    )


def shared_memory(hardware: Hardware, memory: HostMemory | None) -> MachineCheck | None:
    """Memory that GPU and host share; None where no GPU does.

    The driver gives an allocation only free memory: `available` counts pages of files too, which
    Linux drops too late for it (github.com/NVIDIA/xr-ai/issues/440).
    """
    shared_gpus = [gpu for gpu in hardware.gpus if gpu.memory_kind == "unified"]
    if not shared_gpus:
        return None
    name = "memory of GPU and host"
    free_bytes = max(map(host_reserve_bytes, shared_gpus))
    if memory is None:
        return MachineCheck(name, "unknown", "/proc/meminfo cannot be read")
    pages = max(0, memory.available - memory.free_bytes)
    finding = (
        f"{gib(memory.available)} available, {gib(pages)} of them pages of files; plans leave"
        f" {gib(free_bytes)} to the host"
    )
    do = []
    if pages > memory.free_bytes:
        finding += "; CUDA finds only what is free"
        do.append(
            "Drop the pages before a start: `sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'`."
        )
    if not memory.guards:
        finding += "; no program ends others before memory runs out, so the machine may hang"
        do.append("Install earlyoom, or enable systemd-oomd.")
    if memory.swap:
        finding += f"; {gib(memory.swap)} of swap, which slows a full machine instead of ending it"
        do.append("Turn swap off (`sudo swapoff -a`) where only engines run.")
    return MachineCheck(name, "warn" if do else "ok", finding, " ".join(do))


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
            f"GPU {', '.join(empty)} is in MIG mode without a MIG device: no engine can use it",
            cure,
        )
    if parts:
        return MachineCheck("MIG", "ok", f"{len(parts)} devices; each engine uses exactly one")
    return None


def driver(hardware: Hardware, engines: Iterable[Engine]) -> MachineCheck | None:
    """The driver, compared with the CUDA version of every engine that could start here."""
    if not any(gpu.reservation_reason is None for gpu in hardware.gpus):
        return None
    min_drivers = {engine.ref: engine.min_driver for engine in engines if engine.device == "cuda"}
    if not min_drivers:
        return None
    if hardware.driver is None:
        return MachineCheck("driver", "unknown", "NVML does not report its version")
    known_drivers = {ref: minimum for ref, minimum in min_drivers.items() if minimum is not None}
    too_old = {
        ref: minimum
        for ref, minimum in known_drivers.items()
        if release(hardware.driver) < release(minimum)
    }
    if too_old:
        newest_release = max(too_old.values(), key=release)
        finding = f"{hardware.driver} is too old for {short_list(sorted(too_old))}"
        return MachineCheck(
            "driver",
            "fail" if len(too_old) == len(min_drivers) else "warn",
            finding,
            f"Install driver {newest_release} or newer.",
        )
    if len(known_drivers) < len(min_drivers):
        return MachineCheck(
            "driver",
            "unknown",
            "the driver needed by"
            f" {short_list(sorted(min_drivers.keys() - known_drivers.keys()))} is unknown",
        )
    return MachineCheck(
        "driver", "ok", f"{hardware.driver} supports the CUDA of {short_list(sorted(min_drivers))}"
    )


def wsl(version: str | None) -> MachineCheck | None:
    """WSL2, where vLLM and SGLang pin no memory: vllm/platforms/interface.py:1186 of 0.33.0."""
    if version is None:
        return MachineCheck("kernel", "unknown", "/proc/version cannot be read")
    if "microsoft" not in version.lower():
        return None
    finding = (
        "WSL2: engines cannot pin memory (slower loads and offloading), GPUs cannot access each"
        " other, and WSL gets half of the RAM"
    )
    return MachineCheck(
        "kernel",
        "warn",
        finding,
        "Raise `memory=` in .wslconfig, keep models on WSL's own disk, or run Linux directly.",
    )


def open_files(
    soft: int | None, hard_limit: int | None, *, has_containers: bool = False
) -> MachineCheck:
    """The limit of open files: engines raise their soft limit up to the hard limit.

    has_containers: whether engines are containers, which get Docker's limit.
    """
    if hard_limit is not None and hard_limit < _OPEN_FILES:
        cure = (
            f"Raise the hard limit: LimitNOFILE={_OPEN_FILES} in a systemd unit, or `{_OPEN_FILES}`"
            " in /etc/security/limits.conf."
        )
        if has_containers:
            cure = (
                f"Raise Docker's limit for containers: a `nofile` of {_OPEN_FILES} below"
                " `default-ulimits` in /etc/docker/daemon.json. Restart Docker, then the gateway."
            )
        return MachineCheck(
            "open files",
            "warn",
            f"at most {hard_limit:,}; engines with many clients need {_OPEN_FILES:,}",
            cure,
        )
    texts = ["unlimited" if limit is None else f"{limit:,}" for limit in (soft, hard_limit)]
    return MachineCheck("open files", "ok", f"{texts[0]}, may be raised to {texts[1]}")


def locked_memory(hard_limit: int | None, hardware: Hardware) -> MachineCheck | None:
    """The limit of locked memory, for RDMA between several GPUs. CUDA's own pinned memory does not
    count."""
    if len(hardware.gpus) < 2:
        return None
    if hard_limit is None:
        return MachineCheck("locked memory", "ok", "unlimited")
    cure = (
        "Only for NCCL over InfiniBand or RoCE: LimitMEMLOCK=infinity in a systemd unit, or `ulimit"
        " -l unlimited`."
    )
    return MachineCheck("locked memory", "warn", f"at most {gib(hard_limit)}", cure)


def toolchains(environments: Sequence[Toolchain]) -> list[MachineCheck]:
    """Compilers for each engine's environment.

    Triton compiles a launcher with a C compiler and Python.h at the first start
    (triton/runtime/build.py:28). FlashInfer and DeepGEMM build kernels with nvcc and ninja where no
    package has them.
    """
    checks = []
    for toolchain in environments:
        lacking = [
            name
            for name, path in (
                ("a C compiler", toolchain.compiler),
                ("Python.h", toolchain.headers),
            )
            if path is None
        ]
        if lacking:
            cure = (
                "Install them: `sudo apt-get install gcc python3-dev`, or rebuild the environment"
                " with `fitserve engine install` (its Python has headers)."
            )
            checks.append(
                MachineCheck(
                    "compiler",
                    "fail",
                    f"{toolchain.engine}: Triton needs {' and '.join(lacking)}",
                    cure,
                )
            )
        missing_tools = [
            name
            for name, path in (("nvcc", toolchain.nvcc), ("ninja", toolchain.ninja))
            if path is None
        ]
        if missing_tools and not toolchain.prebuilt:
            finding = (
                f"{toolchain.engine}: without {' and '.join(missing_tools)}, a start cannot build"
                " kernels of FlashInfer and DeepGEMM"
            )
            cure = (
                "Install ninja-build and the CUDA toolkit of the engine's version, and set"
                " FITSERVE_ENGINE_ENV=CUDA_HOME=/usr/local/cuda."
            )
            checks.append(MachineCheck("CUDA compiler", "warn", finding, cure))
        if not lacking and (not missing_tools or toolchain.prebuilt):
            kernel_note = (
                f", kernels of FlashInfer come with {toolchain.prebuilt[0]}"
                if missing_tools
                else ""
            )
            checks.append(
                MachineCheck(
                    "compiler", "ok", f"{toolchain.engine}: {toolchain.compiler}{kernel_note}"
                )
            )
    return checks


def prepared_engines(views: Sequence[PreparedView], max_engines: int) -> MachineCheck | None:
    """The processes that have imported an engine; None where no start is to be prepared."""
    if not max_engines:
        return None
    if not views:
        return MachineCheck(
            "prepared engines", "ok", "none: the first start in an environment is a plain one"
        )
    texts = []
    for view in views:
        size = gib(view.pss_bytes) if view.pss_bytes is not None else "unknown memory"
        refused_names = short_list(sorted(view.refused))
        texts.append(
            f"{view.engine} (process {view.pid}, {size}, {view.modules} modules"
            f"{f'; left to the fork: {refused_names}' if refused_names else ''})"
        )
    return MachineCheck("prepared engines", "ok", "; ".join(texts))


def disk(free_by_folder: Mapping[str, tuple[str, int | None]]) -> list[MachineCheck]:
    """Free disk space by use. free_by_folder: folder and free bytes of each use."""
    minimum = {
        "weights": _WEIGHTS_BYTES,
        "caches": _CACHES_BYTES,
        "temporary files": _TEMPORARY_BYTES,
    }
    cures = {
        "weights": (
            "Models take tens of GiB: free space, or set FITSERVE_MODELS_DIR to a larger disk."
        ),
        "caches": (
            "Engines and compiled kernels take up to 20 GiB: free space, or set FITSERVE_DATA_DIR"
            " to a larger disk."
        ),
        "temporary files": "Compilers need space: free some, or set TMPDIR to a larger disk.",
    }
    checks = []
    for use, (folder, count) in free_by_folder.items():
        if count is None:
            checks.append(MachineCheck(f"disk for {use}", "unknown", f"{folder} could not be read"))
            continue
        is_low = count < minimum[use]
        checks.append(
            MachineCheck(
                f"disk for {use}",
                "warn" if is_low else "ok",
                f"{gib(count)} free in {folder}",
                cures[use] if is_low else "",
            )
        )
    return checks


def collector(address: str, library: str | None, problem: str) -> MachineCheck:
    """The collector of OpenTelemetry.

    address: the value of FITSERVE_OTLP_ENDPOINT.
    library: a package that is not installed.
    problem: the reason for which no connection opens; "": one opens.
    """
    if library is not None:
        finding = f"{address} is set, and {library} is not installed: the gateway cannot start"
        return MachineCheck("collector", "fail", finding, EXTRA_HINT)
    if problem:
        return MachineCheck(
            "collector",
            "warn",
            f"{address} does not answer ({problem}): spans are dropped until it does",
            "Start it, or correct FITSERVE_OTLP_ENDPOINT.",
        )
    return MachineCheck("collector", "ok", f"{address} answers")


def hub(answer: HubAnswer) -> list[MachineCheck]:
    """The Hub, the token, and this machine's clock compared with the Hub's."""
    if answer.status is None:
        cure = (
            "Local model folders need no Hub. For downloads set HTTPS_PROXY, or"
            " FITSERVE_HF_ENDPOINT to a mirror."
        )
        return [
            MachineCheck(
                "Hugging Face Hub",
                "warn",
                f"{answer.hub_address} cannot be reached ({answer.problem})",
                cure,
            ),
            MachineCheck("clock", "unknown", "no time source was reached"),
        ]
    return [_hub_check(answer), *_check_token(answer), _check_clock(answer.skew_s)]


def _hub_check(answer: HubAnswer) -> MachineCheck:
    if answer.status is not None and (answer.status < 400 or answer.status == 401):
        return MachineCheck("Hugging Face Hub", "ok", f"{answer.hub_address} answers")
    cure = "Correct FITSERVE_HF_ENDPOINT, or try again later: status 429 is a rate limit."
    return MachineCheck(
        "Hugging Face Hub",
        "warn",
        f"{answer.hub_address} answers with status {answer.status}",
        cure,
    )


def _check_token(answer: HubAnswer) -> list[MachineCheck]:
    """The check of the Hub's token by an answer of the Hub."""
    if not answer.was_asked_with_token:
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
                "the Hub does not accept this token",
                "Create a token at huggingface.co/settings/tokens, and set FITSERVE_HF_TOKEN.",
            )
        ]
    if answer.status != 200:
        return [
            MachineCheck("Hub token", "unknown", f"the Hub answered with status {answer.status}")
        ]
    owner = f"of {answer.user}" if answer.user else "valid"
    if answer.is_gated is False:
        cure = "Allow read access to public gated repositories at huggingface.co/settings/tokens."
        return [MachineCheck("Hub token", "warn", f"{owner}, without access to gated models", cure)]
    return [
        MachineCheck(
            "Hub token", "ok", f"{owner}; also accept the terms of a gated model on its page"
        )
    ]


def _check_clock(skew_s: float | None) -> MachineCheck:
    if skew_s is None:
        return MachineCheck("clock", "unknown", "the Hub sent no time")
    if abs(skew_s) <= _SKEW_S:
        return MachineCheck("clock", "ok", "agrees with the Hub's")
    finding = (
        f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the Hub's: certificates and"
        " signed addresses fail"
    )
    return MachineCheck(
        "clock",
        "fail" if abs(skew_s) > _MUCH_SKEW_S else "warn",
        finding,
        "Turn on time synchronisation: `sudo timedatectl set-ntp true`.",
    )


def container_gpus(docker: Containers | None, hardware: Hardware) -> MachineCheck | None:
    """Whether Docker can give GPUs to engines: by NVIDIA's runtime or through CDI."""
    if not hardware.gpus:
        return None
    if docker is None:
        return MachineCheck("container toolkit", "unknown", "Docker does not report its runtimes")
    if "nvidia" in docker.runtimes:
        return MachineCheck("container toolkit", "ok", "NVIDIA's runtime is installed")
    missing_uuids = [
        gpu.uuid for gpu in hardware.usable().gpus if f"nvidia.com/gpu={gpu.uuid}" not in docker.cdi
    ]
    if docker.cdi and not missing_uuids:
        return MachineCheck("container toolkit", "ok", "Docker knows the GPUs through CDI")
    if docker.cdi:
        cure = (
            "Generate the list again, by UUID: `sudo nvidia-ctk cdi generate"
            " --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml`."
        )
        return MachineCheck(
            "container toolkit", "fail", f"CDI does not name {short_list(missing_uuids)}", cure
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


def transcripts(
    path: str, models: Sequence[str], *, is_readable: bool, has_library: bool
) -> MachineCheck:
    """The recorder of requests and answers, which is on. path: the file of its keys."""
    name = "transcripts"
    if not has_library:
        return MachineCheck(
            name,
            "fail",
            "the library `cryptography` is not installed",
            "Run `pip install '.[transcripts]'` in a clone of the repository, or unset"
            " FITSERVE_TRANSCRIPT_KEY_FILE.",
        )
    if not is_readable:
        return MachineCheck(
            name,
            "fail",
            f"{path} cannot be read",
            "Make the file: `fitserve transcripts new-key > FILE`.",
        )
    models_text = ", ".join("every model" if model == "*" else model for model in models)
    finding = f"requests of all keys are recorded for: {models_text or 'no model'}"
    return MachineCheck(
        name, "ok", f"{finding}; `fitserve keys ls` marks the keys that are recorded"
    )
