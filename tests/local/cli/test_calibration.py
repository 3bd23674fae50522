"""`fitserve calibrate` where no gateway runs: this process measures, and plans of the command line
know it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.cli import calibration
from gateway.cli.doctor.examination import examine
from gateway.domain import Fact, Wish
from gateway.engines.common.speed.gpu_measurements import uuids
from gateway.errors import NotReady
from gateway.measuring.calibration import measurement
from gateway.planner.service.offline import OfflinePlanner
from gateway.settings import load_settings
from gateway.store.data_folder import lock
from gateway.store.measured_facts import measured_facts
from gateway.store.recovery import open_store
from tests.support import forked
from tests.support.dataplane import refused_url
from tests.support.fake_cuda import fake_cuda
from tests.support.makers import machine
from tests.support.running import model_folder

HARDWARE = machine("2x3090")


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told here of how much measurements vary: tests run beside each other."""
    for name, value in (
        ("_MAX_SPREAD_SHARE", 1e9),
        ("_MAX_SPREAD_SHARE_OF_SECONDS", 1e9),
        ("_SAMPLE_S", 0.001),
        ("_COPY_BYTES", 1 << 20),
    ):
        monkeypatch.setattr(measurement, name, value)
    monkeypatch.setattr(calibration, "probe", lambda _: HARDWARE)
    monkeypatch.delenv("FITSERVE_URL", raising=False)
    monkeypatch.setenv("FITSERVE_PORT", refused_url().rpartition(":")[2])
    monkeypatch.setenv("FITSERVE_HOST_KIND", "process")
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path / "data"))


def test_the_command_measures_without_a_gateway_and_plans_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda(tmp_path / "lib", 2)))
    result = calibration.run_calibration()
    assert [row[1] for row in calibration.fact_rows(result["facts"])] == [
        "memory",
        "memory",
        "peer_access",
        "peer_latency",
        "peer",
    ]
    database = tmp_path / "data/fitserve.db"
    assert [fact.model_dump(mode="json") for fact in measured_facts(database)] == result["facts"]
    # Figures that an engine here would have measured too.
    about = {
        "what": "all_reduce",
        "gpus": uuids(HARDWARE.gpus),
        "cards": ", ".join(gpu.name for gpu in HARDWARE.gpus),
    }
    about["links"] = result["facts"][-1]["scope"]["links"]
    store = open_store(database)
    facts = [
        Fact(
            kind="machine_speed",
            scope={**about, "bytes": size},
            value=time_ns,
            grade="verified",
            source="x",
            at=0.0,
        )
        for size, time_ns in (("16384", 30_000), ("67108864", 9_000_000))
    ]
    store.store_measurements(facts)
    store.close()
    planner = OfflinePlanner.read_environment()
    source = str(model_folder(tmp_path / "model", hidden_size=1024))
    wish = Wish(name="m", source=source, engines=("vllm==0.26.0",), gpus=2, tensor_parallel=2)
    decision = planner.decide(wish, HARDWARE)
    sources = {plan.speed.source for plan in decision.plans if plan.speed and len(plan.gpus) == 2}
    assert {source.partition(" here on ")[0] for source in sources} == {
        "memory, all-reduce measured"
    }
    assert {source.partition("; ")[2] for source in sources} == {
        "else data sheet of NVIDIA GeForce RTX 3090"
    }


def test_nothing_is_measured_beside_a_gateway_that_does_not_answer(tmp_path: Path) -> None:
    data_lock = lock(tmp_path / "data")
    try:
        with pytest.raises(NotReady, match="does not answer") as error:
            calibration.run_calibration()
    finally:
        os.close(data_lock)
    assert "FITSERVE_URL" in error.value.hint


def test_the_doctor_names_a_card_of_which_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speeds() -> list[str]:
        return [check.finding for check in examine(load_settings()) if check.name == "speed"]

    gpu = HARDWARE.gpus[0].evolve(name="NVIDIA Nobody 9000")
    monkeypatch.setattr("gateway.cli.doctor.examination.probe", lambda *_, **__: HARDWARE)
    assert speeds() == []
    monkeypatch.setattr(
        "gateway.cli.doctor.examination.probe", lambda *_, **__: HARDWARE.evolve(gpus=(gpu,))
    )
    assert "NVIDIA Nobody 9000 has no known data sheet" in speeds()[0]
    (tmp_path / "data").mkdir(exist_ok=True)
    store = open_store(tmp_path / "data/fitserve.db")
    about = {"what": "bfloat16", "gpus": gpu.uuid}
    store.store_measurements(
        [Fact(kind="machine_speed", scope=about, value=10**12, grade="verified", source="x")]
    )
    store.close()
    assert speeds() == []


def test_a_gateway_that_is_named_has_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITSERVE_URL", refused_url())
    with pytest.raises(NotReady, match="No gateway answers"):
        calibration.run_calibration()


def test_a_machine_without_gpus_ends_in_words(tmp_path: Path) -> None:
    result = forked.run(["calibrate"], os.environ)
    assert (result.returncode, "no GPU to measure" in result.stderr) == (1, True)
    assert not measured_facts(tmp_path / "data/fitserve.db")


def test_calibrate_prints_gb_per_s_tflops_and_us() -> None:
    assert calibration.value_text("memory", 4_100_000_000_000) == "4,100.0 GB/s"
    assert calibration.value_text("bfloat16", 790 * 10**12) == "790.0 TFLOP/s"
    assert calibration.value_text("all_reduce", 12_345) == "12.3 us"
    assert (calibration.value_text("peer_access", 1), calibration.value_text("peer_access", 0)) == (
        "yes",
        "no",
    )
