"""Former wishes of a model, and the way back to them; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.domain import LaunchSpec
from gateway.store.store import Store
from tests.support.commands import fitserve
from tests.support.key_gateway import ADMIN, gateway, make, unused_script
from tests.support.patience import Patience
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


async def history(server: Running, name: str = "a") -> list[Any]:
    response = await server.client.get(f"/admin/models/{name}/history")
    assert response.status_code == 200, response.text
    return list(response.json()["data"])


async def change(server: Running, name: str = "a", **fields: Any) -> None:
    response = await server.client.patch(f"/admin/models/{name}", json=fields)
    assert response.status_code in (200, 202), response.text


async def roll_back(
    server: Running, number: int | None = None, *, name: str = "a", query: str = ""
) -> httpx.Response:
    body = {} if number is None else {"number": number}
    return await server.client.post(f"/admin/models/{name}/rollback{query}", json=body)


def rewrite(folder: Path, *statements: str) -> None:
    """Change rows of a gateway that does not run, as another version could have written them."""
    with contextlib.closing(Store(folder / "data/fitserve.db")) as store:
        for statement in statements:
            with store._database.change() as db:
                db.execute(statement)


async def wish_of(server: Running, name: str = "a") -> Any:
    return (await server.show(name))["wish"]


async def test_the_history_names_author_program_and_changes(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        await make(server, "read", scopes=["read"])
        boss_key = await make(server, "boss", scopes=["admin"])
        await change(server, aliases=["x"])
        command = await asyncio.to_thread(
            fitserve,
            "set",
            "a",
            "--keep-alive",
            "5m",
            FITSERVE_URL=server.url,
            FITSERVE_KEY=boss_key,
        )
        assert command.returncode == 0, command.stderr
        headers = {"authorization": f"Bearer {boss_key}", "sec-fetch-site": "same-origin"}
        await server.client.patch("/admin/models/a", json={"aliases": ["y"]}, headers=headers)
        rows = await history(server)
    assert [(row["number"], row["key"], row["way"], row["state"]) for row in rows] == [
        (4, "boss", "page", "in force"),
        (3, "boss", "command line", "former"),
        (2, "admin", "API", "former"),
        (1, "admin", "API", "former"),
    ]
    assert rows[0]["changes"] == [{"field": "aliases", "former": "x", "present": "y"}]
    assert rows[1]["changes"] == [
        {"field": "policy", "former": None, "present": "keep_alive=300.0"}
    ]
    assert {row["field"] for row in rows[3]["changes"]} == {"endpoints"}
    assert rows[0]["at"] > rows[3]["at"] > 1e9


async def test_a_rollback_restores_every_field_and_can_be_taken_back(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    async with running(tmp_path, healthy) as server:
        await server.add("a", folder, context=512, args={"max-num-seqs": 4}, policy={"priority": 3})
        await server.until("a", "ready")
        first_wish = await wish_of(server)
        await change(server, context=1024, args={"max-num-seqs": None}, policy={"pinned": True})
        await settle(server, context=1024)
        second_wish = await wish_of(server)
        dry_run = await roll_back(server, query="?dry_run=true")
        assert dry_run.status_code == 200
        assert {"field": "context", "former": "1024", "present": "512"} in dry_run.json()["wish"]
        assert await wish_of(server) == second_wish
        assert (await roll_back(server)).status_code == 202
        await settle(server, context=512)
        assert await wish_of(server) == first_wish
        rows = await history(server)
        assert [(row["number"], row["state"], row["restored"]) for row in rows] == [
            (3, "in force", 1),
            (2, "former", None),
            (1, "former", None),
        ]
        assert (await roll_back(server, 2)).status_code == 202
        await settle(server, context=1024)
        assert await wish_of(server) == second_wish


async def settle(server: Running, context: int | None) -> None:
    """Wait until the model serves by the wish with this context, and no change is under way."""
    patience = Patience()
    while True:
        view = await server.show("a")
        is_changed = view["change"] is None and view["wish"]["context"] == context
        if is_changed and view["state"] == "ready":
            return
        assert not patience.is_over(), view
        await asyncio.sleep(patience.pause_s(0.02))


async def test_a_rollback_has_the_checks_of_a_change(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        await change(server, aliases=["x"])
        await change(server, aliases=[])
        await change(server, name="b", aliases=["x"])
        refusal = await roll_back(server, 2)
        assert refusal.status_code == 409
        assert "x" in refusal.json()["error"]["message"]
        assert (await wish_of(server))["aliases"] == []
        assert len(await history(server)) == 3


async def test_a_former_wish_that_no_longer_has_a_plan_is_refused(tmp_path: Path) -> None:
    folders = [model_folder(tmp_path / name) for name in ("one", "two")]
    async with running(tmp_path, healthy) as server:
        await server.add("a", folders[0])
        await server.until("a", "ready")
        await change(server, source=str(folders[1]))
        await settle(server, context=None)
        (folders[0] / "config.json").unlink()
        refusal = await roll_back(server, 1)
        assert refusal.status_code == 400, refusal.text
        assert "config.json" in refusal.text
        assert (await wish_of(server))["source"] == str(folders[1])


async def test_the_history_outlives_the_gateway(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        await change(server, aliases=["x"])
        rows = await history(server)
    async with running(tmp_path, healthy, admin_key=ADMIN) as server:
        server.client.headers["authorization"] = f"Bearer {ADMIN}"
        assert await history(server) == rows
        assert (await roll_back(server)).status_code == 200
        assert (await wish_of(server))["aliases"] == []


async def test_wishes_of_a_models_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n  a:\n    endpoint: http://127.0.0.1:1/v1\n")
    async with running(tmp_path, healthy, models_file=file) as server:
        patience = Patience()
        while (await server.client.get("/admin/models/a")).status_code != 200:
            assert not patience.is_over()
            await asyncio.sleep(patience.pause_s(0.02))
        (row,) = await history(server)
    assert (row["key"], row["way"]) == ("", "models file")


async def test_a_missing_wish_is_refused_in_words(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        for number, status, words in (
            (7, 404, "no wish 7"),
            (None, 409, "no former wish"),
            (0, 400, "number"),
        ):
            refusal = await roll_back(server, number)
            assert refusal.status_code == status, refusal.text
            assert words in refusal.json()["error"]["message"]
        assert (await server.client.get("/admin/models/none/history")).status_code == 404
        refusal = await server.client.post(
            "/admin/models", json={"name": "x/history", "endpoint": "http://127.0.0.1:1/v1"}
        )
        assert refusal.status_code == 400


async def test_the_commands_list_and_restore(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        await change(server, aliases=["x"])

        async def run(*arguments: str) -> Any:
            return await asyncio.to_thread(
                fitserve, *arguments, FITSERVE_URL=server.url, FITSERVE_KEY=ADMIN
            )

        listing = await run("history", "a")
        assert listing.returncode == 0, listing.stderr
        assert "aliases: x" in listing.stdout
        assert "admin, API" in listing.stdout
        preview = await run("rollback", "a", "--dry-run")
        assert preview.returncode == 0, preview.stderr
        assert (await wish_of(server))["aliases"] == ["x"]
        assert (await run("rollback", "a")).returncode == 0
        assert (await wish_of(server))["aliases"] == []
        assert "as wish 1" in (await run("history", "a")).stdout
        assert (await run("rollback", "a", "9")).returncode == 1


async def test_secrets_of_flags_are_shown_in_no_answer(tmp_path: Path) -> None:
    """A reader sees every wish, former ones included."""
    async with gateway(tmp_path) as (server, upstream):
        reader_key = await make(server, "reader", scopes=["read"])
        secret, args = "sk-7f3a9c2e51", {"api-key": "sk-7f3a9c2e51", "block-size": 16}
        fields = {"endpoint": f"{upstream.url}/v1", "args": args, "env": {"HF_TOKEN": secret}}
        answer = await server.client.post("/admin/models", json={"name": "c", **fields})
        assert answer.status_code == 202, answer.text
        texts = [answer.text]
        public_wish = await wish_of(server, "c")
        assert public_wish["args"] == {"api-key": "(hidden)", "block-size": 16}
        patches = ({"args": {**public_wish["args"], "block-size": 32}}, {"env": {"HF_TOKEN": None}})
        for patch in patches:
            answer = await server.client.patch("/admin/models/c", json=patch)
            assert answer.status_code == 200, answer.text
            texts.append(answer.text)
        headers = {"authorization": f"Bearer {reader_key}"}
        paths = ("models", "models/c", "models/c/history", "events?follow=false")
        for path in paths:
            answer = await server.client.get(f"/admin/{path}", headers=headers)
            assert answer.status_code == 200, answer.text
            texts.append(answer.text)
        assert not [text for text in texts if secret in text]
    with contextlib.closing(Store(tmp_path / "data/fitserve.db")) as store:
        stored = store.wishes.versions("c")
    assert [version.wish.args["api-key"] for version in stored] == [secret] * 3
    assert stored[-1].wish.args["block-size"] == 32


async def test_a_wish_of_another_form_ends_no_answer(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        for aliases in (["x"], ["y"]):
            await change(server, aliases=aliases)
    rewrite(
        tmp_path,
        "UPDATE wishes SET wish=json_set(wish, '$.gone', 7) WHERE model='a' AND number=2",
    )
    async with running(tmp_path, unused_script, admin_key=ADMIN) as server:
        server.client.headers["authorization"] = f"Bearer {ADMIN}"
        rows = await history(server)
        assert [(row["number"], row["state"]) for row in rows] == [
            (3, "in force"),
            (2, "former"),
            (1, "former"),
        ]
        assert rows[0]["changes"] == [{"field": "aliases", "former": None, "present": "y"}]
        assert (rows[1]["changes"], rows[0]["problem"]) == ([], "")
        assert "cannot read" in rows[1]["problem"]
        refusal = await roll_back(server, 2)
        assert refusal.status_code == 409
        assert "cannot read" in refusal.json()["error"]["message"]
        assert (await roll_back(server)).status_code == 200
        assert (await wish_of(server))["aliases"] == []


async def test_facts_and_measurements_of_another_form_are_counted(tmp_path: Path) -> None:
    async with gateway(tmp_path):
        pass
    rewrite(
        tmp_path,
        """INSERT INTO facts (fact, learned_at) VALUES ('{"kind":"x"}', 1)""",
        "INSERT INTO benches (model, at, bench) VALUES ('a', 1, '{}')",
    )
    async with running(tmp_path, unused_script, admin_key=ADMIN) as server:
        server.client.headers["authorization"] = f"Bearer {ADMIN}"
        for path in ("facts", "models/a/bench"):
            answer = await server.client.get(f"/admin/{path}")
            assert answer.status_code == 200, answer.text
            assert "1 row is left out" in answer.json()["problem"]


async def test_a_hidden_text_is_never_stored_as_a_secret(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, upstream):
        fields = {"name": "c", "endpoint": f"{upstream.url}/v1"}
        secret_args = {"extra": '{"api_key": "sk-7f3a9c2e51", "size": 8}'}
        answer = await server.client.post("/admin/models", json={**fields, "args": secret_args})
        assert answer.status_code == 202, answer.text
        shown_value = (await wish_of(server, "c"))["args"]["extra"]
        patch = {"args": {"extra": shown_value.replace("8", "9")}}
        answer = await server.client.patch("/admin/models/c", json=patch)
        assert answer.status_code == 200, answer.text
        for args in ({"more": shown_value}, {"api-key": "(hidden)"}):
            answer = await server.client.patch("/admin/models/c", json={"args": args})
            assert answer.status_code == 400, answer.text
            assert "Give the secret itself." in answer.text
            body = {**fields, "name": "d", "args": args}
            assert (await server.client.post("/admin/models", json=body)).status_code == 400
    with contextlib.closing(Store(tmp_path / "data/fitserve.db")) as store:
        stored_args = store.wishes.versions("c")[-1].wish.args
    assert stored_args == {"extra": '{"api_key": "sk-7f3a9c2e51", "size": 9}'}
