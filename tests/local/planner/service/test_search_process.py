"""The search process: one search for each child, whose end is an error of that search alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.errors import BadModel, BadRequest, Busy
from gateway.planner.service import search_process
from gateway.planner.service.messages import SearchRequest, WorkerConfig
from gateway.planner.service.search_process import SearchProcess
from gateway.profiles.profiles import Profiles
from gateway.secret import Secret
from tests.support.makers import machine
from tests.support.running import model_folder

pytestmark = pytest.mark.anyio


def process(tmp_path: Path) -> SearchProcess:
    roots = tuple(map(str, Profiles().roots))
    nowhere = Secret("http://127.0.0.1:1")
    return SearchProcess(
        WorkerConfig(roots, str(tmp_path / "data"), nowhere, None, installed_only=False)
    )


def question(*folders: Path, held_bytes: dict[str, int] | None = None) -> SearchRequest:
    return SearchRequest("", None, 5, tuple(map(str, folders)), machine("3090"), held_bytes or {})


async def test_the_engines_of_the_gateway_count_as_free(tmp_path: Path) -> None:
    model_folder(tmp_path / "models" / "tiny")
    full = machine("3090")
    gpu = full.gpus[0]
    full = full.evolve(gpus=(gpu.evolve(free_bytes=2**20),))
    request = question(tmp_path / "models")._replace(machine=full)
    searches = process(tmp_path)
    models = (await searches.search(request))["data"]
    assert [row["fits"] for row in models] == [False]
    assert gpu.total_bytes is not None
    claims = {gpu.uuid: gpu.total_bytes - 2**30}
    fitting = (await searches.search(request._replace(held_bytes=claims)))["data"]
    assert [row["fits"] for row in fitting] == [True]


async def test_an_error_of_a_search_is_that_of_its_program(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no folder"):
        await process(tmp_path).search(question(tmp_path / "gone"))


async def test_a_child_that_ends_is_an_error_of_its_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = process(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(search_process, "_PROGRAM", "gateway.no_such_program")
        with pytest.raises(BadModel, match="ended before its answer"):
            await searches.search(question())
    assert (await searches.search(question()))["data"] == []


async def test_few_searches_wait(tmp_path: Path) -> None:
    searches = process(tmp_path)
    tasks = [asyncio.ensure_future(searches.search(question())) for _ in range(5)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results].count(Busy) == 1
