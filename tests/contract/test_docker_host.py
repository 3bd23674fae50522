"""Behaviour of the Docker host beyond the contract that all hosts share, against a real Docker
Engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from docker.errors import APIError, NotFound

from gateway.domain import EngineRef, LaunchSpec, Mount, StartConditions
from gateway.engines.inquiry import script
from gateway.engines.inquiry.inquiry_document import document
from gateway.errors import Conflict, HostError
from gateway.hosts.docker.container import container_name
from gateway.hosts.docker.host import DockerHost, is_available
from gateway.hosts.docker.inquiry import create_inquiry
from gateway.secret import Secret
from tests.contract.docker_harness import BASE_IMAGE, DockerHarness, docker_harness
from tests.contract.harness import answering, find, until, wait_for_exit
from tests.support.docker_registry import Registry
from tests.support.docker_wire import Wire
from tests.support.paths import ROOT
from tests.support.patience import hang_s

pytestmark = [pytest.mark.docker, pytest.mark.anyio]


@pytest.fixture
async def harness(anyio_backend: str) -> AsyncIterator[DockerHarness]:
    new_docker_harness = docker_harness()
    try:
        yield new_docker_harness
    finally:
        await new_docker_harness.cleanup()


@pytest.fixture
async def wire(harness: DockerHarness, tmp_path: Path) -> AsyncIterator[Wire]:
    async with Wire(tmp_path / "docker.sock") as docker_wire:
        yield docker_wire
        docker_wire.flow()


def program(harness: DockerHarness, script: str, **changes: Any) -> LaunchSpec:
    """A spec that runs a Python script instead of the fake engine."""
    return harness.make_spec(f"{harness.instance}-p").evolve(
        argv=("python3", "-c", script), **changes
    )


async def output(harness: DockerHarness, spec: LaunchSpec) -> list[str]:
    """The output of a program until it ends."""
    await harness.host.start(spec)
    async with asyncio.timeout(hang_s()):
        return [line.decode() async for line in harness.host.follow(spec.name)]


def volume_names(harness: DockerHarness) -> list[str]:
    """The cache volumes of this installation."""
    volumes = harness.docker.volumes(filters={"label": f"fitserve.cache={harness.instance}"})
    return [volume["Name"] for volume in volumes["Volumes"] or []]


def remove_volumes(harness: DockerHarness) -> None:
    for name in volume_names(harness):
        harness.docker.remove_volume(name, force=True)


def is_there(path: str) -> bool:
    return Path(path).exists()


async def pause(harness: DockerHarness, name: str) -> None:
    """Pauses the container of `name`. The kernel may refuse to freeze a process that just forks."""

    async def is_frozen() -> bool:
        try:
            harness.docker.pause(container_name(name, harness.instance))
        except APIError as exc:
            if "unable to freeze" not in str(exc.explanation):
                raise
            return False
        return True

    await until("frozen container", is_frozen)


def containers(harness: DockerHarness) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = harness.docker.containers(
        all=True, filters={"label": f"fitserve.instance={harness.instance}"}
    )
    return rows


# --- the possessions of a container ---


async def test_the_container_says_whose_it_is_and_is_never_restarted_by_docker(
    harness: DockerHarness,
) -> None:
    spec = harness.make_spec(f"{harness.instance}-a").evolve(model="org/model", attempt=7)
    instance = await harness.host.start(spec)
    container_state = harness.inspect(spec.name)
    assert container_state["Name"] == f"/fitserve-{harness.instance}-{spec.name}"
    assert {
        name: value
        for name, value in container_state["Config"]["Labels"].items()
        if name.startswith("fitserve.")
    } == {
        "fitserve.instance": harness.instance,
        "fitserve.name": spec.name,
        "fitserve.model": "org/model",
        "fitserve.attempt": "7",
        "fitserve.fingerprint": "f1",
        "fitserve.port": "8000",
    }
    assert container_state["HostConfig"]["RestartPolicy"]["Name"] == "no"
    assert container_state["HostConfig"]["LogConfig"] == {
        "Type": "json-file",
        "Config": {"max-file": "2", "max-size": "64m"},
    }
    assert not container_state["HostConfig"]["Privileged"]
    assert not container_state["NetworkSettings"]["Ports"], "no port is published"
    assert list(container_state["NetworkSettings"]["Networks"]) == [harness.network]
    address = container_state["NetworkSettings"]["Networks"][harness.network]["IPAddress"]
    assert instance.url == f"http://{address}:8000"
    assert (instance.model, instance.attempt) == ("org/model", 7)


async def test_the_program_has_no_privileges_and_the_shared_memory_it_asked_for(
    harness: DockerHarness,
) -> None:
    script = """
import os
lines = open("/proc/self/status").read().splitlines()
status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
print(status["CapBnd"], status["NoNewPrivs"])
shm = os.statvfs("/dev/shm")
print(shm.f_frsize * shm.f_blocks)
try:
    open("/engine/fake_engine.py", "a")
except OSError as error:
    print(error.strerror)
print(open("/proc/1/comm").read().strip())
"""
    sys_nice = 1 << 23
    lines = await output(harness, program(harness, script, shm_bytes=96 * 1024**2))
    assert lines[:3] == [f"{sys_nice:016x} 1", str(96 * 1024**2), "Read-only file system"]
    assert lines[3] in ("docker-init", "tini"), "the engine is not the first process"


async def test_a_container_gets_only_the_command_and_environment_of_its_spec(
    harness: DockerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = f"fitserve-{harness.instance}:entrypoint"
    (tmp_path / "Dockerfile").write_text(
        f'FROM {BASE_IMAGE}\nENTRYPOINT ["false"]\nCMD ["bad"]\nENV OF_THE_IMAGE=1\n'
    )
    list(harness.docker.build(path=str(tmp_path), tag=image, rm=True))
    # Docker's client passes proxies on to every container, with the passwords in them.
    (tmp_path / "config.json").write_text(
        '{"proxies": {"default": {"httpProxy": "http://user:secret@proxy"}}}'
    )
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    nasty = "; touch /x $HOME `id` \" ' *\n--flag"
    script = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    spec = program(harness, script, env={"A": "1 2", "B": ""})
    spec = spec.evolve(argv=(*spec.argv, nasty, ""), engine=spec.engine.evolve(image=image))
    try:
        argv, env = json.loads((await output(harness, spec))[0])
    finally:
        await harness.host.stop(spec.name, 0)
        harness.docker.remove_image(image, force=True)
    assert argv == [nasty, ""]
    for usual in ("PATH", "HOSTNAME", "HOME", "LC_CTYPE"):
        env.pop(usual, None)
    assert env == {"A": "1 2", "B": "", "OF_THE_IMAGE": "1"}


async def test_each_start_gets_a_key_of_its_own(harness: DockerHarness) -> None:
    spec = program(
        harness,
        "import os, time; print(os.environ['THE_KEY'], flush=True); time.sleep(600)",
        key_env="THE_KEY",
    )
    instance = await harness.host.start(spec)
    async with aclosing(harness.host.follow(spec.name)) as lines:
        assert await anext(lines) == (instance.key or Secret("")).reveal_bytes()
    assert await find(harness.restart(), spec.name) == instance
    assert instance.key
    assert instance.key.reveal() not in repr(instance)
    await harness.host.stop(spec.name, 0)
    second_instance = await harness.host.start(spec)
    assert second_instance.key not in (None, instance.key)


async def test_a_named_volume_is_mounted_read_only(harness: DockerHarness) -> None:
    volume = f"{harness.instance}-volume"
    script = (
        "import os\ntry: open('/models/x', 'w')\nexcept OSError as error: print(error.strerror)"
    )
    try:
        spec = program(harness, script, mounts=(Mount(source=volume, target="/models"),))
        assert await output(harness, spec) == ["Read-only file system"]
        await harness.host.stop(spec.name, 0)
        assert harness.docker.inspect_volume(volume)["Name"] == volume, (
            "stop removes anonymous volumes only"
        )
    finally:
        harness.docker.remove_volume(volume, force=True)


async def test_names_that_docker_refuses_can_be_used(harness: DockerHarness) -> None:
    names = [f"{harness.instance}/a", f"{harness.instance}-a"]
    instances = [await harness.host.start(harness.make_spec(name)) for name in names]
    assert [instance.name for instance in instances] == names
    assert sorted(instance.name for instance in await harness.host.list()) == sorted(names)
    await harness.host.stop(names[0], 0)
    assert [instance.name for instance in await harness.host.list()] == names[1:]


# --- the network ---


async def test_engines_started_together_share_one_network_made_on_the_way(
    harness: DockerHarness,
) -> None:
    names = [f"{harness.instance}-{number}" for number in range(4)]
    await asyncio.gather(*(harness.host.start(harness.make_spec(name)) for name in names))
    networks = [
        network for network in harness.docker.networks() if network["Name"] == harness.network
    ]
    assert [(network["Internal"], network["Driver"]) for network in networks] == [(True, "bridge")]


async def test_a_network_with_a_way_out_is_refused_and_left_alone(harness: DockerHarness) -> None:
    network = harness.docker.create_network(harness.network, "bridge")
    with pytest.raises(HostError, match="not an internal bridge") as error:
        await harness.host.start(harness.make_spec(f"{harness.instance}-a"))
    assert "FITSERVE_DOCKER_NETWORK" in error.value.hint
    assert containers(harness) == []
    assert harness.docker.inspect_network(harness.network)["Id"] == network["Id"]


async def test_an_engine_is_reached_only_from_its_own_network(harness: DockerHarness) -> None:
    """Its API has no key. Nothing is published on this machine, and a container elsewhere finds no
    way to it."""
    spec = harness.make_spec(f"{harness.instance}-a")
    instance = await harness.host.start(spec)
    await answering(instance)
    assert harness.inspect(spec.name)["HostConfig"]["PortBindings"] in (None, {})
    at = urlsplit(instance.url or "")
    assert at.hostname
    script = (
        f"import socket; socket.create_connection(({at.hostname!r}, {at.port}), 5);"
        " print('reached')"
    )
    for network, reply in ((harness.network, b"reached"), ("bridge", b"")):
        container = harness.docker.create_container(
            BASE_IMAGE,
            ["python3", "-c", script],
            host_config=harness.docker.create_host_config(network_mode=network),
        )
        harness.strangers.append(container["Id"])
        harness.docker.start(container["Id"])
        assert (harness.docker.wait(container["Id"])["StatusCode"] == 0) == bool(reply)
        assert harness.docker.logs(container["Id"], stderr=False).strip() == reply


async def test_an_internal_network_of_somebody_else_is_used(harness: DockerHarness) -> None:
    harness.docker.create_network(harness.network, "bridge", internal=True)
    await answering(await harness.host.start(harness.make_spec(f"{harness.instance}-a")))


# --- start, interrupted and refused ---


async def test_a_container_that_never_started_is_listed_and_start_goes_on_from_it(
    harness: DockerHarness,
) -> None:
    spec = harness.make_spec(f"{harness.instance}-a")
    await harness.host.start(spec)
    await harness.host.stop(spec.name, 0)
    harness.docker.create_container(
        BASE_IMAGE,
        [*spec.argv],
        name=container_name(spec.name, harness.instance),
        labels={
            "fitserve.instance": harness.instance,
            "fitserve.name": spec.name,
            "fitserve.model": "m",
            "fitserve.attempt": "1",
            "fitserve.fingerprint": "f1",
            "fitserve.port": "8000",
        },
        host_config=harness.docker.create_host_config(
            network_mode=harness.network, binds=[f"{m.source}:{m.target}:ro" for m in spec.mounts]
        ),
    )
    before = harness.inspect(spec.name)["Id"]
    instance = await find(harness.host, spec.name)
    assert instance is not None
    assert (instance.state, instance.exit_code, instance.url) == ("created", None, None)
    await answering(await harness.host.start(spec))
    assert harness.inspect(spec.name)["Id"] == before
    await harness.host.stop(spec.name, 1)
    assert containers(harness) == []


@pytest.mark.parametrize("requests", range(1, 10))
async def test_a_start_that_breaks_after_any_request_is_finished_by_the_next(
    harness: DockerHarness, wire: Wire, requests: int
) -> None:
    spec = harness.make_spec(f"{harness.instance}-a")
    wire.break_after(requests)
    with suppress(HostError):
        await harness.restart(wire.url).start(spec)
    host = harness.restart()
    instance = await host.start(spec)
    await answering(instance)
    assert await host.list() == [instance]
    assert len(containers(harness)) == 1
    assert harness.members(spec.name) == 1


async def test_another_fingerprint_is_a_conflict_even_when_the_engine_has_exited(
    harness: DockerHarness,
) -> None:
    name = f"{harness.instance}-a"
    await harness.host.start(harness.make_spec(name, script=["--exit-code", "3"]))
    before = await wait_for_exit(harness.host, name)
    with pytest.raises(Conflict):
        await harness.host.start(harness.make_spec(name, fingerprint="f2"))
    assert await harness.host.list() == [before]


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (
            {"engine": EngineRef(kind="e", version="1", image="fitserve-test-absent:1")},
            "fitserve-test-absent:1",
            "docker pull",
        ),
        (
            {"mounts": (Mount(source="/nonexistent/models", target="/models"),)},
            "/nonexistent/models",
            "FITSERVE_MODELS_SOURCE",
        ),
        (
            {"gpus": ("GPU-00000000-0000-0000-0000-000000000000",)},
            "could not start the engine of m",
            "",
        ),
    ],
    ids=["image", "folder", "gpu"],
)
async def test_a_start_that_docker_refuses_is_explained_and_leaves_nothing(
    harness: DockerHarness, change: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(HostError) as error:
        await harness.host.start(harness.make_spec(f"{harness.instance}-a").evolve(**change))
    assert message in error.value.message
    assert hint in error.value.hint
    assert error.value.hint
    assert containers(harness) == []
    assert not is_there("/nonexistent"), "Docker was not let make the folder"


async def test_gpus_without_the_nvidia_toolkit_are_explained(harness: DockerHarness) -> None:
    if "nvidia" in harness.docker.info()["Runtimes"]:
        pytest.skip("this Docker Engine has the NVIDIA runtime")
    with pytest.raises(HostError, match="could not select device driver") as error:
        await harness.host.start(
            harness.make_spec(f"{harness.instance}-a").evolve(gpus=("GPU-1", "GPU-2"))
        )
    assert "NVIDIA Container Toolkit" in error.value.hint


# --- whose is it ---


async def test_two_installations_on_one_docker_do_not_see_each_other(
    harness: DockerHarness,
) -> None:
    other_docker_host = DockerHost(harness.network, f"{harness.instance}-other")
    harness.hosts.append(other_docker_host)
    spec = harness.make_spec(f"{harness.instance}-a")
    instance = await harness.host.start(spec)
    assert await other_docker_host.list() == []
    # The same name is another container there: nothing of ours is found, stopped or in the way.
    await other_docker_host.stop(spec.name, 0)
    assert [line async for line in other_docker_host.follow(spec.name)] == []
    foreign_instance = await other_docker_host.start(spec)
    try:
        assert foreign_instance.url != instance.url
        assert await harness.host.list() == [instance]
    finally:
        await other_docker_host.stop(spec.name, 0)
    assert await harness.host.list() == [instance]


async def test_a_container_with_our_labels_by_inheritance_is_not_ours(
    harness: DockerHarness,
) -> None:
    spec = harness.make_spec(f"{harness.instance}-a")
    instance = await harness.host.start(spec)
    image = f"fitserve-{harness.instance}:committed"
    harness.docker.commit(container_name(spec.name, harness.instance), *image.split(":"))  # type: ignore[arg-type]
    try:
        copy = harness.docker.create_container(image, ["sleep", "60"], entrypoint=[])["Id"]
        labels = harness.docker.inspect_container(copy)["Config"]["Labels"]
        assert labels["fitserve.instance"] == harness.instance
        assert await harness.host.list() == [instance]
        await harness.host.stop(spec.name, 0)
        assert [container["Id"] for container in containers(harness)] == [copy]
        harness.docker.remove_container(copy)
    finally:
        harness.docker.remove_image(image, force=True)


# --- how an engine ends ---


async def test_an_engine_killed_for_memory_names_the_cause(harness: DockerHarness) -> None:
    spec = harness.make_spec(f"{harness.instance}-a")
    await answering(await harness.host.start(spec))
    harness.docker.update_container(
        container_name(spec.name, harness.instance),
        mem_limit=64 * 1024**2,
        memswap_limit=64 * 1024**2,
    )
    eater = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    execution = harness.docker.exec_create(
        container_name(spec.name, harness.instance), ["python3", "-c", eater]
    )
    await asyncio.to_thread(harness.docker.exec_start, execution["Id"])
    harness.kill_engine(spec.name)
    exit_state = await wait_for_exit(harness.host, spec.name)
    assert exit_state.is_oom_killed
    assert exit_state.exit_code == 137


async def test_an_engine_that_kills_itself_is_seen_as_killed(harness: DockerHarness) -> None:
    """As SGLang does when its scheduler has died. Linux drops the signal of a process 1 to itself,
    and the engine would end with 0."""
    end = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    spec = harness.make_spec(f"{harness.instance}-a").evolve(argv=("python3", "-c", end))
    await harness.host.start(spec)
    assert (await wait_for_exit(harness.host, spec.name)).exit_code == 137


async def test_a_paused_engine_counts_as_running_and_can_be_stopped(harness: DockerHarness) -> None:
    spec = harness.make_spec(f"{harness.instance}-a")
    instance = await harness.host.start(spec)
    await answering(instance)
    await pause(harness, spec.name)
    assert await harness.host.list() == [instance]
    await harness.host.stop(spec.name, 0.2)
    assert containers(harness) == []


async def test_two_concurrent_stops_act_as_one(harness: DockerHarness) -> None:
    spec = harness.make_spec(f"{harness.instance}-a")
    await answering(await harness.host.start(spec))
    await asyncio.gather(*(harness.host.stop(spec.name, 5) for _ in range(3)))
    assert containers(harness) == []


async def test_list_stays_right_while_engines_come_and_go(harness: DockerHarness) -> None:
    specs = [
        harness.make_spec(f"{harness.instance}-{number}", script=["--exit-code", "1"])
        for number in range(3)
    ]

    async def churn(spec: LaunchSpec) -> None:
        for _ in range(2):
            await harness.host.start(spec)
            await harness.host.stop(spec.name, 0)

    churning = asyncio.gather(*map(churn, specs))
    while not churning.done():
        assert {instance.name for instance in await harness.host.list()} <= {
            spec.name for spec in specs
        }
    await churning
    assert await harness.host.list() == []


# --- the log ---


def numbers(count: int, pause_s: float = 0) -> str:
    return (
        f"import time\nfor n in range({count}): print('line', n, '.' * 100, flush=True);"
        f" time.sleep({pause_s})"
    )


async def test_a_log_is_followed_across_broken_connections(
    harness: DockerHarness, wire: Wire
) -> None:
    count = 300
    spec = program(harness, numbers(count, 0.01))
    host = harness.restart(wire.url)
    await host.start(spec)
    lines = []
    async with asyncio.timeout(hang_s()):
        async for line in host.follow(spec.name):
            lines.append(line)
            if len(lines) in (20, 150):
                wire.cut_connections()
    assert [int(line.split()[1]) for line in lines] == list(range(count))


async def test_leaving_a_log_early_closes_the_connection(
    harness: DockerHarness, wire: Wire
) -> None:
    spec = harness.make_spec(f"{harness.instance}-a", script=["--print", "hello"])
    host = harness.restart(wire.url)
    await host.start(spec)

    async def read_on() -> None:
        async for _ in host.follow(spec.name):
            pass

    await host.list()
    before = len(wire.open)
    for _ in range(3):
        async with aclosing(host.follow(spec.name)) as lines:
            assert await anext(lines) == b"hello"
        reading = asyncio.create_task(read_on())
        await asyncio.sleep(0.1)
        reading.cancel()
        await asyncio.wait({reading})
    paths = [
        f"/containers/{harness.inspect(spec.name)['Id']}/json",
        f"/containers/{container_name(spec.name, harness.instance)}/json",
    ]

    async def is_closed() -> bool:
        # The SDK keeps one idle connection per address it asked.
        return len(wire.open) <= before + len(paths)

    await until("the connections are closed", is_closed)


async def test_a_flood_that_nobody_reads_is_not_taken_from_docker(
    harness: DockerHarness, wire: Wire
) -> None:
    count = 30_000
    spec = program(harness, numbers(count).replace(", flush=True", ""))
    host = harness.restart(wire.url)
    await host.start(spec)
    await wait_for_exit(harness.host, spec.name)
    async with aclosing(host.follow(spec.name)) as lines:
        assert (await anext(lines)).startswith(b"line 0 ")
        byte_count = -1

        async def stands_still() -> bool:
            nonlocal byte_count
            before, byte_count = byte_count, wire.answered_bytes
            return before == byte_count

        await until("nothing more is taken", stands_still)
        assert byte_count < 2 * 1024**2, "of 4 MB"
        async with asyncio.timeout(hang_s()):
            remaining_lines = [line async for line in lines]
    assert len(remaining_lines) == count - 1
    assert wire.answered_bytes > 4 * 1024**2


async def test_stdout_and_stderr_are_one_log(harness: DockerHarness) -> None:
    """In which order Docker reads the two is its own affair."""
    script = "import os; os.write(1, b'out\\n'); os.write(2, b'err\\n'); os.write(1, b'end')"
    assert sorted(await output(harness, program(harness, script))) == ["end", "err", "out"]


async def test_the_log_of_an_absent_name_is_empty(harness: DockerHarness) -> None:
    assert [line async for line in harness.host.follow(f"{harness.instance}-a")] == []


# --- images ---


async def test_prepare_pulls_a_missing_image_and_tells_how_far_it_is(
    harness: DockerHarness,
) -> None:
    reports: list[str] = []
    with Registry(harness.instance) as registry:

        def report(text: str) -> None:
            reports.append(text)
            if re.fullmatch(rf"pulling {registry.image}: \d+\.\d of \d+\.\d GiB", text):
                registry.hurry.set()

        engine = EngineRef(kind="e", version="1", image=registry.image)
        try:
            await harness.host.prepare(engine, report)
            assert registry.hurry.is_set()
            assert reports[0] == f"pulling {registry.image}"
            assert harness.docker.inspect_image(registry.image)["RepoTags"] == [  # type: ignore[no-untyped-call]
                f"{registry.image}:latest"
            ]
            reports.clear()
            await harness.host.prepare(engine, report)
            assert reports == []
        finally:
            harness.docker.remove_image(registry.image, force=True)


async def test_leaving_a_pull_ends_it(harness: DockerHarness) -> None:
    with Registry(harness.instance) as registry:
        event = asyncio.Event()
        engine = EngineRef(kind="e", version="1", image=registry.image)
        pulling = asyncio.create_task(
            harness.host.prepare(engine, lambda text: event.set() if " of " in text else None)
        )
        async with asyncio.timeout(hang_s()):
            await event.wait()
            pulling.cancel()
            await asyncio.wait({pulling})
        assert pulling.cancelled()
        with pytest.raises(NotFound):
            harness.docker.inspect_image(registry.image)  # type: ignore[no-untyped-call]


async def test_an_image_that_is_not_in_the_registry_is_explained(harness: DockerHarness) -> None:
    with Registry(harness.instance) as registry:
        engine = EngineRef(kind="e", version="1", image=f"{registry.image}:2")
        with pytest.raises(HostError) as error:
            await harness.host.prepare(engine, lambda text: None)
    assert error.value.message.startswith(
        f"The image {registry.image}:2 is not on this machine and could not be pulled: "
    )
    assert "manifest" in error.value.message
    assert f"docker pull {registry.image}:2" in error.value.hint


async def test_an_image_that_we_build_says_how(harness: DockerHarness) -> None:
    engine = EngineRef(kind="e", version="1", image="fitserve/absent:1")
    with pytest.raises(HostError, match="docker compose build engine-cpu"):
        await harness.host.prepare(engine, lambda text: None)


# --- a Docker that does not answer ---


async def test_a_docker_that_hangs_is_an_error_and_then_forgotten(
    harness: DockerHarness, wire: Wire
) -> None:
    spec = harness.make_spec(f"{harness.instance}-a")
    instance = await harness.host.start(spec)
    host = harness.restart(wire.url, timeout_s=0.5)

    async def answers() -> bool:
        # On a busy machine Docker too may take longer than this host waits.
        with suppress(HostError):
            return await host.list() == [instance]
        return False

    await until("it answers", answers)
    wire.hang()
    for call in (host.list(), host.stop(spec.name, 0)):
        with pytest.raises(
            HostError, match=r"Docker does not answer on .*: it does not reply in time"
        ) as silent:
            await call
        assert silent.value.hint
    assert not await asyncio.to_thread(is_available, wire.url)
    wire.flow()
    await until("it answers again", answers)


async def test_a_docker_that_hangs_from_the_start_is_an_error(
    harness: DockerHarness, wire: Wire
) -> None:
    wire.hang()
    with pytest.raises(HostError, match="it does not reply in time"):
        await harness.restart(wire.url, timeout_s=0.5).list()


async def test_connections_that_broke_while_idle_are_replaced(
    harness: DockerHarness, wire: Wire
) -> None:
    host = harness.restart(wire.url)
    spec = harness.make_spec(f"{harness.instance}-a")
    for _ in range(3):
        instance = await host.start(spec)
        wire.cut_connections()
        assert await host.list() == [instance]
        wire.cut_connections()
    await host.stop(spec.name, 1)
    assert await host.list() == []


async def test_a_call_that_breaks_under_way_is_made_again(
    harness: DockerHarness, wire: Wire
) -> None:
    host = harness.restart(wire.url)
    await host.list()
    wire.hang()
    listing = asyncio.create_task(host.list())
    await asyncio.wait_for(wire.held_back_event.wait(), hang_s())
    wire.cut_connections()
    wire.flow()
    assert await listing == []


async def test_a_docker_of_another_version_is_spoken_to_in_its_own(harness: DockerHarness) -> None:
    assert await harness.host.list() == []
    assert isinstance(harness.host, DockerHost)
    # Docker was replaced by one that does not know the version any more.
    for client in harness.host._docker._clients.values():
        client._version = "1.999"  # type: ignore[attr-defined]
    assert await harness.host.list() == []


@contextmanager
def silent_socket(path: Path, *, listening: bool) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        if listening:
            server.listen()
        yield


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Root may open every socket; be nobody for a while."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def no_socket(path: Path) -> None:
    """Nothing is there."""


def left_over_socket(path: Path) -> None:
    with silent_socket(path, listening=False):
        pass


@pytest.mark.parametrize(
    ("arrange", "message", "hint"),
    [
        (no_socket, "there is no socket", "FITSERVE_HOST_KIND=process"),
        (left_over_socket, "nothing listens on", "systemctl start docker"),
    ],
)
async def test_a_missing_docker_is_explained(
    tmp_path: Path, arrange: Callable[[Path], None], message: str, hint: str
) -> None:
    path = tmp_path / "docker.sock"
    arrange(path)
    assert not is_available(f"unix://{path}")
    host = DockerHost("net", "me", f"unix://{path}")
    try:
        with pytest.raises(HostError) as absent:
            await host.list()
    finally:
        await host.close()
    assert message in absent.value.message
    assert str(path) in absent.value.message
    assert hint in absent.value.hint


async def test_a_socket_that_the_user_may_not_use_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    host = DockerHost("net", "me", f"unix://{path}")
    with pytest.raises(HostError):
        await host.list()
    with silent_socket(path, listening=True):
        path.chmod(0)
        try:
            with (
                ordinary_user(),
                pytest.raises(HostError, match="may not use the socket") as error,
            ):
                await host.list()
        finally:
            await host.close()
    assert "DOCKER_GID" in error.value.hint


def test_whether_docker_is_there_is_known_without_the_sdk_and_without_an_answer(
    harness: DockerHarness, tmp_path: Path
) -> None:
    script = (
        "import sys; from gateway.hosts.docker.host import is_available;"
        " assert any(is_available() for _ in range(20));"
        " assert not {'docker', 'requests', 'httpx'} & set(sys.modules), sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    path = tmp_path / "docker.sock"
    with silent_socket(path, listening=True):
        assert not is_available(f"unix://{path}")


async def test_an_image_that_is_asked_gets_no_network_no_rights_and_no_files_of_ours(
    harness: DockerHarness,
) -> None:
    container = create_inquiry(harness.docker, BASE_IMAGE, harness.instance)
    try:
        container_details = harness.docker.inspect_container(container)
    finally:
        harness.docker.remove_container(container, force=True)
    limits = container_details["HostConfig"]
    assert (limits["NetworkMode"], limits["CapDrop"], limits["CapAdd"]) == ("none", ["ALL"], None)
    assert limits["SecurityOpt"] == ["no-new-privileges"]
    assert not limits["Privileged"]
    assert limits["ReadonlyRootfs"]
    assert [(mount["Type"], mount["Destination"]) for mount in container_details["Mounts"]] == [
        ("tmpfs", "/tmp")
    ]
    assert not limits["DeviceRequests"]
    assert limits["Memory"] == limits["MemorySwap"] == script.MAX_MEMORY
    assert limits["PidsLimit"] > 0
    # Its output is not kept on the disk.
    assert limits["LogConfig"]["Type"] == "none"


async def test_a_measuring_container_gets_only_the_named_gpus(
    harness: DockerHarness,
) -> None:
    container = create_inquiry(harness.docker, BASE_IMAGE, harness.instance, ("GPU-1", "GPU-2"))
    try:
        container_details = harness.docker.inspect_container(container)
    finally:
        harness.docker.remove_container(container, force=True)
    limits = container_details["HostConfig"]
    assert [request["DeviceIDs"] for request in limits["DeviceRequests"]] == [["GPU-1", "GPU-2"]]
    assert (limits["NetworkMode"], limits["CapDrop"], limits["ReadonlyRootfs"]) == (
        "none",
        ["ALL"],
        True,
    )
    assert "NVIDIA_VISIBLE_DEVICES=void" not in container_details["Config"]["Env"]
    if "nvidia" not in harness.docker.info()["Runtimes"]:
        engine = EngineRef(kind="vllm", version="1", image=BASE_IMAGE)
        with pytest.raises(HostError, match="could not select device driver"):
            async with aclosing(harness.host.run_inquiry(engine, b"{}", ("GPU-1",))) as lines:
                assert [line async for line in lines] == []


async def test_an_image_without_the_engine_is_reported_and_leaves_nothing(
    harness: DockerHarness,
) -> None:
    engine = EngineRef(kind="vllm-cpu", version="1", image=BASE_IMAGE)
    question = document("vllm-cpu", None, has_version=True)
    with pytest.raises(HostError, match="No module named 'vllm'"):
        async with aclosing(harness.host.run_inquiry(engine, question)) as lines:
            assert [line async for line in lines] == []
    label = {"label": f"fitserve.inquiry={harness.instance}"}
    assert harness.docker.containers(all=True, filters=label) == []
    assert await harness.host.identity(engine) == harness.docker.inspect_image(BASE_IMAGE)["Id"]  # type: ignore[no-untyped-call]


async def test_an_image_that_is_not_pulled_cannot_be_asked(harness: DockerHarness) -> None:
    with pytest.raises(HostError, match="not on this machine yet"):
        await harness.host.identity(EngineRef(kind="vllm", version="1", image="fitserve/none:1"))


async def test_a_paused_container_has_only_stopped_processes_and_can_be_stopped(
    harness: DockerHarness,
) -> None:
    await answering(await harness.host.start(harness.make_spec("a1")))
    assert any(
        "fake_engine.py" in process.command and process.cpu_s >= 0
        for process in await harness.host.processes("a1")
    )
    await pause(harness, "a1")
    processes = await harness.host.processes("a1")
    assert processes
    assert all(each_process.is_stopped for each_process in processes)
    await harness.host.stop("a1", 0.1)
    assert await harness.host.list() == []


async def test_the_cache_of_an_image_is_kept_for_it_and_for_starts_that_may_share_it(
    harness: DockerHarness,
) -> None:
    script = (
        "import os, sys; print(sorted(os.listdir(os.environ['KERNELS'])));"
        " open(os.environ['KERNELS'] + '/kernel', 'w')"
    )
    caches = {"caches": {"KERNELS": "kernels"}}
    preparation = "import os; os.makedirs(os.environ['KERNELS'], exist_ok=True)"

    async def run(cache: str) -> list[str]:
        spec = program(harness, f"{preparation}; {script}", cache=cache, **caches)
        lines = await output(harness, spec)
        await harness.host.stop(spec.name, 0)
        return lines

    try:
        assert [await run("a" * 16), await run("a" * 16), await run("b" * 16)] == [
            ["[]"],
            ["['kernel']"],
            ["[]"],
        ]
        assert len(volume_names(harness)) == 2
        engine = program(harness, script).engine
        for cache, is_empty in (("a" * 16, False), ("c" * 16, True), ("", True)):
            start_conditions = StartConditions(origin="container", is_cache_empty=is_empty)
            assert await harness.host.conditions(engine, cache) == start_conditions
    finally:
        remove_volumes(harness)


@pytest.mark.parametrize("user", ["65532:65532", "nobody", "nobody:nogroup"])
async def test_an_image_without_root_keeps_its_compiled_kernels(
    harness: DockerHarness, user: str
) -> None:
    image = f"{harness.instance}:other-user"
    container = harness.docker.create_container(BASE_IMAGE, ["true"])["Id"]
    harness.docker.commit(container, harness.instance, "other-user", changes=[f"USER {user}"])
    harness.docker.remove_container(container)
    script = (
        "import os; at = os.environ['KERNELS']; print(os.getuid() > 0, os.listdir(at)); open(at +"
        " '/kernel', 'w')"
    )
    spec = program(harness, script, cache="a" * 16, caches={"KERNELS": "kernels"})
    spec = spec.evolve(engine=spec.engine.evolve(image=image), scratch=("/tmp",))
    try:
        for line in ("True []", "True ['kernel']"):
            assert await output(harness, spec) == [line]
            await harness.host.stop(spec.name, 0)
    finally:
        await harness.host.stop(spec.name, 0)
        remove_volumes(harness)
        harness.docker.remove_image(image)


async def test_engines_with_one_cache_have_one_key(harness: DockerHarness) -> None:
    """An engine that names its compiled graphs by its key finds them again."""
    script = "import os; print(os.environ['THE_KEY'])"
    spec = program(harness, script, caches={"KERNELS": "kernels"}, key_env="THE_KEY")
    keys = []
    try:
        for cache in ("a" * 16, "a" * 16, "b" * 16, "", ""):
            keys += await output(harness, spec.evolve(cache=cache))
            await harness.host.stop(spec.name, 0)
    finally:
        await harness.host.stop(spec.name, 0)
        remove_volumes(harness)
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


@pytest.mark.parametrize("sizes", ["told", "not told"])
async def test_the_oldest_cache_that_nothing_uses_makes_room_for_a_new_one(
    harness: DockerHarness, monkeypatch: pytest.MonkeyPatch, sizes: str
) -> None:
    """By its bytes where Docker tells them, else by their number."""
    if sizes == "told":
        monkeypatch.setattr("gateway.hosts.docker.cache_volumes.MAX_BYTES", 999)
    else:
        monkeypatch.setattr("gateway.hosts.docker.cache_volumes._volume_sizes", lambda _: {})
        monkeypatch.setattr("gateway.hosts.docker.cache_volumes.MAX_UNMEASURED_VOLUMES", 1)
    compiler_script = "import os; open(os.environ['KERNELS'] + '/kernel', 'w').write('x' * 1000)"
    spec = program(harness, compiler_script, caches={"KERNELS": "kernels"})

    try:
        await output(harness, spec.evolve(cache="a" * 16))
        await harness.host.stop(spec.name, 0)
        (first,) = volume_names(harness)
        await output(harness, spec.evolve(cache="b" * 16))
        (second,) = volume_names(harness)
        assert first != second
    finally:
        await harness.host.stop(spec.name, 0)
        remove_volumes(harness)
