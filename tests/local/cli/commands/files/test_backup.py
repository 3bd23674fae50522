"""`fitserve backup` of a gateway that runs, and `fitserve restore` into another folder, with which
a gateway starts."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from gateway.store.data_folder import lock
from gateway.store.database import Database
from tests.support.commands import fitserve
from tests.support.patience import hang_s
from tests.support.run_scripts import script
from tests.support.running import model_folder, running

pytestmark = pytest.mark.anyio


def standard_streams(
    data: Path, *arguments: str, archive: Path | None = None, output: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A command without a gateway, with files as its standard input and output."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
    }
    with (
        (archive or Path(os.devnull)).open("rb") as read,
        (output or Path(os.devnull)).open("wb") as output_file,
    ):
        return subprocess.run(
            [sys.executable, "-m", "gateway", *arguments],
            env={**environment, "FITSERVE_DATA_DIR": str(data), "FITSERVE_PORT": "9"},
            stdin=read,
            stdout=output_file,
            stderr=subprocess.PIPE,
            text=True,
            timeout=hang_s(),
            check=False,
        )


async def test_a_backup_takes_the_gateways_knowledge_to_another_folder(tmp_path: Path) -> None:
    (first_folder := tmp_path / "first").mkdir()
    (second := tmp_path / "second").mkdir()
    archive = str(tmp_path / "a.tar.gz")
    async with running(first_folder, script) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        answer = await gateway.client.post("/admin/keys", json={"name": "all", "scopes": ["admin"]})
        environment = {"FITSERVE_URL": gateway.url, "FITSERVE_KEY": answer.json()["key"]}
        result = await asyncio.to_thread(fitserve, "backup", archive, **environment)
        assert result.returncode == 0, result.stderr
        assert os.stat(archive).st_mode & 0o777 == 0o600  # noqa: PTH116 - of a file that is here
        # A client that asks for a missing piece, or leaves, leaves nothing behind.
        headers = {
            "authorization": f"Bearer {environment['FITSERVE_KEY']}",
            "range": "bytes=999999999-",
        }
        assert (await gateway.client.get("/admin/backup", headers=headers)).status_code == 200
        for _ in range(10):
            async with gateway.client.stream("GET", "/admin/backup", headers=headers) as stream:
                assert int(stream.headers["content-length"]) > 1000
        gc.collect()  # a file that nobody closed is told of, and fails the test
        assert not list((first_folder / "data").glob("backup*"))
        second_result = await asyncio.to_thread(fitserve, "backup", archive, **environment)
        assert (second_result.returncode, "exists already" in second_result.stderr) == (2, True)
        # Not under a gateway that works.
        data_lock = lock(first_folder / "data")
        busy = await asyncio.to_thread(
            fitserve, "restore", archive, "--yes", FITSERVE_DATA_DIR=str(first_folder / "data")
        )
        os.close(data_lock)
        assert (busy.returncode, "Another gateway" in busy.stderr) == (3, True)
    outcome = await asyncio.to_thread(
        fitserve, "restore", archive, "--json", FITSERVE_DATA_DIR=str(second / "data")
    )
    assert outcome.returncode == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert (document["models"], document["keys"], document["former_folder"]) == (1, 1, None)
    async with running(second, script) as gateway:
        assert (await gateway.client.get("/admin/models")).status_code == 401
        gateway.client.headers["authorization"] = f"Bearer {answer.json()['key']}"
        assert (await gateway.until("m", "ready"))["wish"]["source"] == str(tmp_path / "model")
    # The backup of a folder that no gateway uses, by the settings of this shell.
    lone_result = await asyncio.to_thread(
        fitserve,
        "backup",
        str(tmp_path / "b.tar.gz"),
        FITSERVE_DATA_DIR=str(second / "data"),
        FITSERVE_PORT="9",
    )
    assert lone_result.returncode == 0, lone_result.stderr


def test_a_backup_goes_through_standard_streams(tmp_path: Path) -> None:
    """Without a gateway, from one data folder into another."""
    first_folder, second = tmp_path / "first", tmp_path / "second"
    first_folder.mkdir()
    Database(first_folder / "fitserve.db").close()
    archive = tmp_path / "a.tar.gz"
    result = standard_streams(first_folder, "backup", "-", output=archive)
    assert result.returncode == 0, result.stderr
    with tarfile.open(archive) as members:
        assert {"manifest.json", "fitserve.db"} <= {*members.getnames()}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.tar.gz"]
    for arguments, code in ((["-"], 0), (["-"], 2), (["-", "--yes"], 0)):
        result = standard_streams(second, "restore", *arguments, archive=archive)
        assert result.returncode == code, result.stderr
        assert ("the standard input cannot be asked" in result.stderr) == (code == 2)


def test_a_backup_that_fails_leaves_the_standard_output_empty(tmp_path: Path) -> None:
    output = tmp_path / "output"
    result = standard_streams(tmp_path / "none", "backup", "-", output=output)
    assert (result.returncode != 0, output.read_bytes()) == (True, b""), result.stderr
    result = standard_streams(tmp_path / "none", "backup", "-", "--json", output=output)
    assert (result.returncode, "not both" in result.stderr) == (2, True), result.stderr
