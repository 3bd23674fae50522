"""Readings of `fitserve doctor` on machines made for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gateway.cli.doctor import readings
from gateway.cli.doctor.checks import MachineCheck
from gateway.cli.doctor.examination import examine
from gateway.hosts.cluster.membership import Membership, make_token, write_membership
from gateway.settings import Settings
from tests.support.fake_nvml import Card, FakeNvml
from tests.support.versions import NEWEST_VLLM, VLLM_REF


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_readings_of_a_card_may_be_incomplete() -> None:
    cards = [
        Card(
            "GPU-a", b"A", persistence=False, ecc=True, uncorrected=2, remapping=True, display=True
        ),
        Card("GPU-b", "B", error=15),
    ]
    (first,) = readings.gpu_conditions(nvml := FakeNvml([*cards]))
    assert first == readings.GpuCondition(
        0,
        "A",
        has_persistence=False,
        has_ecc=True,
        uncorrected=2,
        awaits_remap=True,
        drives_display=True,
    )
    assert nvml.open == 0
    (silent,) = readings.gpu_conditions(
        FakeNvml([Card("GPU-c", "C", persistence=None, display=None)])
    )
    assert silent == readings.GpuCondition(0, "C")
    assert readings.gpu_conditions(FakeNvml([], init_error=12)) == []


def test_host_memory_is_read_with_its_guards(tmp_path: Path) -> None:
    assert readings.host_memory(tmp_path) is None
    (tmp_path / "meminfo").write_text(
        "MemTotal: 100 kB\nMemFree: 20 kB\nMemAvailable: 70 kB\nSwapTotal: 8 kB\nHugePages: 0\n"
    )
    for pid, name in ((1, "systemd"), (7, "earlyoom"), (8, "python")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
    host_memory = readings.host_memory(tmp_path)
    assert host_memory == readings.HostMemory(20 * 1024, 70 * 1024, 8 * 1024, ("earlyoom",))
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\n")
    assert readings.host_memory(tmp_path) is None


def test_a_toolchain_is_found_as_by_the_engine(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    nothing = readings.toolchain("e", environment, {}, {"PATH": "/nowhere"})
    assert (nothing.compiler, nothing.headers, nothing.ninja, nothing.prebuilt) == (
        None,
        None,
        None,
        (),
    )
    python = tmp_path / "python"
    (python / "include/python3.12").mkdir(parents=True)
    (python / "include/python3.12/Python.h").touch()
    ninja = executable(environment / "bin/ninja")
    (environment / "pyvenv.cfg").write_text(f"home = {python}/bin\nversion_info = 3.12.4\n")
    (environment / "lib/python3.12/site-packages/flashinfer_cubin").mkdir(parents=True)
    nvcc, gcc = executable(tmp_path / "cuda/bin/nvcc"), executable(tmp_path / "bin/gcc")
    toolchain = readings.toolchain(
        "e", environment, {"CUDA_HOME": str(tmp_path / "cuda")}, {"PATH": str(tmp_path / "bin")}
    )
    header = str(python / "include/python3.12/Python.h")
    assert toolchain == readings.Toolchain(
        "e", str(gcc), header, str(nvcc), str(ninja), ("flashinfer_cubin",)
    )
    assert (
        readings.toolchain(
            "e", environment, {"CC": "clang-99"}, {"PATH": str(tmp_path / "bin")}
        ).compiler
        is None
    )
    assert readings.toolchain(
        "e", environment, {}, {"PATH": str(tmp_path / "cuda/bin")}
    ).nvcc == str(nvcc)


def test_a_missing_file_gives_no_reading(tmp_path: Path) -> None:
    assert readings.kernel_version(tmp_path) is None
    assert readings.free_bytes(tmp_path / "to/be/made") is not None


def test_a_machine_of_an_outsider_is_examined_whole(tmp_path: Path) -> None:
    """Two cards, one with errors, one kept; no engine, no Docker, nobody at the Hub's address."""
    settings = Settings(
        data_dir=tmp_path / "data", host_kind="process", hf_endpoint="http://127.0.0.1:9", port=0
    )
    cards = [
        Card("GPU-a", "NVIDIA GeForce RTX 3090", display=True),
        Card("GPU-b", "NVIDIA GeForce RTX 3090", persistence=False),
    ]
    checks = {check.name: check for check in examine(settings, nvml=FakeNvml([*cards]))}
    states = {name: check.state for name, check in checks.items()}
    assert states["engines"] == "fail"
    assert states["display"] == states["persistence mode"] == states["Hugging Face Hub"] == "warn"
    assert states["clock"] == "unknown"
    assert all(check.do for check in checks.values() if check.state in ("warn", "fail"))
    assert all("\n" not in check.do for check in checks.values())


def test_an_environment_without_headers_is_foreseen(tmp_path: Path) -> None:
    (tmp_path / f"engines/vllm-{NEWEST_VLLM}").mkdir(parents=True)
    (tmp_path / f"engines/vllm-{NEWEST_VLLM}/.complete").touch()
    tmp_path.chmod(0o700)
    settings = Settings(
        data_dir=tmp_path, host_kind="process", hf_endpoint="http://127.0.0.1:9", port=0
    )
    checks = examine(
        settings, nvml=FakeNvml([Card("GPU-a", "NVIDIA GeForce RTX 3090")], driver="470.10")
    )
    (compiler,) = (check for check in checks if check.name == "compiler")
    assert (compiler.state, "Python.h" in compiler.finding) == ("fail", True)
    (driver,) = (check for check in checks if check.name == "driver")
    assert (driver.state, VLLM_REF in driver.finding) == ("fail", True)


def test_a_machine_outside_a_cluster_gets_the_reason(tmp_path: Path) -> None:
    def row(kind: Literal["process", "cluster"]) -> MachineCheck | None:
        settings = Settings(
            data_dir=tmp_path, host_kind=kind, hf_endpoint="http://127.0.0.1:9", port=0
        )
        checks = examine(settings, nvml=FakeNvml([]))
        return next((check for check in checks if check.name == "cluster"), None)

    tmp_path.chmod(0o700)
    assert row("process") is None
    absent = row("cluster")
    assert absent is not None
    assert absent.state == "fail"
    assert "belongs to no cluster" in absent.finding
    token = tmp_path / "cluster/token"
    make_token(token)
    membership = Membership(
        name="two", role="node", head="127.0.0.1:9", address="127.0.0.1", token_file=token
    )
    write_membership(tmp_path, membership)
    for silent in (row("process"), row("cluster")):
        assert silent is not None
        assert silent.state == "fail"
        assert "The head of the cluster does not answer at 127.0.0.1:9" in silent.finding
        assert "firewall" in silent.do
