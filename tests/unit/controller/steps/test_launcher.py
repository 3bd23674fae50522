"""gateway.controller.steps.launcher: the part of the host's disk that an engine's container
sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.controller.steps.launcher import Launcher
from gateway.domain import (
    Attempt,
    ChatTemplate,
    Flag,
    Instance,
    LaunchSpec,
    ModelRef,
    Mount,
    StartConditions,
)
from gateway.engines.common.trace_flags import ENDPOINT, LIBRARY
from gateway.errors import BadModel
from gateway.machine.environment import engine_dir
from gateway.settings import Settings
from tests.support.makers import attempt, engine

pytestmark = pytest.mark.anyio

COMMIT = "0123456789" * 4


class Docker:
    """Keeps the starts instead of making them."""

    kind = "docker"
    machines = None

    def __init__(self) -> None:
        self.started: list[LaunchSpec] = []

    async def prepare(self, *_: object) -> None: ...

    async def conditions(self, *_: object) -> StartConditions:
        return StartConditions(origin="container", is_cache_empty=True)

    async def start(self, spec: LaunchSpec) -> Instance:
        self.started.append(spec)
        return Instance(
            name=spec.name,
            model=spec.model,
            attempt=spec.attempt,
            fingerprint=spec.fingerprint,
            state="running",
            origin="container",
        )


async def at_once(_sizes: bool) -> None: ...


async def launch(launcher: Launcher, attempt: Attempt) -> None:
    files = await launcher.fetch_files(attempt.plan, lambda _: None, allow_remote_code=False)
    await launcher.launch(attempt, files, lambda _: None, at_once, allow_remote_code=False)


async def launch_mounts(tmp_path: Path, folder: Path) -> tuple[Mount, ...]:
    host: Any = Docker()

    async def download(*_: object, **__: object) -> Path:
        raise AssertionError("a folder is not downloaded")

    new_engine = engine()
    launcher = Launcher(Settings(data_dir=tmp_path / "data"), host, lambda _: new_engine, download)
    start: Attempt = attempt()
    model = ModelRef(source=str(folder), task="generate", vocab=1)
    await launch(launcher, start.evolve(plan=start.plan.evolve(model=model)))
    (spec,) = host.started
    mounts: tuple[Mount, ...] = spec.mounts
    return mounts


def snapshot(
    root: Path, repository: str = "models--org--name", commit: str = COMMIT, blobs: str = "blobs"
) -> Path:
    (root / repository / blobs).mkdir(parents=True)
    folder = root / repository / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


async def test_an_engine_sees_only_the_folder_of_its_model(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "name"
    folder.mkdir(parents=True)
    assert await launch_mounts(tmp_path, folder) == (Mount(source=str(folder), target=str(folder)),)


async def test_a_snapshot_of_the_hub_is_shown_with_its_repository(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    root = str(tmp_path / "models--org--name")
    assert await launch_mounts(tmp_path, folder) == (Mount(source=root, target=root),)


@pytest.mark.parametrize(
    "make",
    [
        lambda root: snapshot(root, repository="home"),
        lambda root: snapshot(root, commit="main"),
        lambda root: snapshot(root, blobs="other"),
        lambda root: snapshot(root, repository=""),
    ],
    ids=["no repository", "no commit", "no blobs", "at the top"],
)
async def test_a_folder_that_only_is_called_as_in_a_cache_is_shown_alone(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    folder = make(tmp_path)
    assert await launch_mounts(tmp_path, folder) == (Mount(source=str(folder), target=str(folder)),)


async def test_a_snapshot_whose_blobs_are_a_link_is_shown_alone(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, blobs="other")
    (folder.parent.parent / "blobs").symlink_to("/")
    assert await launch_mounts(tmp_path, folder) == (Mount(source=str(folder), target=str(folder)),)


def attempt_with_template(text: str) -> tuple[Attempt, ChatTemplate]:
    """An attempt whose plan names the template."""
    chat_template, start = ChatTemplate(text=text), attempt()
    argv = (f"--chat-template={chat_template.digest}.jinja",)
    start_with_template = start.evolve(plan=start.plan.evolve(argv=argv))
    return start_with_template, chat_template


def launcher_of(host: Any, **settings: Any) -> Launcher:
    async def download(*_: object, **__: object) -> Path:
        raise AssertionError("a folder is not downloaded")

    return Launcher(Settings(**settings), host, lambda _: engine(), download)


async def test_a_chat_template_is_a_file_that_only_its_container_sees(tmp_path: Path) -> None:
    folder, host = tmp_path / "model", Docker()
    folder.mkdir()
    start, template = attempt_with_template("{{ messages }} \u00df")
    start = start.evolve(
        plan=start.plan.evolve(model=ModelRef(source=str(folder), task="generate", vocab=1))
    )
    launcher = launcher_of(host, data_dir=tmp_path / "data")
    for _ in range(2):
        launcher.store_template(template.text)
        await launch(launcher, start)
    spec, templates = host.started[1], tmp_path / "data" / "chat-templates"
    assert spec.mounts == tuple(
        Mount(source=str(path), target=str(path)) for path in (folder, templates)
    )
    (file,) = templates.iterdir()
    assert f"--chat-template={file}" in spec.argv
    assert (file.read_text(), file.stat().st_mode & 0o777, templates.stat().st_mode & 0o777) == (
        template.text,
        0o644,
        0o755,
    )


async def test_the_chat_template_is_below_the_folder_of_engines(
    tmp_path: Path,
) -> None:
    models, host = tmp_path / "models", Docker()
    (models / "m").mkdir(parents=True)
    start, template = attempt_with_template("{{ messages }}")
    start = start.evolve(
        plan=start.plan.evolve(model=ModelRef(source=str(models / "m"), task="generate", vocab=1))
    )
    launcher = launcher_of(
        host, data_dir=tmp_path / "data", models_dir=models, models_source="fitserve-models"
    )
    launcher.store_template(template.text)
    await launch(launcher, start)
    (spec,) = host.started
    assert spec.mounts == (Mount(source="fitserve-models", target=str(models)),)
    assert f"--chat-template={models}/chat-templates/{template.digest}.jinja" in spec.argv
    assert (models / "chat-templates" / f"{template.digest}.jinja").read_text() == template.text


async def test_a_plan_whose_chat_template_is_gone_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    start, _ = attempt_with_template("{{ messages }}")
    start = start.evolve(
        plan=start.plan.evolve(
            model=ModelRef(source=str(tmp_path / "model"), task="generate", vocab=1)
        )
    )
    host = Docker()
    with pytest.raises(BadModel, match="No such file"):
        await launch(launcher_of(host, data_dir=tmp_path / "data"), start)
    assert not host.started


@pytest.mark.parametrize("part", ["model", "its parent"])
async def test_a_folder_that_became_a_link_since_it_was_planned_is_not_shown(
    tmp_path: Path, part: str
) -> None:
    (tmp_path / "secret" / "name").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    folder = tmp_path / "models" / "name"
    if part == "model":
        folder.symlink_to(tmp_path / "secret")
    else:
        (tmp_path / "models").rmdir()
        (tmp_path / "models").symlink_to(tmp_path / "secret")
    with pytest.raises(BadModel, match="was replaced after the model was planned"):
        await launch_mounts(tmp_path, folder)


@pytest.mark.parametrize(
    ("kind", "has_library", "is_traced"),
    [("docker", False, True), ("process", False, False), ("process", True, True)],
)
async def test_an_installed_engine_traces_only_with_its_library(
    tmp_path: Path, kind: str, has_library: bool, is_traced: bool
) -> None:
    url = "http://collector:4317"
    traced_engine = engine(flags={ENDPOINT: Flag(type="str")})
    settings = Settings(data_dir=tmp_path / "data", engine_otlp_endpoint=url)
    if has_library:
        packages = engine_dir(settings.data, traced_engine) / "lib/python3.11/site-packages"
        (packages / LIBRARY).mkdir(parents=True)
    host: Any = Docker()
    host.kind = kind
    download: Any = None
    launcher = Launcher(settings, host, lambda _: traced_engine, download)
    (folder := tmp_path / "model").mkdir()
    start: Attempt = attempt()
    model = ModelRef(source=str(folder), task="generate", vocab=1)
    await launch(launcher, start.evolve(plan=start.plan.evolve(model=model)))
    [spec] = host.started
    assert (f"--{ENDPOINT}={url}" in spec.argv) is is_traced
    assert ("OTEL_SERVICE_NAME" in spec.env) is is_traced
