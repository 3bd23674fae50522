"""The power of a compromised gateway at the agent's socket: start and stop engines as plans have
them, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.domain import EngineRef, LaunchSpec, Mount
from gateway.domain.units import GIB
from gateway.engines.inquiry.inquiry_document import document
from gateway.errors import AgentRefusal, HostError
from gateway.hosts.agent.calls import MAX_BYTES_OF_CALL
from gateway.hosts.docker.container import container_name
from tests.contract.agent_harness import ENGINE, AgentHarness, agent_harness
from tests.contract.docker_harness import BASE_IMAGE
from tests.contract.harness import answering, find, until
from tests.support.patience import HANG_S, hang_s

pytestmark = [pytest.mark.docker, pytest.mark.anyio]


@pytest.fixture
async def harness(anyio_backend: str, tmp_path: Path) -> AsyncIterator[AgentHarness]:
    new_agent_harness = agent_harness(tmp_path)
    try:
        yield new_agent_harness
    finally:
        await new_agent_harness.cleanup()


async def say(harness: AgentHarness, raw: bytes) -> list[dict[str, Any]]:
    """The agent's answer to these bytes, until it closes."""
    async with asyncio.timeout(hang_s()):
        reader, writer = await asyncio.open_unix_connection(harness.socket, limit=2**24)
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(raw)
                await writer.drain()
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
        finally:
            writer.transport.abort()
    return [json.loads(line) for line in answer.splitlines()]


async def ask(harness: AgentHarness, call: str, **fields: Any) -> dict[str, Any]:
    """The last answer to a call that is sent as it is, whatever the fields."""
    return (await say(harness, json.dumps({"call": call, **fields}).encode() + b"\n"))[-1]


def own_containers(harness: AgentHarness) -> list[dict[str, Any]]:
    containers = harness.docker.containers(
        all=True, filters={"label": f"fitserve.instance={harness.instance}"}
    )
    return [harness.docker.inspect_container(container["Id"]) for container in containers]


def within_policy(harness: AgentHarness, container: dict[str, Any]) -> None:
    """The container is an engine's as plans have them, whatever was asked for."""
    host, config = container["HostConfig"], container["Config"]
    assert config["Image"] == BASE_IMAGE
    assert [*config["Entrypoint"], *config["Cmd"]][: len(ENGINE.container_command)] == [
        *ENGINE.container_command
    ]
    assert not host["Privileged"]
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] in (None, [], ["SYS_NICE"], ["CAP_SYS_NICE"])
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert not host["Binds"]
    assert not host["Devices"]
    assert not host["VolumesFrom"]
    assert not host["PortBindings"]
    assert host["NetworkMode"] == harness.network
    assert (host["PidMode"], host["IpcMode"], host["UTSMode"], host["UsernsMode"]) == (
        "",
        "private",
        "",
        "",
    )
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["ReadonlyRootfs"]
    assert set(host["Tmpfs"]) == set(ENGINE.scratch or ())
    assert 0 < host["Memory"] <= harness.docker.info()["MemTotal"]
    assert 0 < host["PidsLimit"] <= 2**19
    assert not any("mknod" in str(rule) for rule in host["DeviceCgroupRules"] or [])
    mounts = [
        (mount["Type"], mount["Source"], mount["Destination"], mount["RW"])
        for mount in container["Mounts"]
    ]
    assert mounts in ([], [("bind", str(harness.models), "/models", False)])
    for request in host["DeviceRequests"] or []:
        assert all(uuid.startswith(("GPU-", "MIG-")) for uuid in request["DeviceIDs"])
        assert not request["Count"]


# --- the policy, from outside ---


async def test_an_engine_of_the_agent_is_confined(harness: AgentHarness) -> None:
    spec = harness.make_spec("a1")
    await answering(await harness.host.start(spec))
    within_policy(harness, harness.inspect("a1"))
    assert harness.inspect("a1")["HostConfig"]["Memory"] == GIB
    assert harness.inspect("a1")["HostConfig"]["PidsLimit"] == 1000


ROOT = {"source": "/", "target": "/models", "read_only": True}
ATTACKS: dict[str, dict[str, Any]] = {
    "mount the root": {"mounts": [ROOT]},
    "mount the root elsewhere": {"mounts": [{**ROOT, "target": "/host"}]},
    "mount Docker's socket": {"mounts": [{"source": "/var/run/docker.sock", "target": "/models"}]},
    "mount a volume": {"mounts": [{"source": "fitserve-data", "target": "/models"}]},
    "another image": {"engine": {"kind": "fake", "version": "1", "image": "debian:latest"}},
    "the id of an image": {
        "engine": {"kind": "fake", "version": "1", "image": "sha256:" + "1" * 64}
    },
    "the digest of another image": {
        "engine": {
            "kind": "fake",
            "version": "1",
            "image": BASE_IMAGE,
            "digest": "sha256:" + "1" * 64,
        }
    },
    "no image": {"engine": {"kind": "fake", "version": "1"}},
    "an engine without a profile": {
        "engine": {"kind": "../fake", "version": "1", "image": BASE_IMAGE}
    },
    "another program": {"argv": ["sh", "-c", "id"]},
    "no program": {"argv": []},
    "a flag of the gateway's": {"flag": "--middleware=os.system"},
    "an unknown flag": {"flag": "--privileged"},
    "a program's argument": {"flag": "-c"},
    "a value of another type": {"flag": "--embed-dim=all"},
    "weights elsewhere": {"flag": "--model=/proc/1/root"},
    "a variable": {"env": {"LD_PRELOAD": "/models/x.so"}},
    "a variable with another value": {"env": {"A": "2"}},
    "all GPUs": {"gpus": ["all"]},
    "a device": {"gpus": ["/dev/mem"]},
    "a device by its kind": {"gpus": ["vendor.com/device=all"]},
    "a GPU and more": {"gpus": ["GPU-00000000-0000-0000-0000-000000000000,/dev/mem"]},
    "the root to write to": {"scratch": None},
    "folders to write to": {"scratch": ["/tmp", "/proc"]},
    "no limit of memory": {"memory_bytes": None},
    "endless memory": {"memory_bytes": -1},
    "endless processes": {"pids": -1},
    "no processes at all": {"pids": 0},
    "much shared memory": {"shm_bytes": 2**60},
    "a port of the system": {"port": 22},
    "a name with a path": {"name": "../../etc"},
    "a name that is long": {"name": "a" * 300},
    "lines in a label": {"model": "m\nfitserve.instance=other"},
    "lines in a fingerprint": {"fingerprint": "f\n1"},
    "an attempt that is not a number": {"attempt": -1},
    **{
        f"a field of Docker's: {name}": {name: value}
        for name, value in {
            "privileged": True,
            "cap_add": ["SYS_ADMIN"],
            "network_mode": "host",
            "pid_mode": "host",
            "ipc_mode": "host",
            "devices": ["/dev/mem"],
            "user": "0:0",
            "security_opt": [],
            "HostConfig": {"Privileged": True},
        }.items()
    },
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_a_start_that_no_plan_asks_for_is_refused_and_logged(harness: AgentHarness) -> None:
    plain = harness.make_spec("a1").model_dump(mode="json")
    for attack, change in ATTACKS.items():
        flag = change.get("flag")
        spec = (
            {**plain, "argv": [*plain["argv"][:4], flag, *plain["argv"][4:]]}
            if flag
            else {**plain, **change}
        )
        answer = await ask(harness, "start", spec=spec)
        assert (answer["answer"], answer["error"]) == ("failed", "AgentRefusal"), attack
        assert answer["message"].startswith("The agent refuses: "), attack
        assert own_containers(harness) == [], attack
    assert harness.log.read_text().count('"refused"') == len(ATTACKS)
    reply = await ask(
        harness, "prepare", engine={"kind": "fake", "version": "1", "image": "somebody/else:1"}
    )
    assert reply["error"] == "AgentRefusal"


async def test_a_link_in_the_models_folder_leads_nowhere(harness: AgentHarness) -> None:
    """The gateway writes there. Nothing below that folder can be mounted, so a link there is read
    inside the container."""
    (harness.models / "link").symlink_to("/")
    plain = harness.make_spec("a1").model_dump(mode="json")
    for source in (harness.models / "link", harness.models / "..", f"{harness.models}/"):
        answer = await ask(
            harness,
            "start",
            spec={**plain, "mounts": [{"source": str(source), "target": "/models"}]},
        )
        assert answer["error"] == "AgentRefusal"
    assert own_containers(harness) == []


async def test_containers_of_others_are_not_seen_read_or_stopped(harness: AgentHarness) -> None:
    foreign_name = harness.foreign("theirs")
    foreign_container = harness.inspect("theirs")
    # A container of another installation, under a name of ours with its own.
    for name in (
        "theirs",
        foreign_container["Id"],
        foreign_container["Id"][:12],
        foreign_container["Name"],
        f"../{foreign_container['Id']}",
        f"{foreign_container['Id']}/json?",
    ):
        for call in ("stop", "follow"):
            fields = {"grace_s": 0} if call == "stop" else {}
            answers = await say(
                harness, json.dumps({"call": call, "name": name, **fields}).encode() + b"\n"
            )
            assert [answer for answer in answers if answer["answer"] == "line"] == []
    assert (await ask(harness, "list"))["instances"] == []
    assert (await ask(harness, "start", spec=harness.make_spec("theirs").model_dump(mode="json")))[
        "error"
    ] == "ForeignInstance"
    assert foreign_name()


def odd(value: Any) -> st.SearchStrategy[Any]:
    """Anything in the place of a field's value: of its own kind, and of others."""
    texts = st.sampled_from(
        [
            "",
            "/",
            "all",
            "host",
            "../..",
            "--privileged",
            "/var/run/docker.sock",
            BASE_IMAGE,
            "GPU-1",
        ]
    ) | st.text(max_size=20)
    numbers = st.integers(-(2**63), 2**63) | st.sampled_from([0, 1, 2**31, GIB])
    plain = st.none() | st.booleans() | numbers | texts
    if isinstance(value, list):
        return (
            st.lists(st.sampled_from(value) | texts if value else texts, max_size=len(value) + 2)
            | plain
        )
    if isinstance(value, dict):
        mutated_parts = {key: odd(part) | st.just(part) for key, part in value.items()}
        return (
            st.fixed_dictionaries(mutated_parts) | st.dictionaries(texts, texts, max_size=3) | plain
        )
    return plain


async def test_no_change_of_a_spec_makes_a_container_outside_the_policy(
    harness: AgentHarness,
) -> None:
    """All that Docker was brought to make is inspected, and the agent lives on."""
    plain = harness.make_spec("a1").model_dump(mode="json")
    mounts = [{"source": str(harness.models), "target": "/models", "read_only": True}]
    shapes = {**plain, "mounts": mounts}
    changes = st.one_of(*(st.tuples(st.just(name), odd(value)) for name, value in shapes.items()))
    mutations = st.lists(
        changes | st.tuples(st.text(max_size=12), odd({})), min_size=1, max_size=2
    ).map(dict)
    loop = asyncio.get_running_loop()
    count = 0

    @settings(
        max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(mutations)
    def start_mutation(mutation: dict[str, Any]) -> None:
        nonlocal count
        spec = {**shapes, **mutation}
        answer = asyncio.run_coroutine_threadsafe(ask(harness, "start", spec=spec), loop).result(
            HANG_S
        )
        for container in own_containers(harness):
            count += 1
            within_policy(harness, container)
            harness.docker.remove_container(container["Id"], force=True)
        assert answer["answer"] in ("done", "failed")

    await asyncio.to_thread(start_mutation)
    assert count
    assert harness.agent is not None
    assert harness.agent.poll() is None
    await answering(await harness.host.start(LaunchSpec.model_validate(plain)))


# --- bytes ---

HOSTILE = [
    b"",
    b"\n",
    b"\0" * 1000 + b"\n",
    b"GET / HTTP/1.1\r\nhost: docker\r\n\r\n",
    b"GET /containers/json HTTP/1.0\n\n",
    b'{"call": "list"',
    b'{"call": "list"}',
    b'{"call": "list"} {"call": "list"}\n',
    b'{"call": "list", "all": true}\n',
    b'{"call": "exec", "name": "a1"}\n',
    b'{"call": "stop", "name": "a1", "grace_s": NaN}\n',
    b'{"call": "stop", "name": "a1", "grace_s": 1e999}\n',
    b'{"call": "stop", "name": "", "grace_s": 0}\n',
    b'{"call": "follow", "name": "\\ud800"}\n',
    b'{"call": "follow", "name": 7}\n',
    b"[" * 100_000 + b"\n",
    b'{"call":' * 10_000 + b"\n",
    b"9" * 100_000 + b"\n",
    b"\xff\xfe" * 1000 + b"\n",
    b"x" * (MAX_BYTES_OF_CALL + 1),
    b"x" * (8 * 1024**2),
    b'{"call": "follow", "name": "' + b"a" * (MAX_BYTES_OF_CALL * 4) + b'"}\n',
]


async def test_hostile_bytes_are_refused_and_the_agent_goes_on(harness: AgentHarness) -> None:
    for raw in HOSTILE:
        closing = (
            asyncio.ensure_future(say(harness, raw))
            if raw.endswith(b"\n") or len(raw) > MAX_BYTES_OF_CALL
            else None
        )
        answers = await closing if closing is not None else []
        assert all(answer["answer"] in ("failed", "done") for answer in answers), raw[:80]
        if closing is None:
            # Half a message, and gone.
            _, writer = await asyncio.open_unix_connection(harness.socket)
            writer.write(raw)
            writer.transport.abort()
    assert await harness.host.list() == []
    assert "call broke" not in harness.log.read_text()


async def test_connections_that_say_nothing_keep_nobody_out_for_long(harness: AgentHarness) -> None:
    """More than the agent takes; those beyond are closed at once, and the others when their time
    for a line is over."""
    idle = [socket.socket(socket.AF_UNIX) for _ in range(600)]
    for connection in idle:
        connection.connect(str(harness.socket))
        # A caller that comes when all places are taken may be turned away before it says anything.
        with contextlib.suppress(BrokenPipeError):
            connection.send(b'{"call"')

    async def answers() -> bool:
        try:
            return await harness.host.list() == []
        except HostError:
            return False

    try:
        await until("it answers", answers)
    finally:
        for connection in idle:
            connection.close()
    await until("it answers", answers)
    assert "too many connections" in harness.log.read_text()


async def test_a_client_that_does_not_read_holds_up_nobody(harness: AgentHarness) -> None:
    await answering(await harness.host.start(harness.make_spec("a1", script=["--flood", "20000"])))
    deaf = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for client in deaf:
        client.connect(str(harness.socket))
        client.send(b'{"call": "follow", "name": "a1"}\n')
    try:
        assert [instance.name for instance in await harness.host.list()] == ["a1"]
        async with asyncio.timeout(hang_s()), aclosing(harness.host.follow("a1")) as lines:
            async for line in lines:
                if line == b"line 19999":
                    break
    finally:
        for client in deaf:
            client.close()
    await harness.host.stop("a1", 0)


async def test_only_the_user_of_the_agent_may_use_its_socket(harness: AgentHarness) -> None:
    assert harness.socket.stat().st_mode & 0o777 == 0o600
    if os.getuid():
        pytest.skip("only root can be somebody else")
    # The file lets everybody in: the agent asks Linux for the owner of the other end.
    for path in (harness.socket, *harness.socket.parents[:4]):
        path.chmod(0o777)
    child = os.fork()
    if not child:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as unix_socket:
            unix_socket.connect(str(harness.socket))
            with contextlib.suppress(OSError):
                unix_socket.send(b'{"call": "list"}\n')
            try:
                answer = unix_socket.recv(100)
            except OSError:
                answer = b""
        os._exit(7 if answer else 0)
    assert await asyncio.to_thread(os.waitpid, child, 0) == (child, 0)
    assert "a process of another user" in harness.log.read_text()
    assert struct.calcsize("3i") == 12


# --- agents that come and go ---


async def test_engines_and_logs_outlive_an_agent(harness: AgentHarness) -> None:
    instance = await harness.host.start(
        harness.make_spec("a1", script=["--print", "one", "--print", "two"])
    )
    await answering(instance)
    async with aclosing(harness.host.follow("a1")) as lines:
        async with asyncio.timeout(hang_s()):
            assert [await anext(lines), await anext(lines)] == [b"one", b"two"]
        harness.kill_agent()
        for _ in range(2):
            with pytest.raises(HostError, match="The agent does not answer") as error:
                await harness.host.list()
            assert "fitserve agent" in error.value.hint
        await answering(instance)
        harness.start_agent()
        assert await harness.host.list() == [instance]
        harness.kill_engine("a1")
        async with asyncio.timeout(hang_s()):
            remaining_lines = [line async for line in lines]
    assert b"one" not in remaining_lines
    assert (await find(harness.host, "a1") or instance).state == "exited"


async def test_a_stopped_agent_leaves_its_engines_running(harness: AgentHarness) -> None:
    instance = await harness.host.start(harness.make_spec("a1"))
    following = asyncio.ensure_future(anext(harness.host.follow("a1")))
    assert harness.kill_agent(signal.SIGTERM) == 0
    await answering(instance)
    harness.start_agent()
    assert await harness.host.list() == [instance]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_frozen_agent_is_reported_until_it_answers_again(
    harness: AgentHarness,
) -> None:
    assert harness.agent is not None
    host = harness.restart(timeout_s=0.5)
    harness.agent.send_signal(signal.SIGSTOP)
    with pytest.raises(HostError, match="it hangs"):
        await host.list()
    harness.agent.send_signal(signal.SIGCONT)

    async def answers() -> bool:
        with contextlib.suppress(HostError):
            return await host.list() == []
        return False

    await until("it answers again", answers)


async def test_a_second_agent_on_the_same_folder_is_refused(harness: AgentHarness) -> None:
    first, harness.agent = harness.agent, None
    with pytest.raises(AssertionError, match="Another agent uses the data folder"):
        await asyncio.to_thread(harness.start_agent)
    harness.agent = first
    assert await harness.host.list() == []


async def test_a_refusal_says_why_to_the_gateway(harness: AgentHarness) -> None:
    with pytest.raises(
        AgentRefusal, match=r"engines mount .* read-only, and nothing else"
    ) as error:
        await harness.host.start(
            harness.make_spec("a1").evolve(mounts=(Mount(source="/", target="/"),))
        )
    assert "FITSERVE_MODELS_SOURCE" in error.value.hint
    assert container_name("a1", harness.instance) not in str(own_containers(harness))


async def test_an_image_is_asked_only_by_the_agents_own_program(harness: AgentHarness) -> None:
    engine = EngineRef(kind=ENGINE.kind, version=ENGINE.version, image=ENGINE.image)
    assert await harness.host.identity(engine) == harness.docker.inspect_image(BASE_IMAGE)["Id"]  # type: ignore[no-untyped-call]
    with pytest.raises(HostError, match="could not be run"):
        async with aclosing(
            harness.host.run_inquiry(engine, document("fake", None, has_version=True))
        ) as lines:
            assert [line async for line in lines] == []
    with pytest.raises(AgentRefusal, match="'debian:latest' may not be started"):
        await harness.host.identity(engine.evolve(image="debian:latest"))
    for text in (
        "",
        "!",
        base64.b64encode(b"no zip").decode(),
        base64.b64encode(zlib.compress(bytes(2**28))).decode(),
    ):
        answer = await ask(harness, "inquire", engine=engine.model_dump(), asked=text)
        assert (answer["answer"], answer["error"]) == ("failed", "AgentRefusal"), text[:20]
    with pytest.raises(AgentRefusal, match="GPUs must be named by UUID"):
        async with aclosing(harness.host.run_inquiry(engine, b"{}", ("all",))) as lines:
            assert [line async for line in lines] == []
