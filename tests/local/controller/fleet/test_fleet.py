"""5,000 keys and 500 models with live endpoints: all are there after a start, and each is found.
`python -m benchmarks.many` prints the cost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from gateway.domain import LaunchSpec, Wish
from gateway.domain.grant import Grant
from gateway.keys import hash_key
from gateway.store.recovery import open_store
from tests.support.makers import LLAMA_8B, machine
from tests.support.patience import HANG_S, hang_s, wait_until
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
                hash_key(f"key-{n}".encode()).hex(),
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


ADMIN_HEADERS = {"authorization": f"Bearer {ADMIN}"}


@asynccontextmanager
async def crowded_gateway(folder: Path, counts: Counter[str]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway with KEYS keys and MODELS models, which are all ready.

    counts: the engine's requests by model.
    """
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
        fill(folder / "data", upstream.url, KEYS, MODELS)
        server = serve_models(folder, {}, ADMIN)
        gateway = await asyncio.to_thread(server.__enter__)
        try:
            async with httpx.AsyncClient(
                base_url=gateway.url, trust_env=False, timeout=HANG_S
            ) as client:

                async def all_ready() -> bool:
                    answer = await client.get("/admin/models", headers=ADMIN_HEADERS)
                    return {view["state"] for view in answer.json()["data"]} == {"ready"}

                await wait_until("all models are ready", all_ready, 0.2)
                yield client
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)


async def list_status(client: httpx.AsyncClient, key: str) -> int:
    """The status of the list of models for a key."""
    headers = {"authorization": f"Bearer {key}"}
    return (await client.get("/v1/models", headers=headers)).status_code


async def test_each_of_many_keys_and_models_is_found(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    names = {f"m{number}" for number in range(MODELS)}
    async with crowded_gateway(tmp_path, counts) as client:
        models = (await client.get("/v1/models", headers=ADMIN_HEADERS)).json()["data"]
        assert {row["id"] for row in models} == names
        assert len(models) == MODELS
        for number in range(MODELS):
            answer = await client.post(
                "/v1/chat/completions",
                json={"model": f"m{number}", "messages": []},
                headers={"authorization": f"Bearer key-{number * (KEYS // MODELS) + 9}"},
            )
            assert answer.status_code == 200, answer.text
        assert counts == dict.fromkeys(names, 1)
        assert (await client.get("/readyz")).status_code == 200


async def test_many_keys_gain_and_lose_single_ones(tmp_path: Path) -> None:
    async with crowded_gateway(tmp_path, Counter()) as client:
        answer = await client.post("/admin/keys", json={"name": "one-more"}, headers=ADMIN_HEADERS)
        removal = await client.delete(f"/admin/keys/k{KEYS - 1}", headers=ADMIN_HEADERS)
        assert removal.is_success
        keys = (await client.get("/admin/keys", headers=ADMIN_HEADERS)).json()["data"]
        remaining_names = {f"k{number}" for number in range(KEYS - 1)}
        assert {key["name"] for key in keys} == {"admin", "one-more", *remaining_names}
        assert await list_status(client, answer.json()["key"]) == 200
        assert await list_status(client, "key-0") == 200
        assert await list_status(client, f"key-{KEYS - 1}") == 401
        assert await list_status(client, f"key-{KEYS}") == 401


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
