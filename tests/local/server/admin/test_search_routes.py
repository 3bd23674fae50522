"""Searches for models by the admin API, with a Hub on a socket and without one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_hub import FakeHub
from tests.support.fake_nvml import two_3090
from tests.support.found_models import REPOS, ROWS
from tests.support.makers import machine
from tests.support.patience import Patience
from tests.support.running import Running, model_folder, running

pytestmark = pytest.mark.anyio


async def search(gateway: Running, **fields: Any) -> Any:
    answer = await gateway.client.post("/admin/search", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_models_of_the_hub_are_judged_for_this_machine(tmp_path: Path) -> None:
    with FakeHub(REPOS) as hub:
        hub.listed = ROWS
        hub.variants = {name: [] for name in REPOS}
        settings: dict[str, Any] = {"hf_endpoint": hub.url(), "models_dir": tmp_path / "cache"}
        async with running(
            tmp_path,
            lambda spec: pytest.fail(spec.model),
            hardware=machine("3090"),
            nvml=two_3090(),
            **settings,
        ) as gateway:
            suggestions = await search(gateway, limit=20)
            fits = {model["name"]: model["fits"] for model in suggestions["data"]}
            # Suggestions are models to chat with.
            assert "qwen/vectors" not in fits
            assert (fits["qwen/plain-8b"], fits["org/huge"], suggestions["note"]) == (
                True,
                False,
                "",
            )
            # Those that fit come first.
            assert [*fits.values()] == sorted(fits.values(), reverse=True)
            plain, *_ = (await search(gateway, words="plain"))["data"]
            assert (plain["gpus"], plain["form"], plain["why"]) == (1, "unquantized", "")
            assert plain["context"] > 0
            assert plain["tokens_s"] > 0
            assert (await search(gateway, words="qwen", use="embed"))["data"][0]["name"] == (
                "qwen/vectors"
            )


async def test_the_folders_are_searched_without_the_hub_and_the_reason_is_reported(
    tmp_path: Path,
) -> None:
    folder = model_folder(tmp_path / "mine" / "tiny-model")
    settings: dict[str, Any] = {
        "hf_endpoint": "http://127.0.0.1:1",
        "models_dir": tmp_path / "cache",
    }
    async with running(tmp_path, lambda spec: pytest.fail(spec.model), **settings) as gateway:
        answer = await search(gateway, words="tiny", folders=[str(tmp_path / "mine")])
        assert [model["source"] for model in answer["data"]] == [str(folder)]
        assert "127.0.0.1:1 cannot be reached" in answer["note"]
        # All models of a named folder are listed, even those that do not chat.
        answer = await search(gateway, folders=[str(tmp_path / "mine")])
        assert [model["source"] for model in answer["data"]] == [str(folder)]
        missing = await gateway.client.post("/admin/search", json={"folders": ["/no/such"]})
        assert (missing.status_code, "no folder /no/such" in missing.text) == (400, True)


async def test_a_search_tells_its_place_by_its_name(tmp_path: Path) -> None:
    with FakeHub(REPOS) as hub:
        hub.listed = ROWS
        # The Hub's answer stops without variants.
        settings: dict[str, Any] = {"hf_endpoint": hub.url(), "models_dir": tmp_path / "cache"}
        async with running(tmp_path, lambda spec: pytest.fail(spec.model), **settings) as gateway:

            async def phase_of(name: str) -> str:
                answer = await gateway.client.get(f"/admin/search/{name}")
                assert answer.status_code == 200
                return str(answer.json()["phase"])

            first = asyncio.ensure_future(search(gateway, words="plain", name="first"))
            patience = Patience()
            while await phase_of("first") != "searching" or not hub.requests:
                assert not patience.is_over()
                await asyncio.sleep(patience.pause_s(0.02))
            second = asyncio.ensure_future(search(gateway, words="plain", name="second"))
            while await phase_of("second") != "waiting":
                assert not patience.is_over()
                await asyncio.sleep(patience.pause_s(0.02))
            hub.variants = {name: [] for name in REPOS}
            assert (await first)["data"]
            assert (await second)["data"]
            assert [await phase_of(name) for name in ("first", "second")] == ["none"] * 2


async def test_a_client_that_leaves_ends_its_search(tmp_path: Path) -> None:
    with FakeHub(REPOS) as hub:
        hub.listed = ROWS
        # The Hub's answer stops without variants.
        settings: dict[str, Any] = {"hf_endpoint": hub.url(), "models_dir": tmp_path / "cache"}
        async with running(tmp_path, lambda spec: pytest.fail(spec.model), **settings) as gateway:
            leaving = asyncio.ensure_future(search(gateway, words="plain"))
            patience = Patience()
            while not hub.requests:
                assert not patience.is_over()
                await asyncio.sleep(patience.pause_s(0.02))
            leaving.cancel()
            hub.variants = {name: [] for name in REPOS}
            assert (await search(gateway, words="plain"))["data"]
