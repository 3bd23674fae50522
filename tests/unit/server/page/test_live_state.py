"""The live state of machine, models and starts that the page shows."""

from __future__ import annotations

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.domain import MachineView, NodeLink, PreparedView, StartConditions, StartTime
from gateway.domain.units import TransferProgress
from gateway.proxy.routing.routes import Routes
from gateway.server.page.live_state import live_machine, live_models, start_steps
from tests.support.makers import attempt, machine, wish

WARM = StartConditions(origin="fork", is_cache_empty=False)


def expect_no_time(*_: object) -> None:
    """No start was measured."""


def ready_model(name: str = "m") -> ManagedModel:
    managed_model = ManagedModel(wish(name=name), 1.0)
    managed_model.replicas = [ReplicaState(name, 0, attempt(7, "ready", ready_at=2.0))]
    return managed_model


def test_a_gpu_is_held_by_the_engines_whose_plans_have_it() -> None:
    model = ready_model()
    plan = model.replicas[0].attempt.plan  # type: ignore[union-attr]
    gpus = {gpu["uuid"]: gpu for gpu in live_machine(machine("2x3090"), {"m": model})["gpus"]}
    uuids = {uuid for uuid, gpu in gpus.items() if gpu["holders"]}
    assert uuids == set(plan.gpus)
    assert gpus[plan.gpus[0]]["holders"] == [
        {"model": "m", "replica": 0, "planned": plan.memory.promised_bytes}
    ]
    model.replicas[0].attempt = attempt(7, "failed")
    assert not any(gpu["holders"] for gpu in live_machine(machine("2x3090"), {"m": model})["gpus"])


def test_an_engine_without_a_gpu_holds_memory_of_the_machine() -> None:
    model = ready_model()
    plan = model.replicas[0].attempt.plan  # type: ignore[union-attr]
    model.replicas[0].attempt = attempt(7, "ready", plan=plan.evolve(gpus=()))
    assert [
        holder["model"] for holder in live_machine(machine("cpu"), {"m": model})["holders"]
    ] == ["m"]


def test_requests_are_those_of_all_processes() -> None:
    samples = [
        ("fitserve_requests_in_flight", ("m",), 2.0),
        ("fitserve_requests_in_flight", ("m",), 3.0),
    ]
    samples += [
        ("fitserve_requests_queued", ("m",), 1.0),
        ("fitserve_requests_in_flight", ("other",), 9.0),
    ]
    [view] = live_models([ready_model()], Routes(), samples, expect_no_time)
    assert (view["running"], view["waiting"]) == (5, 1)
    assert (view["replicas"][0]["attempt"], view["replicas"][0]["grade"]) == (7, "verified")


def test_a_download_is_reported_with_its_bytes_and_other_work_in_words() -> None:
    model = ready_model()
    model.replicas[0].attempt = None
    model.replicas[0].progress = TransferProgress("Downloading", 3, 9, 1.5)
    assert live_models([model], Routes(), [], expect_no_time)[0]["replicas"][0]["progress"] == {
        "done": 3,
        "total": 9,
        "rate": 1.5,
    }
    model.replicas[0].progress = "unpacking"
    assert live_models([model], Routes(), [], expect_no_time)[0]["replicas"][0]["progress"] is None


def test_a_start_has_its_expected_time_until_its_proof() -> None:
    time = StartTime(phases={"load": 9.0}, low_s=20.0, high_s=30.0, starts=3, grade="measured")
    model = ready_model()
    [replica] = model.replicas

    def shown_value() -> object:
        return live_models([model], Routes(), [], lambda *_: time)[0]["replicas"][0]["start"]

    assert shown_value() is None
    replica.attempt, replica.launched_attempt, replica.conditions = attempt(8), 7, WARM
    assert shown_value() is None, "another gateway began it"
    replica.launched_attempt = 8
    assert shown_value() == {
        "since": None,
        "steps": [{"phase": "loading weights", "since": None, "took_s": None, "expected_s": 9.0}],
        "low_s": 20.0,
        "high_s": 30.0,
        "grade": "measured",
        "is_cache_empty": False,
    }


def test_steps_of_a_start_have_ended_run_or_are_expected() -> None:
    seconds_by_phase = {"import": 20.0, "download": 5.0, "load": 30.0, "kv": 2.0, "prove": 3.0}
    steps = start_steps({"import": 18.4, "load": 12.0}, "load", seconds_by_phase, 1000.0)
    # The weights were here, so the phase before the present one is not expected any more.
    assert [tuple(step.values()) for step in steps] == [
        ("importing the engine", None, 18, 20.0),
        ("loading weights", 988, None, 30.0),
        ("making the KV cache", None, None, 2.0),
        ("verifying answers", None, None, 3.0),
    ]


def test_an_engine_that_returns_to_a_phase_is_in_that_step() -> None:
    steps = start_steps({"load": 9.0, "compile": 4.0}, "load", {}, 1000.0)
    assert [(step["phase"], step["since"], step["took_s"]) for step in steps] == [
        ("loading weights", 991, None),
        ("compiling", None, 4),
    ]


def test_no_step_is_known_of_a_first_start_before_its_process() -> None:
    assert start_steps({}, None, {}, 1000.0) == []


def test_a_prepared_process_is_reported_with_its_memory_and_begin() -> None:
    prepared_view = PreparedView(
        engine="vllm==0.26.0", pid=7, since=5.0, modules=9, refused={}, pss_bytes=None
    )
    views = live_machine(machine("cpu"), {}, [prepared_view])["prepared"]
    assert views == [{"engine": "vllm==0.26.0", "pid": 7, "since": 5.0, "bytes": None}]


def test_the_machines_of_a_cluster_are_reported_with_their_engines() -> None:
    model = ready_model()
    attempt = model.replicas[0].attempt
    assert attempt is not None
    name = attempt.instance_name
    for engines in ((name, "b"), (f"{name}-n1of2", "b")):
        view = MachineView(name="one", state="ready", gpus=("NVIDIA H200",), engines=engines)
        second_view = MachineView(name="two", state="ready", engines=("c",))
        views = live_machine(machine("cpu"), {"a": model}, nodes=[view, second_view])["nodes"]
        assert views == [
            {
                "name": "one",
                "state": "ready",
                "gpus": ["NVIDIA H200"],
                "engines": 2,
                "models": ["a"],
            },
            {"name": "two", "state": "ready", "gpus": [], "engines": 1, "models": []},
        ]


def test_networks_between_machines_are_reported_with_their_date() -> None:
    measured_link = NodeLink(
        a="one", b="two", tcp_bytes_s=1.25e9, latency_s=3e-5, rdma="none", measured_at=7.0
    )
    links = [measured_link, NodeLink(a="one", b="three", rdma="roce")]
    assert live_machine(machine("cpu"), {}, links=links)["links"] == [
        {
            "a": "one",
            "b": "two",
            "words": "10 Gbit/s of TCP measured, 30 us, TCP",
            "measured_at": 7.0,
        },
        {"a": "one", "b": "three", "words": "not measured, RoCE", "measured_at": None},
    ]
