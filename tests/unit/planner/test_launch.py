"""A plan made concrete: the command line, environment and devices that a host starts."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Engine, Flag, Mount
from gateway.domain.engine import Warmup
from gateway.engines.common import media_hosts_flag
from gateway.engines.common.expert_warmups import VARIABLE
from gateway.planner.flags import LaunchInputs, launch_spec
from gateway.profiles.profiles import Profiles
from tests.support.makers import engine as make_engine
from tests.support.makers import plan as make_plan
from tests.support.versions import SGLANG, VLLM

SMALL = make_engine()


def launch(
    environment: str | None,
    engine: Engine = SMALL,
    media_hosts: tuple[str, ...] = (),
    *,
    is_exposed: bool = False,
    trace_endpoint: str = "",
    **changes: Any,
) -> Any:
    return launch_spec(
        make_plan().evolve(**changes),
        engine,
        LaunchInputs(
            "/models/m {env}",
            mounts=(Mount(source="/models", target="/models"),),
            environment=environment,
            media_hosts=media_hosts,
            is_exposed=is_exposed,
            trace_endpoint=trace_endpoint,
        ),
        name="fitserve-m-r0-a1",
        model="org/m",
        attempt=1,
        port=8001,
    )


def test_a_container_listens_for_its_network_and_a_process_for_this_machine_only() -> None:
    flags = (
        "--model=/models/m {env}",
        "--served-model-name=org/m",
        "--host=0.0.0.0",
        "--port=8001",
    )
    inside = launch(None)
    assert inside.argv == ("python3", "-m", "engine", *make_plan().argv, *flags)
    outside = launch("/envs/e {x}")
    assert outside.argv[:3] == ("/envs/e {x}/bin/python", "-m", "engine")
    assert outside.argv[-2:] == ("--host=127.0.0.1", "--port=8001")


def test_an_engine_that_other_machines_reach_wants_its_key_on_every_path() -> None:
    guarded_engine = make_engine(
        key_env="KEY", flags={**SMALL.flags, "middleware": Flag(type="str", is_reserved=True)}
    )
    arguments = launch("/envs/e", guarded_engine, is_exposed=True).argv
    assert arguments[3] == "--middleware=fitserve_door.Door"
    for spec in (launch("/envs/e", guarded_engine), launch("/envs/e", SMALL, is_exposed=True)):
        assert spec.argv[:3] == ("/envs/e/bin/python", "-m", "engine")


def test_a_launch_adds_gpus_ports_and_variables_to_its_plan() -> None:
    spec = launch(
        None, SMALL.evolve(env={"A": "1", "B": "1"}), env={"B": "2"}, gpus=("GPU-0", "GPU-1")
    )
    assert spec.env == {"A": "1", "B": "2"}
    assert (spec.gpus, spec.port, spec.attempt, spec.model) == (
        ("GPU-0", "GPU-1"),
        8001,
        1,
        "org/m",
    )
    assert (
        spec.fingerprint == make_plan().evolve(env={"B": "2"}, gpus=("GPU-0", "GPU-1")).fingerprint
    )
    assert spec.mounts == (Mount(source="/models", target="/models"),)
    assert spec.shm_bytes == 4 * 1024**3


def test_warm_ups_that_a_plan_skips_are_left_out_by_a_program_before_the_engine() -> None:
    warmup = Warmup(shapes="served.warm:SHAPES", min_capability="9.0")
    spec = launch("/e", SMALL.evolve(expert_warmups={"router": warmup}), env={VARIABLE: "router"})
    assert spec.env == {}
    assert spec.argv[:2] == ("/e/bin/python", "-c")
    assert "served.warm:SHAPES" in spec.argv[2]
    assert 'run_module("engine"' in spec.argv[2]
    assert spec.argv[3 : 3 + len(make_plan().argv)] == make_plan().argv


def test_polls_of_the_gateway_are_not_in_the_access_log_by_default() -> None:
    quiet = SMALL.evolve(
        quiet=("--hush", "/health"), flags={**SMALL.flags, "hush": Flag(type="str")}
    )
    start = quiet.process_command[1:]
    assert launch("/e", quiet).argv[1 : len(start) + 3] == (*start, "--hush", "/health")
    # This version has no such flag.
    assert "--hush" not in launch("/e", quiet.evolve(flags=SMALL.flags)).argv


def test_every_start_gets_the_switches_of_the_api_that_its_version_has() -> None:
    switches = SMALL.evolve(
        api_switches=("count-cached", "absent"),
        flags={**SMALL.flags, "count-cached": Flag(type="bool")},
    )
    argv = launch(None, switches).argv
    assert "--count-cached" in argv
    assert "--absent" not in argv


@pytest.mark.parametrize("version", SGLANG)
def test_sglang_counts_cached_tokens_and_keeps_responses(version: str) -> None:
    engine = Profiles().engine(f"sglang=={version}")
    argv = launch(None, engine).argv
    assert "--enable-cache-report" in argv  # a 0 is a count, then
    assert ("--enable-response-store" in argv) is ("enable-response-store" in engine.flags)


@pytest.mark.parametrize("version", VLLM)
def test_vllm_keeps_responses(version: str) -> None:
    engine = Profiles().engine(f"vllm=={version}")
    assert launch(None, engine).env["VLLM_ENABLE_RESPONSES_API_STORE"] == "1"


def test_nothing_in_a_plan_displaces_where_an_engine_listens() -> None:
    argv = launch("/e", argv=("--host=0.0.0.0", "--port=1")).argv
    assert [item for item in argv if item.startswith("--host")][-1] == "--host=127.0.0.1"
    assert [item for item in argv if item.startswith("--port")][-1] == "--port=8001"


def test_an_engine_that_traces_gets_its_collector_before_the_flags_of_the_gateway() -> None:
    tracing = SMALL.evolve(flags={**SMALL.flags, "otlp-traces-endpoint": Flag(type="str")})
    spec = launch(None, tracing, trace_endpoint="http://c:4317")
    at = spec.argv.index("--otlp-traces-endpoint=http://c:4317")
    assert spec.argv[at + 1].startswith("--model=")
    assert spec.env["OTEL_SERVICE_NAME"] == SMALL.kind
    for without in (launch(None, tracing), launch(None, trace_endpoint="http://c:4317")):
        assert "OTEL_SERVICE_NAME" not in without.env
        assert not any("otlp" in item for item in without.argv)


def test_an_engine_that_can_compare_hosts_of_media_gets_their_list() -> None:
    hosts = ("a.example", "[2001:db8::1]")
    listing = SMALL.evolve(flags={**SMALL.flags, media_hosts_flag.FLAG: Flag(type="str")})
    argv = launch(None, listing, hosts).argv
    at = argv.index(f"--{media_hosts_flag.FLAG}")
    assert argv[at + 1 : at + 3] == hosts
    assert argv[at + 3].startswith("--model=")
    # The word of a user goes first, and no other engine would take it.
    text = f"--{media_hosts_flag.FLAG}=b.example"
    assert [
        item for item in launch(None, listing, hosts, argv=(text,)).argv if "media" in item
    ] == [text]
    for without in (launch(None, listing), launch(None, SMALL, hosts)):
        assert not any("media" in item for item in without.argv)
