"""Each check of `fitserve doctor`, of values that were read."""

from __future__ import annotations

import pytest

from gateway.cli.doctor import checks
from gateway.cli.doctor.checks import MachineCheck
from gateway.cli.doctor.readings import Containers, GpuCondition, HostMemory, HubAnswer, Toolchain
from gateway.domain import PreparedView
from gateway.domain.units import GIB
from tests.support.makers import engine, machine

HERE = machine("2x3090")
GOOD = GpuCondition(
    0,
    "A",
    has_persistence=True,
    has_ecc=True,
    uncorrected=0,
    awaits_remap=False,
    drives_display=False,
)
OLD, NEW = engine(version="1.0", min_driver="525"), engine(version="2.0", min_driver="580")


def check_text(check: MachineCheck | None, state: str, *words: str) -> None:
    """It is of this state, says these words, and what to do where something is to be done."""
    assert check is not None
    assert check.state == state, check
    assert all(word in f"{check.finding} {check.do}" for word in words), check
    assert bool(check.do) == (state in ("warn", "fail")), check


def test_the_doctor_reports_memory_errors() -> None:
    check_text(checks.memory_errors([GOOD]), "ok", "ECC is on")
    check_text(checks.memory_errors([GOOD._replace(has_ecc=False)]), "ok", "off on GPU 0")
    check_text(
        checks.memory_errors([GOOD, GOOD._replace(number=1, uncorrected=3)]),
        "warn",
        "GPU 1: 3 uncorrected",
        "--gpu-reset",
    )
    check_text(checks.memory_errors([GOOD._replace(awaits_remap=True)]), "warn", "wait for a remap")
    assert checks.memory_errors([GOOD._replace(has_ecc=None, uncorrected=None)]) is None, (
        "a card without ECC says nothing"
    )


def test_the_doctor_checks_the_persistence_mode() -> None:
    check_text(checks.persistence([GOOD]), "ok")
    check_text(
        checks.persistence([GOOD, GOOD._replace(number=1, has_persistence=False)]),
        "warn",
        "GPU 1",
        "nvidia-smi -pm 1",
    )
    check_text(checks.persistence([GOOD._replace(has_persistence=None)]), "unknown")
    assert checks.persistence([]) is None


def test_the_doctor_warns_of_a_gpu_with_a_display() -> None:
    check_text(
        checks.display([GOOD._replace(drives_display=True)]),
        "warn",
        "GPU 0 drives a display",
        "FITSERVE_GPUS",
    )
    assert checks.display([GOOD, GOOD._replace(drives_display=None)]) is None


def test_the_doctor_checks_memory_shared_by_gpu_and_host() -> None:
    spark, quiet = machine("gb10"), HostMemory(100 * GIB, 110 * GIB, 0, ("earlyoom",))
    assert checks.shared_memory(HERE, quiet) is None
    check_text(checks.shared_memory(spark, quiet), "ok", "110.00 GiB available", "leave 15.21 GiB")
    check_text(checks.shared_memory(spark, None), "unknown")
    full = quiet._replace(free_bytes=20 * GIB)
    check_text(checks.shared_memory(spark, full), "warn", "90.00 GiB of them pages", "drop_caches")
    check_text(
        checks.shared_memory(spark, quiet._replace(guards=())), "warn", "may hang", "earlyoom"
    )
    check_text(checks.shared_memory(spark, quiet._replace(swap=16 * GIB)), "warn", "swapoff")


def test_the_doctor_checks_mig_devices() -> None:
    first_gpu, two = HERE.gpus
    check_text(
        checks.mig(HERE.evolve(gpus=(first_gpu.evolve(mig=True), two))),
        "warn",
        "without a MIG device",
        "nvidia-smi mig",
    )
    check_text(
        checks.mig(HERE.evolve(gpus=(first_gpu.evolve(mig=True, uuid="MIG-1"),))), "ok", "1 devices"
    )
    assert checks.mig(HERE) is None


def test_the_doctor_compares_the_driver_with_every_engine() -> None:
    check_text(checks.driver(HERE.evolve(driver="580.95"), [OLD, NEW]), "ok", OLD.ref, NEW.ref)
    check_text(
        checks.driver(HERE.evolve(driver="570.1"), [OLD, NEW]),
        "warn",
        f"too old for {NEW.ref}",
        "580 or newer",
    )
    check_text(checks.driver(HERE.evolve(driver="470.1"), [OLD, NEW]), "fail", "580 or newer")
    check_text(checks.driver(HERE.evolve(driver=None), [OLD]), "unknown")
    check_text(checks.driver(HERE, [engine(min_driver=None)]), "unknown")
    assert checks.driver(machine("cpu"), [OLD]) is None
    assert checks.driver(HERE, []) is None


def test_the_doctor_warns_of_wsl() -> None:
    wsl2 = (
        "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1) (gcc 11.2.0) #1 SMP"
    )
    check_text(checks.wsl(wsl2), "warn", "pin memory", ".wslconfig")
    assert checks.wsl("Linux version 6.1.0-18-amd64 (debian-kernel@lists.debian.org)") is None
    check_text(checks.wsl(None), "unknown")


def test_the_doctor_checks_limits_of_files_and_memory() -> None:
    check_text(checks.open_files(1024, 1024 * 1024), "ok", "1,024, may be raised to 1,048,576")
    check_text(checks.open_files(None, None), "ok", "unlimited")
    check_text(checks.open_files(1024, 4096), "warn", "at most 4,096", "LimitNOFILE")
    check_text(
        checks.open_files(1024, 4096, has_containers=True), "warn", "at most 4,096", "daemon.json"
    )
    check_text(checks.locked_memory(8 * 1024**2, HERE), "warn", "InfiniBand")
    check_text(checks.locked_memory(None, HERE), "ok")
    assert checks.locked_memory(0, machine("cpu")) is None


TOOLS = Toolchain(
    "vllm==1",
    "/usr/bin/gcc",
    "/usr/include/python3.12/Python.h",
    "/usr/local/cuda/bin/nvcc",
    "/usr/bin/ninja",
)


@pytest.mark.parametrize(
    ("tools", "states", "words"),
    [
        (TOOLS, ["ok"], ["/usr/bin/gcc"]),
        (TOOLS._replace(headers=None), ["fail"], ["Triton needs Python.h", "python3-dev"]),
        (TOOLS._replace(compiler=None, headers=None), ["fail"], ["a C compiler and Python.h"]),
        (TOOLS._replace(nvcc=None), ["warn"], ["without nvcc", "CUDA_HOME"]),
        (TOOLS._replace(nvcc=None, ninja=None), ["warn"], ["nvcc and ninja"]),
        (
            TOOLS._replace(nvcc=None, prebuilt=("flashinfer_cubin",)),
            ["ok"],
            ["come with flashinfer_cubin"],
        ),
        (TOOLS._replace(compiler=None, ninja=None), ["fail", "warn"], []),
    ],
)
def test_the_doctor_checks_toolchains(
    tools: Toolchain, states: list[str], words: list[str]
) -> None:
    toolchains = checks.toolchains([tools])
    assert [check.state for check in toolchains] == states
    for check in toolchains:
        check_text(check, check.state, "vllm==1", *words)


def test_the_doctor_checks_free_disk() -> None:
    uses = {
        "weights": ("/models", 500 * GIB),
        "caches": ("/data", GIB),
        "temporary files": ("/tmp", None),
    }
    weights, caches, temporary = checks.disk(uses)
    check_text(weights, "ok", "/models")
    check_text(caches, "warn", "1.00 GiB free in /data", "FITSERVE_DATA_DIR")
    check_text(temporary, "unknown", "/tmp")


HUB = HubAnswer("https://hub", 200, "", 0.5)


def states(answer: HubAnswer) -> dict[str, str]:
    return {check.name: check.state for check in checks.hub(answer)}


def test_the_doctor_checks_hub_token_and_clock() -> None:
    assert states(HUB) == {"Hugging Face Hub": "ok", "Hub token": "ok", "clock": "ok"}
    assert states(HubAnswer("https://hub", problem="ConnectError")) == {
        "Hugging Face Hub": "warn",
        "clock": "unknown",
    }
    assert (
        states(HUB._replace(was_asked_with_token=True, user="me", is_gated=True))["Hub token"]
        == "ok"
    )
    assert states(HUB._replace(was_asked_with_token=True, is_gated=False))["Hub token"] == "warn"
    known_states = states(HUB._replace(was_asked_with_token=True, status=401))
    assert (known_states["Hugging Face Hub"], known_states["Hub token"]) == ("ok", "fail")
    assert states(HUB._replace(was_asked_with_token=True, status=503))["Hub token"] == "unknown"
    assert states(HUB._replace(status=429))["Hugging Face Hub"] == "warn"
    assert [states(HUB._replace(skew_s=skew))["clock"] for skew in (-20, 90, -90, 4000, None)] == [
        "ok",
        "warn",
        "warn",
        "fail",
        "unknown",
    ]
    for answer in (
        HUB,
        HUB._replace(status=500, skew_s=-400),
        HUB._replace(was_asked_with_token=True, status=401),
    ):
        for check in checks.hub(answer):
            check_text(check, check.state)


def test_the_doctor_checks_gpus_in_containers() -> None:
    uuids = tuple(f"nvidia.com/gpu={gpu.uuid}" for gpu in HERE.gpus)
    check_text(checks.container_gpus(Containers(("runc", "nvidia"), ()), HERE), "ok")
    check_text(checks.container_gpus(Containers(("runc",), uuids), HERE), "ok", "CDI")
    check_text(
        checks.container_gpus(Containers(("runc",), ("nvidia.com/gpu=0",)), HERE),
        "fail",
        "nvidia-ctk cdi generate",
    )
    check_text(checks.container_gpus(Containers(("runc",), ()), HERE), "fail", "Container Toolkit")
    check_text(checks.container_gpus(None, HERE), "unknown")
    assert checks.container_gpus(None, machine("cpu")) is None


def test_the_doctor_lists_prepared_engines_with_their_memory() -> None:
    view = PreparedView(
        engine="vllm==0.26.0", pid=7, since=1.0, modules=5000, refused={"flash": "x"}, pss_bytes=GIB
    )
    prepared_engines = checks.prepared_engines([view], 1)
    assert prepared_engines is not None
    assert "process 7, 1" in prepared_engines.finding
    assert "left to the fork: flash" in prepared_engines.finding
    assert checks.prepared_engines([], 0) is None
    missing_check = checks.prepared_engines([], 1)
    assert missing_check is not None
    assert missing_check.finding.startswith("none")


def test_the_doctor_checks_the_collector_of_traces() -> None:
    url = "http://127.0.0.1:4318"
    check_text(checks.collector(url, None, ""), "ok", url)
    check_text(checks.collector(url, None, "Connection refused"), "warn", url, "refused")
    check_text(checks.collector(url, "opentelemetry.sdk", ""), "fail", ".[otel]")
