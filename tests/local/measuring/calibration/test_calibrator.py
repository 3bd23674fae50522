"""GPUs are measured by a child of ours over a driver that is a real shared library, on the memory
of the host."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from gateway.domain import Hardware
from gateway.engines.inquiry.inquirer import AskedHost
from gateway.errors import Conflict, HostError
from gateway.hosts.process.asked_environment import SinglePythonHost, run_inquiry_process
from gateway.hosts.process.host import ProcessHost
from gateway.measuring.calibration import measurement
from gateway.measuring.calibration.calibrator import CalibrationResult, Calibrator
from gateway.measuring.calibration.gpu_set import gpu_sets
from gateway.measuring.calibration.measurement import document, read_measurement
from gateway.profiles.profiles import Profiles
from tests.support.fake_cuda import fake_cuda
from tests.support.makers import machine


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told here of how much measurements vary: tests run beside each other."""
    monkeypatch.setattr(measurement, "_MAX_SPREAD_SHARE", 1e9)
    monkeypatch.setattr(measurement, "_SAMPLE_S", 0.001)
    monkeypatch.setattr(measurement, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(measurement, "_MAX_SPREAD_SHARE_OF_SECONDS", 1e9)


def measure(tmp_path: Path, hardware: Hardware, host: AskedHost | None = None) -> CalibrationResult:
    calibrator = Calibrator(host or ProcessHost(tmp_path), Profiles(), tmp_path / "asking")
    return asyncio.run(calibrator.measure(hardware, {}))


def test_the_driver_measures_without_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda(tmp_path / "lib", 2)))
    monkeypatch.setenv("FITSERVE_ADMIN_KEY", "nothing that a child gets")
    hardware = machine("2x3090")
    measurement = measure(tmp_path, hardware)
    first_uuid, second_uuid = (gpu.uuid for gpu in hardware.gpus)
    pair_uuids = ",".join(sorted((first_uuid, second_uuid)))
    facts_by_scope = {(fact.scope["what"], fact.scope["gpus"]): fact for fact in measurement.facts}
    assert set(facts_by_scope) == {
        ("memory", first_uuid),
        ("memory", second_uuid),
        *((kind, pair_uuids) for kind in ("peer_access", "peer_latency", "peer")),
    }
    assert 0 < (facts_by_scope["memory", first_uuid].value or 0) < 200e9
    assert facts_by_scope["peer_access", pair_uuids].value == 1
    assert facts_by_scope["peer", pair_uuids].scope["links"] == "PCIe 4 x8"
    assert {fact.kind for fact in measurement.facts} == {"machine_speed"}
    assert {fact.software["driver"] for fact in measurement.facts} == {hardware.driver}
    assert facts_by_scope["memory", first_uuid].source.startswith(
        "the driver, CUDA driver 13.0, varied by "
    )
    (why,) = measurement.problems
    assert why.startswith("No engine is installed, so matrix products")
    assert not [*(tmp_path / "asking").iterdir()]


def test_copies_that_arrive_wrong_are_a_fact_of_these_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda(tmp_path / "lib", 2, "WRONG")))
    hardware = machine("2x3090")
    measurement = measure(tmp_path, hardware)
    (peer_fact,) = [fact for fact in measurement.facts if fact.kind == "peers_fail"]
    assert peer_fact.scope == {
        "gpus": ",".join(sorted(gpu.uuid for gpu in hardware.gpus)),
        "by": "peer-to-peer",
    }
    assert "a copy from GPU 0 to GPU 1 was corrupted" in measurement.problems[-1]
    assert not [fact for fact in measurement.facts if fact.scope.get("what") == "peer"]


def test_measurements_before_a_crash_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda(tmp_path / "lib", 2, "CRASH")))
    measurement = measure(tmp_path, machine("2x3090"))
    assert [fact.scope["what"] for fact in measurement.facts] == ["memory", "memory"]
    assert measurement.problems[-1] == "copies between GPUs 0, 1: the process of GPU 0 ended"


def test_a_hanging_measurement_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda(tmp_path / "lib", 2, "STUCK")))
    (pair,) = gpu_sets(machine("2x3090").gpus, ())
    data = json.dumps(json.loads(document(pair, "driver")) | {"part_s": 0.2}).encode()

    async def program_lines() -> list[bytes]:
        return [
            line
            async for line in run_inquiry_process(Path(sys.executable), tmp_path / "asking", data)
        ]

    measurement = read_measurement(asyncio.run(program_lines()), 2)
    assert measurement.numbers == ()
    assert measurement.problems == (
        "memory and products of GPUs 0, 1: nothing came from GPU 0, 1 within 0.2 s",
    )


def test_a_missing_driver_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcuda.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    measurement = measure(tmp_path, machine("3090"))
    assert not measurement.facts
    assert "libcuda.so.1" in measurement.problems[-1]


def test_an_engine_that_cannot_measure_leaves_it_to_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This Python has no torch."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda(tmp_path / "lib", 1)))
    measurement = measure(
        tmp_path, machine("3090"), SinglePythonHost(Path(sys.executable), tmp_path / "asking")
    )
    assert [fact.scope["what"] for fact in measurement.facts] == ["memory"]
    assert measurement.facts[0].source.startswith("the driver")
    assert "No module named 'torch'" in measurement.problems[0]


@pytest.mark.parametrize(
    "program",
    ["#!/bin/sh\nexit 3\n", '#!/bin/sh\necho \'{"measured": {"numbers": 3}}\'\n', "#!/bin/sh\n"],
)
def test_a_python_that_says_nonsense_costs_its_word_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda(tmp_path / "lib", 1)))
    python = tmp_path / "python"
    python.write_text(program)
    python.chmod(0o755)
    measurement = measure(tmp_path, machine("3090"), SinglePythonHost(python, tmp_path / "asking"))
    assert [fact.scope["what"] for fact in measurement.facts] == ["memory"]
    assert len(measurement.problems) == 1


def test_gpus_that_somebody_uses_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda(tmp_path / "lib", 1)))
    hardware = machine("2x3090")
    first_uuid, second_uuid = (gpu.uuid for gpu in hardware.gpus)
    calibrator = Calibrator(ProcessHost(tmp_path), Profiles(), tmp_path / "asking")
    stored_measurement = asyncio.run(calibrator.measure(hardware, {first_uuid: "m runs on it"}))
    assert stored_measurement.left_alone == {first_uuid: "m runs on it"}
    assert {fact.scope["gpus"] for fact in stored_measurement.facts} == {second_uuid}


def test_a_machine_without_gpus_has_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="no GPU to measure"):
        measure(tmp_path, machine("cpu"))


def test_a_measurement_of_other_gpus_is_nonsense() -> None:
    line = (
        b'{"measured": {"software": "x", "problems": [], "numbers": [{"what": "memory", "gpus":'
        b' [1], "value": 1, "spread": 0}]}}'
    )
    with pytest.raises(HostError, match="GPUs outside the question"):
        read_measurement([line], 1)
