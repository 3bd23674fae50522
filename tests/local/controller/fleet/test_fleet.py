"""5,000 keys and 500 models with live endpoints: all are there after a start, and each is found.
What it costs, `python -m benchmarks.many` prints."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx
import pytest

from gateway.domain import LaunchSpec, Wish
from gateway.domain.grant import Grant
from gateway.keys import digest_of
from gateway.store.recovery import open_store
from tests.support.makers import LLAMA_8B, machine
from tests.support.patience import HANG_S, hang_s
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.served import serve_models
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

KEYS, MODELS = 5000, 500
ADMIN = "an-admin-key-of-the-settings-that-nobody-guesses"


def fill(data: Path, url: str, keys: int, models: int) -> None:
    """A database with so many, as the gateway would have written it in as many changes."""
    data.mkdir(mode=0o700)
    store = open_store(data / "fitserve.db")
    with store._database.change() as db:
        rows = [
            (
                f"k{n}",
                digest_of(f"key-{n}".encode()).hex(),
                Grant(name=f"k{n}").model_dump_json(),
                1.0,
            )
            for n in range(keys)
        ]
        db.executemany("INSERT INTO keys (name, digest, may, created_at) VALUES (?, ?, ?, ?)", rows)
        wishes = [Wish(name=f"m{n}", endpoints=(f"{url}/v1",)) for n in range(models)]
        model_rows = [(wish.name, wish.model_dump_json(), 1.0) for wish in wishes]
        db.executemany("INSERT INTO models (name, wish, created_at) VALUES (?, ?, ?)", model_rows)
    store.close()


async def test_each_of_many_keys_and_models_is_found(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    names = json.dumps(
        {"object": "list", "data": [{"id": f"m{number}"} for number in range(MODELS)]}
    ).encode()

    async def engine(call: Call) -> None:
        if call.head[0].startswith(b"GET"):
            await call.reply(names)
        else:
            counts[json.loads(call.body)["model"]] += 1
            await call.reply(b'{"choices":[]}')

    async with Upstream(engine) as upstream:
        fill(tmp_path / "data", upstream.url, KEYS, MODELS)
        server = serve_models(tmp_path, {}, ADMIN)
        gateway = await asyncio.to_thread(server.__enter__)
        try:
            async with httpx.AsyncClient(
                base_url=gateway.url, trust_env=False, timeout=HANG_S
            ) as client:
                admin = {"authorization": f"Bearer {ADMIN}"}
                async with asyncio.timeout(hang_s()):
                    while {
                        model_view["state"]
                        for model_view in (await client.get("/admin/models", headers=admin)).json()[
                            "data"
                        ]
                    } != {"ready"}:
                        await asyncio.sleep(0.2)
                models = (await client.get("/v1/models", headers=admin)).json()["data"]
                assert sorted(model_row["id"] for model_row in models) == sorted(
                    f"m{number}" for number in range(MODELS)
                )
                for number in range(MODELS):
                    key = {"authorization": f"Bearer key-{number * (KEYS // MODELS) + 9}"}
                    answer = await client.post(
                        "/v1/chat/completions",
                        json={"model": f"m{number}", "messages": []},
                        headers=key,
                    )
                    assert answer.status_code == 200, answer.text
                assert counts == {f"m{number}": 1 for number in range(MODELS)}
                new_answer = await client.post(
                    "/admin/keys", json={"name": "one-more"}, headers=admin
                )
                assert (await client.delete("/admin/keys/k4999", headers=admin)).is_success
                keys = (await client.get("/admin/keys", headers=admin)).json()["data"]
                assert {key["name"] for key in keys} == {
                    "admin",
                    "one-more",
                    *(f"k{number}" for number in range(KEYS - 1)),
                }
                for key_now, status in (
                    (new_answer.json()["key"], 200),
                    ("key-0", 200),
                    ("key-4999", 401),
                    ("key-5000", 401),
                ):
                    answer = await client.get(
                        "/v1/models", headers={"authorization": f"Bearer {key_now}"}
                    )
                    assert answer.status_code == status, key_now
                assert (await client.get("/readyz")).status_code == 200
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)


# --- GPUs between models ---


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


async def test_a_lone_model_takes_all_useful_gpus_and_the_next_error_names_their_holder(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, healthy, hardware=machine("2x3090")) as gateway:
        source = model_folder(tmp_path / "model", **LLAMA_8B)
        await gateway.add("first", source, engines=["vllm==0.26.0"])
        view = await gateway.until("first", "ready")
        assert (len(view["plan"]["gpus"]), view["plan"]["tensor_parallel"]["value"]) == (2, 2)
        await gateway.add("second", source, engines=["vllm==0.26.0"])
        view = await gateway.until("second", "stopped")
        assert (
            "first holds 22.96 GiB of GPU 0, 22.96 GiB of GPU 1. Without that there is a plan:"
            " `fitserve stop first`." in view["detail"]
        )
        assert view["detail"].endswith(
            "A request loads it by this: first is unloaded, until it is asked again"
        )
        assert view["on_request"]


async def test_a_model_beside_another_takes_one_gpu_and_its_copies_take_as_many_each(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, healthy, hardware=machine("4x3090")) as gateway:
        source = model_folder(tmp_path / "model", **LLAMA_8B)
        await gateway.add("first", source, engines=["vllm==0.26.0"], gpus=1)
        await gateway.until("first", "ready")
        # On two GPUs there would be room for more than twice as many contexts of 32k.
        await gateway.add("second", source, engines=["vllm==0.26.0"], max_context=8192)
        view = await gateway.until("second", "ready")
        assert len(view["plan"]["gpus"]) == 1
        await gateway.add(
            "third", source, engines=["vllm==0.26.0"], gpus=2, replicas=2, tensor_parallel=1
        )
        view = await gateway.until("third", "ready")
        async with asyncio.timeout(hang_s()):
            while [replica["state"] for replica in view["replicas"]] != ["ready", "ready"]:
                await asyncio.sleep(0.05)
                view = (await gateway.client.get("/admin/models/third")).json()
        gpus = [gpu for engine in gateway.world.engines.values() for gpu in engine.spec.gpus]
        assert len(gpus) == len(set(gpus)) == 4
