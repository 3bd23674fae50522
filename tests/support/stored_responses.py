"""An engine that stores responses, and the keys of their owners."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx

from tests.support.upstream import Call

OWNER, OTHER = (f"{name}-key-of-this-test-that-nobody-guesses" for name in ("owner", "other"))


ASKED = {"model": "m", "input": "x"}


class Engine:
    """An engine that keeps its answers, as vLLM does, and gives them to everyone."""

    def __init__(self) -> None:
        self.ids: set[str] = set()

    async def __call__(self, call: Call) -> None:
        method, path, _ = call.head[0].decode().split(" ")
        if path == "/v1/models":
            await call.reply(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
        elif (method, path) == ("POST", "/v1/responses"):
            document = json.loads(call.body)
            previous = document.get("previous_response_id")
            if previous is not None and previous not in self.ids:
                await call.reply(
                    b'{"error":{"message":"the engine does not know it"}}', "404 Not Found"
                )
                return
            response = {
                "id": f"resp_{uuid.uuid4().hex}",
                "object": "response",
                "metadata": document.get("metadata"),
            }
            if document.get("store") is not False:
                self.ids.add(response["id"])
            if document.get("stream"):
                await call.start()
                for kind in (b"response.created", b"response.completed"):
                    data = json.dumps(response).encode()
                    await call.chunk(b'event: %b\ndata: {"response":%b}\n\n' % (kind, data))
                await call.end()
            else:
                await call.reply(json.dumps(response).encode())
        else:
            is_known = path.split("/")[3].partition("?")[0] in self.ids
            await call.reply(
                b'{"kept":true}' if is_known else b"{}", "200 OK" if is_known else "404 Not Found"
            )


async def make(client: httpx.AsyncClient, key: str, **fields: Any) -> str:
    """The id of a new response."""
    answer = await client.post("/v1/responses", json={**ASKED, **fields}, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return answer.text.partition('"id": "')[2].partition('"')[0]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def uses(client: httpx.AsyncClient, key: str, id_: str) -> list[tuple[int, str]]:
    """The result of each act on a response: the status, and the answer without the id."""
    answers = [
        await client.get(f"/v1/responses/{id_}", headers=bearer(key)),
        await client.get(f"/v1/responses/{id_}?stream=true", headers=bearer(key)),
        await client.post(f"/v1/responses/{id_}/cancel", headers=bearer(key)),
        await client.post(
            "/v1/responses", json={**ASKED, "previous_response_id": id_}, headers=bearer(key)
        ),
        await client.post(
            "/v1/responses",
            json={**ASKED, "previous_response_id": id_, "stream": True},
            headers=bearer(key),
        ),
    ]
    return [(answer.status_code, answer.text.replace(id_, "ID")) for answer in answers]
