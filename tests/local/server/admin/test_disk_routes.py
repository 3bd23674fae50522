"""Disk usage of the gateway's models, without the engines and other repositories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.server.admin import disk_routes
from tests.support.run_scripts import script
from tests.support.running import model_folder, running

pytestmark = pytest.mark.anyio
COMMIT = "c" * 40


async def test_the_revisions_of_models_are_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fitserve list` read every file of every engine and repository, over 100,000 of them."""

    async def read_disk(job: Any) -> Any:
        pytest.fail(f"the whole disk was read: {job}")

    monkeypatch.setattr(disk_routes, "read_disk", read_disk)
    cache = tmp_path / "cache"
    source = model_folder(cache / "models--org--name" / "snapshots" / COMMIT)
    (source / "gone.json").symlink_to(tmp_path / "nowhere")
    model_folder(cache / "models--org--other" / "snapshots" / COMMIT)
    size = sum(path.stat().st_size for path in source.iterdir() if path.exists())
    async with running(tmp_path, script, models_dir=cache) as gateway:
        await gateway.add("m", source)
        await gateway.add("folder", model_folder(tmp_path / "model"))
        answer = await gateway.client.get("/admin/disk/models")
        assert answer.status_code == 200, answer.text
        rows = {row["name"]: row for row in answer.json()["data"]}
        assert {name: row["revisions"] for name, row in rows.items()} == {
            "m": [{"repo": "org/name", "commit": COMMIT, "bytes": size}],
            "folder": [],
        }
        folder_size = sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
        assert {name: row["folder_bytes"] for name, row in rows.items()} == {
            "m": None,
            "folder": folder_size,
        }
