"""Folders with models by the admin API: below the named folders, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.running import Running, model_folder, running

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model_folder(tmp_path / "models/org/tiny")
    (tmp_path / "models/.cache").mkdir()
    (tmp_path / "models/notes.txt").write_text("no folder")
    (tmp_path / "models/empty").mkdir()
    (tmp_path / "secret/inner").mkdir(parents=True)
    (tmp_path / "models/out").symlink_to(tmp_path / "secret")
    return tmp_path / "models"


async def ask(gateway: Running, path: str, status: int = 200) -> Any:
    answer = await gateway.client.get("/admin/folders", params={"path": path})
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_folders_lead_from_the_settings_to_a_model(tmp_path: Path, root: Path) -> None:
    places = f"{root},{tmp_path / 'gone'}"
    async with running(
        tmp_path, lambda spec: pytest.fail(spec.model), model_folders=places
    ) as gateway:
        (top,) = (await ask(gateway, ""))["folders"]
        assert top["path"] == str(root)
        listing = await ask(gateway, top["path"])
        assert [row["name"] for row in listing["folders"]] == ["empty", "org"]
        assert (listing["parent"], listing["is_cut"]) == ("", False)
        inner = await ask(gateway, str(root / "org"))
        (row,) = inner["folders"]
        assert (row["name"], row["is_model"]) == ("tiny", True)
        assert inner["parent"] == str(root)


async def test_nothing_beside_the_settings_is_listed(tmp_path: Path, root: Path) -> None:
    async with running(
        tmp_path, lambda spec: pytest.fail(spec.model), model_folders=str(root)
    ) as gateway:
        for path in ("/", "models", f"{root}/../secret", f"{tmp_path}", f"{root}\0", f"{root}x"):
            error = (await ask(gateway, path, 400))["error"]
            assert "FITSERVE_MODEL_FOLDERS" in error["message"]
        for path in ("out", "out/inner", "gone", "notes.txt", "a" * 300):
            error = (await ask(gateway, f"{root}/{path}", 404))["error"]
            assert "Links are not followed" in error["message"]
