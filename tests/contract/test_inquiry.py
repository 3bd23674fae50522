"""Faults of an image or environment instead of an answer: both hosts tell it in a line, within
their limits, and leave nothing behind.

Each plays an engine: its `python3` is a script, or the real one with a package `vllm` of ours.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Protocol

import pytest
from docker.errors import APIError

from gateway.domain import EngineRef, Question
from gateway.engines.inquiry import script
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import AskedHost, Inquirer
from gateway.engines.inquiry.inquiry_document import ModelFiles, document
from gateway.errors import HostError
from gateway.hosts.docker.host import DockerHost
from gateway.hosts.docker.inquiry import remove_lost_inquiries
from gateway.hosts.process.host import ProcessHost
from gateway.machine.environment import COMPLETE
from tests.contract.agent_harness import ENGINE, AgentHarness, agent_harness
from tests.contract.docker_harness import BASE_IMAGE, DockerHarness, docker_harness
from tests.contract.harness import until
from tests.contract.process_harness import living_in
from tests.support.inquired_images import archive, containers
from tests.support.paths import ROOT
from tests.support.patience import HANG_S

ASKED = document("vllm", None, has_version=True)
MODEL = ModelFiles(b"{}")
PACKAGE = "vllm/__init__.py"


def image(
    harness: DockerHarness,
    program: str | None = None,
    package: str | None = None,
    changes: Iterable[str] = (),
) -> str:
    """The base image, with this `python3` or this package `vllm`; with neither, an image without
    Python."""
    docker = harness.docker
    if program is None and package is None:
        image_id = docker.import_image_from_data(
            archive({"nothing": ""}), repository=f"fitserve-{harness.instance}", tag="empty"
        )
        return str(json.loads(image_id)["status"])
    container = docker.create_container(BASE_IMAGE, ["true"])["Id"]
    files = (
        {"usr/local/bin/python3": program}
        if program is not None
        else {f"usr/lib/python3/dist-packages/{PACKAGE}": package or ""}
    )
    docker.put_archive(container, "/", archive(files))
    image_id = docker.commit(container, changes=[*changes])
    docker.remove_container(container)
    return str(image_id["Id"])


class InquiryHost(Protocol):
    """A host whose engine `ref` can be made of anything."""

    host: AskedHost
    ref: EngineRef
    data: Path

    def play(self, program: str | None = None, package: str | None = None) -> None: ...

    def has_remains(self) -> bool:
        """Whether anything of an inquiry is still there: a process, a container, a file."""
        ...

    async def cleanup(self) -> None: ...


class AskedContainer:
    def __init__(self, data: Path) -> None:
        self.data = data
        self.harness = docker_harness()
        self.host: AskedHost = DockerHost(
            self.harness.network, self.harness.instance, timeout_s=HANG_S
        )
        self.ref = EngineRef(kind="vllm", version="1", image=None)

    def play(self, program: str | None = None, package: str | None = None) -> None:
        self.ref = self.ref.evolve(image=image(self.harness, program, package))

    def has_remains(self) -> bool:
        return bool(containers(self.harness))

    async def cleanup(self) -> None:
        remove_lost_inquiries(self.harness.docker, self.harness.instance, 0)
        if self.ref.image:
            with suppress(APIError):
                self.harness.docker.remove_image(self.ref.image, force=True)
        await self.harness.cleanup()


class AskedEnvironment:
    def __init__(self, folder: Path) -> None:
        self.data = folder
        self.host: AskedHost = ProcessHost(folder)
        self.ref = EngineRef(kind="vllm", version="1", image=None)
        self.python = folder / "engines/vllm-1/bin/python"
        self.python.parent.mkdir(parents=True)
        (self.python.parent.parent / COMPLETE).touch()

    def play(self, program: str | None = None, package: str | None = None) -> None:
        if package is not None:
            place = self.python.parent / PACKAGE
            place.parent.mkdir()
            place.write_text(package)
            program = f'#!/bin/sh\nPYTHONPATH={self.python.parent} exec {sys.executable} "$@"\n'
        if program is not None:
            self.python.write_text(program)
            self.python.chmod(0o755)

    def has_remains(self) -> bool:
        asking = self.data / "asking"
        places = [*asking.iterdir()] if asking.is_dir() else []
        return any(living_in(place) for place in places)

    async def cleanup(self) -> None:
        """Nothing."""


@pytest.fixture(
    params=[pytest.param(AskedContainer, marks=pytest.mark.docker), AskedEnvironment],
    ids=["docker", "process"],
)
async def engine_question(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path: Path
) -> AsyncIterator[InquiryHost]:
    question: InquiryHost = request.param(tmp_path)
    try:
        yield question
    finally:
        await question.cleanup()


async def answer(engine_question: InquiryHost, folder: Path, limit_s: float = HANG_S) -> object:
    questions = [
        Question(engine=str(engine_question.ref), capability=None, argv=(f"--seed={number}",))
        for number in range(2)
    ]
    return await Inquirer(engine_question.host, AnswerCache(folder / "answers")).answers(
        engine_question.ref, None, MODEL, questions, limit_s
    )


pytestmark = pytest.mark.anyio

PLAYED: dict[str, tuple[dict[str, str | None], str]] = {
    "no Python": ({}, "it has no python3|could not be started: No such file"),
    "another kind": (
        {"program": None, "package": "raise ModuleNotFoundError(\"No module named 'vllm'\")"},
        "No module named 'vllm'",
    ),
    "broken": (
        {"package": "raise ImportError('libcuda.so.1: cannot open')"},
        r"exit code 1\): ImportError: libcuda.so.1: cannot",
    ),
    "exit code": (
        {"program": "#!/bin/sh\necho broken >&2; exit 3\n"},
        r"exit code 3\): broken\. .*plans by its own rules",
    ),
    "silence": ({"program": "#!/bin/sh\nexit 4\n"}, r"exit code 4\): it printed nothing"),
    "garbage": ({"program": "#!/bin/sh\necho Hello\n"}, "unusable answer: a line that is not JSON"),
    "not asked": (
        {"program": '#!/bin/sh\necho \'{"question": 7, "refused": "no"}\'\n'},
        "not asked",
    ),
    "endless line": (
        {"program": "#!/bin/sh\nhead -c 20000000 /dev/zero | tr '\\0' x\n"},
        "a line without an end",
    ),
    "flood of lines": ({"program": "#!/bin/sh\nyes '{}'\n"}, "lines have no end"),
    "flood of errors": (
        {"program": "#!/bin/sh\nyes very-long-words-of-an-error >&2\n"},
        "answer is too long",
    ),
}


@pytest.mark.parametrize("played", PLAYED)
async def test_a_program_in_place_of_the_engine_is_reported_in_a_line(
    engine_question: InquiryHost, played: str, tmp_path: Path
) -> None:
    part, words = PLAYED[played]
    engine_question.play(**part)
    with pytest.raises(HostError, match=words):
        await answer(engine_question, tmp_path)
    assert not engine_question.has_remains()


async def test_a_hanging_package_costs_the_limit(
    engine_question: InquiryHost, tmp_path: Path
) -> None:
    engine_question.play(package="import time; time.sleep(1000)")
    assert await answer(engine_question, tmp_path, 1.0) == {}
    assert not engine_question.has_remains()


async def test_answers_before_a_failure_are_kept(
    engine_question: InquiryHost, tmp_path: Path
) -> None:
    engine_question.play(
        '#!/bin/sh\necho \'{"question": 0, "refused": "ValueError: no"}\'\nexit 9\n'
    )
    answers = await answer(engine_question, tmp_path)
    assert isinstance(answers, dict)
    assert [answer_row.refusal_text for answer_row in answers.values()] == ["ValueError: no"]


async def test_the_memory_of_an_inquiry_is_bounded(
    engine_question: InquiryHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process by its reserved memory, a container by its used memory: there the real limit would
    take gigabytes of this machine."""
    monkeypatch.setattr(script, "MAX_MEMORY", 256 << 20)
    container = isinstance(engine_question, AskedContainer)
    engine_question.play(package="b'x' * (1 << 30)" if container else f"bytearray({32 << 30})")
    with pytest.raises(
        HostError, match="it was killed. It wanted more than" if container else "MemoryError"
    ):
        await answer(engine_question, tmp_path)
    assert not engine_question.has_remains()


ASK = """
import asyncio, sys
from contextlib import aclosing
from pathlib import Path
from gateway.domain import EngineRef
from gateway.hosts.docker.host import DockerHost
from gateway.hosts.process.host import ProcessHost
from gateway.engines.inquiry.inquiry_document import document
async def main(kind, where, image):
    host = DockerHost("none", where) if kind == "docker" else ProcessHost(Path(where))
    engine = EngineRef(kind="vllm", version="1", image=image or None)
    question = document("vllm", None, has_version=True)
    async with aclosing(host.run_inquiry(engine, question)) as lines:
        async for line in lines:
            print(line, flush=True)
asyncio.run(main(*sys.argv[1:]))
"""


def ask_until_kill(engine_question: InquiryHost) -> None:
    """A gateway that is killed while it asks."""
    arguments = (
        ["docker", engine_question.harness.instance]
        if isinstance(engine_question, AskedContainer)
        else ["process", str(engine_question.data)]
    )
    with subprocess.Popen(
        [sys.executable, "-c", ASK, *arguments, engine_question.ref.image or ""],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    ) as asking:
        try:
            assert asking.stdout is not None
            assert asking.stdout.readline()  # the engine's code runs
        finally:
            asking.send_signal(signal.SIGKILL)


# Standard output is kept elsewhere by the inquiry, since engines print: the pipe behind the three
# usual ones.
SPEAK = """
import os, stat, subprocess, time
subprocess.Popen(["sleep", "1000"])
files = map(int, sorted(os.listdir("/proc/self/fd")))
pipe = next(fd for fd in files if fd > 2 and stat.S_ISFIFO(os.stat(fd).st_mode))
os.write(pipe, b"{}\\n")
time.sleep(1000)
"""


async def test_an_asker_that_is_killed_leaves_no_inquiry(engine_question: InquiryHost) -> None:
    """A helper process of the engine's goes too."""
    engine_question.play(package=SPEAK)
    await asyncio.to_thread(ask_until_kill, engine_question)

    async def is_gone() -> bool:
        return not engine_question.has_remains()

    await until("nothing of the inquiry is left", is_gone)


@pytest.fixture
async def docker(anyio_backend: str, tmp_path: Path) -> AsyncIterator[AskedContainer]:
    container = AskedContainer(tmp_path)
    try:
        yield container
    finally:
        await container.cleanup()


@pytest.mark.docker
async def test_an_inquiry_that_ignores_its_end_is_removed_later(
    docker: AskedContainer,
) -> None:
    docker.play("#!/bin/sh\necho '{}'\nexec sleep 1000\n")
    await asyncio.to_thread(ask_until_kill, docker)
    (container,) = containers(docker.harness)
    remove_lost_inquiries(docker.harness.docker, docker.harness.instance)
    assert containers(docker.harness) == [container]  # it could be another's that is being asked
    remove_lost_inquiries(docker.harness.docker, docker.harness.instance, 0)
    assert containers(docker.harness) == []


HOSTILE = r"""#!/usr/bin/python3
import json, os, socket
def tried(act):
    try:
        act()
    except OSError as error:
        return error.strerror
    return "done"
def written(folder):
    return tried(lambda: open(folder + "/x", "w").close())
def reached(address):
    return tried(lambda: socket.create_connection(address, 1))
lines = [line.rstrip("\n") for line in open("/proc/self/status") if ":\t" in line]
status = dict(line.split(":\t", 1) for line in lines)
folders = ("/", "/etc", "/usr/lib", "/root", "/declared", "/tmp")
disks = ("sd", "nvme", "vd", "nvidia", "mem", "kmsg")
print(json.dumps({
    "caps": [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "privileges": status["NoNewPrivs"],
    "interfaces": os.listdir("/sys/class/net"),
    "reached": [reached(("1.1.1.1", 53)), reached(("172.17.0.1", 22))],
    "written": {folder: written(folder) for folder in folders},
    "mounts": [line.split()[2] for line in open("/proc/mounts")],
    "disks": [name for name in os.listdir("/dev") if name.startswith(disks)],
    "processes": [name for name in os.listdir("/proc") if name.isdigit()],
    "env": dict(os.environ),
}))
"""


@pytest.mark.docker
async def test_a_hostile_image_reads_nothing_of_this_machine(
    docker: AskedContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that it declares as a volume is its own memory, too: Docker would make one on the
    disk."""
    monkeypatch.setenv("FITSERVE_ADMIN_KEY", "a-very-secret-key")
    docker.ref = docker.ref.evolve(
        image=image(docker.harness, HOSTILE, changes=["VOLUME /declared"])
    )
    volumes = docker.harness.docker.volumes()["Volumes"] or []
    async with aclosing(docker.host.run_inquiry(docker.ref, ASKED)) as lines:
        (reading,) = [json.loads(line) async for line in lines]
    assert reading["caps"] == [0] * 5
    assert reading["privileges"] == "1"
    assert reading["interfaces"] == ["lo"]
    assert reading["reached"] == ["Network is unreachable"] * 2
    assert {folder: words for folder, words in reading["written"].items() if words == "done"} == {
        "/declared": "done",
        "/tmp": "done",
    }
    # Files that Docker itself puts there from the disk of this machine: names of the container,
    # which is nobody's.
    assert reading["mounts"].count("overlay") <= 1
    assert set(reading["mounts"]) <= {
        "overlay",
        "proc",
        "tmpfs",
        "devpts",
        "sysfs",
        "mqueue",
        "cgroup",
        "cgroup2",
        "ext4",
        "xfs",
        "btrfs",
    }
    assert reading["disks"] == []
    assert reading["processes"] == ["1"]
    assert "secret" not in str(reading["env"])
    assert len(docker.harness.docker.volumes()["Volumes"] or []) == len(volumes)
    assert containers(docker.harness) == []


@pytest.mark.docker
async def test_a_gateway_that_leaves_its_agent_leaves_no_inquiry(
    anyio_backend: str, tmp_path: Path
) -> None:
    """And an agent that is killed leaves none either."""
    harness: AgentHarness = agent_harness(tmp_path)
    other_engine = ENGINE.evolve(
        kind="vllm", version="2", image=image(harness, package="import time; time.sleep(1000)")
    )
    try:
        harness.kill_agent(signal.SIGTERM)
        place = (
            tmp_path / "profiles" / "engines" / other_engine.kind / f"{other_engine.version}.yaml"
        )
        place.parent.mkdir()
        place.write_text(other_engine.model_dump_json())
        harness.start_agent()
        ref = EngineRef(
            kind=other_engine.kind, version=other_engine.version, image=other_engine.image
        )
        question = Question(engine=str(ref), capability=None, argv=())
        inquirer = Inquirer(harness.host, AnswerCache(tmp_path / "answers"))

        async def is_gone() -> bool:
            return not containers(harness)

        async def container_exists() -> bool:
            filters = {"label": f"fitserve.inquiry={harness.instance}", "status": "running"}
            return bool(harness.docker.containers(filters=filters))

        asking = asyncio.create_task(inquirer.answers(ref, None, MODEL, [question], HANG_S))
        await until("the container runs", container_exists)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until("the container is gone, for the gateway left", is_gone)
        asking = asyncio.create_task(inquirer.answers(ref, None, MODEL, [question], HANG_S))
        await until("the container runs", container_exists)
        harness.kill_agent(signal.SIGKILL)
        with pytest.raises(HostError, match="agent does not answer"):
            await asking
        await until("the container is gone, for the agent was killed", is_gone)
    finally:
        await harness.cleanup()
        with suppress(APIError):
            harness.docker.remove_image(other_engine.image, force=True)
