"""gateway.controller.launcher: what of the host's disk an engine's container sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.controller.launcher import Launcher
from gateway.domain import Attempt, LaunchSpec, ModelRef, Mount
from gateway.errors import BadModel
from gateway.settings import Settings
from tests.support.makers import attempt, engine

pytestmark = pytest.mark.anyio

COMMIT = "0123456789" * 4


class Docker:
    """Keeps what would be started."""

    kind = "docker"

    def __init__(self) -> None:
        self.started: list[LaunchSpec] = []

    async def prepare(self, *_: object) -> None: ...

    async def start(self, spec: LaunchSpec) -> None:
        self.started.append(spec)


async def at_once(_sizes: bool) -> None: ...


async def mounted(tmp_path: Path, folder: Path) -> tuple[Mount, ...]:
    host: Any = Docker()

    async def download(*_: object, **__: object) -> Path:
        raise AssertionError("a folder is not downloaded")

    made = engine()
    launcher = Launcher(Settings(data_dir=tmp_path / "data"), host, lambda _: made, download)
    one: Attempt = attempt()
    model = ModelRef(source=str(folder), task="generate", vocab=1)
    await launcher.launch(one.evolve(plan=one.plan.evolve(model=model)), lambda _: None, at_once, allow_remote_code=False)
    (spec,) = host.started
    mounts: tuple[Mount, ...] = spec.mounts
    return mounts


def snapshot(root: Path, repository: str = "models--org--name", commit: str = COMMIT, blobs: str = "blobs") -> Path:
    (root / repository / blobs).mkdir(parents=True)
    folder = root / repository / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


async def test_a_folder_is_shown_alone(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "name"
    folder.mkdir(parents=True)
    assert await mounted(tmp_path, folder) == (Mount(source=str(folder), target=str(folder)),)


async def test_a_snapshot_of_the_hub_is_shown_with_its_repository(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    root = str(tmp_path / "models--org--name")
    assert await mounted(tmp_path, folder) == (Mount(source=root, target=root),)


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
async def test_a_folder_that_only_is_called_as_in_a_cache_is_shown_alone(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path)
    assert await mounted(tmp_path, folder) == (Mount(source=str(folder), target=str(folder)),)


async def test_a_snapshot_whose_blobs_are_a_link_is_shown_alone(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, blobs="other")
    (folder.parent.parent / "blobs").symlink_to("/")
    assert await mounted(tmp_path, folder) == (Mount(source=str(folder), target=str(folder)),)


@pytest.mark.parametrize("part", ["model", "its parent"])
async def test_a_folder_that_became_a_link_since_it_was_planned_is_not_shown(tmp_path: Path, part: str) -> None:
    (tmp_path / "secret" / "name").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    folder = tmp_path / "models" / "name"
    if part == "model":
        folder.symlink_to(tmp_path / "secret")
    else:
        (tmp_path / "models").rmdir()
        (tmp_path / "models").symlink_to(tmp_path / "secret")
    with pytest.raises(BadModel, match="is not the folder any more that was planned"):
        await mounted(tmp_path, folder)
