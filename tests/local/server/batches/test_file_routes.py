"""Uploads: forms that are refused, limits, and memory that does not grow with the file."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.server.batches import batches
from tests.support.batch_calls import batch_input, batch_line, ids, results, run_batch, sdk
from tests.support.dataplane import until
from tests.support.key_gateway import ADMIN, gateway, make, unused_script
from tests.support.patience import hang_s
from tests.support.running import Running, running
from tests.support.served import serve_models
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
FORM: dict[str, Any] = {"purpose": (None, "batch"), "file": ("input.jsonl", b"{}\n")}


@contextlib.asynccontextmanager
async def keyless(tmp_path: Path, **settings: Any) -> AsyncIterator[Running]:
    async with running(tmp_path, unused_script, **settings) as server:
        yield server


def part_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "data" / "batches" / "files").glob("*.part"))


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"purpose": (None, "batch")}, "file"),
        ({"file": FORM["file"]}, "purpose"),
        (FORM | {"purpose": (None, "fine-tune")}, "purpose"),
        (FORM | {"expires_after[seconds]": (None, "60")}, "expires_after"),
        (FORM | {"expires_after[seconds]": (None, "many")}, "expires_after"),
        (
            FORM
            | {
                "expires_after[seconds]": (None, "7200"),
                "expires_after[anchor]": (None, "last_active_at"),
            },
            "expires_after",
        ),
    ],
)
async def test_a_wrong_form_is_refused_with_its_field(
    form: dict[str, Any], param: str, tmp_path: Path
) -> None:
    async with keyless(tmp_path) as server:
        answer = await server.client.post("/v1/files", files=form)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await server.client.get("/v1/files")).json()["data"] == []
        assert part_files(tmp_path) == []


async def test_other_bodies_are_refused(tmp_path: Path) -> None:
    async with keyless(tmp_path) as server:
        for body, content_type in ((b"{}", "application/json"), (b"--x", "multipart/form-data")):
            answer = await server.client.post(
                "/v1/files", content=body, headers={"content-type": content_type}
            )
            assert answer.status_code == 400


async def test_a_file_has_the_life_that_its_client_asks_for(tmp_path: Path) -> None:
    async with keyless(tmp_path) as server:
        form = FORM | {"expires_after[seconds]": (None, "7200")}
        view = (await server.client.post("/v1/files", files=form)).json()
        assert view["expires_at"] - view["created_at"] == 7200


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_file_over_the_limit_is_refused_and_leaves_nothing(
    tmp_path: Path, *, is_announced: bool
) -> None:
    async with keyless(tmp_path, batch_file_bytes=MIB, body_limit_bytes=2048) as server:
        request = server.client.build_request(
            "POST", "/v1/files", files={**FORM, "file": ("x", b"x" * 2 * MIB)}
        )
        if not is_announced:
            content = request.read()

            async def pieces() -> AsyncIterator[bytes]:
                for start in range(0, len(content), 65536):
                    yield content[start : start + 65536]

            request = server.client.build_request(
                "POST",
                "/v1/files",
                content=pieces(),
                headers={"content-type": request.headers["content-type"]},
            )
        answer = await server.client.send(request)
        assert answer.status_code == 413
        assert "FITSERVE_BATCH_FILE_BYTES" in answer.json()["error"]["message"]
        await until(lambda: not part_files(tmp_path))
        # Other bodies keep their limit.
        answer = await server.client.post("/v1/batches", content=b"x" * 4096)
        assert answer.status_code == 413
        answer = await server.client.post(
            "/v1/files", files={**FORM, "file": ("x", b"x" * 500_000)}
        )
        assert answer.status_code == 200


async def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async with keyless(tmp_path) as server:
        port = httpx.URL(server.url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data;"
            b" boundary=x\r\ncontent-length: 3000000\r\n\r\n--x\r\ncontent-disposition: form-data;"
            b' name="file"; filename="a"\r\n\r\n' + b"y" * 2_000_000
        )
        await writer.drain()
        await until(lambda: bool(part_files(tmp_path)))
        writer.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
        )
        writer.close()
        await until(lambda: not part_files(tmp_path))
        del reader
        assert (await server.client.get("/v1/files")).json()["data"] == []


async def test_uploads_at_once_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_MAX_UPLOADS", 0)
    async with keyless(tmp_path) as server:
        answer = await server.client.post("/v1/files", files=FORM)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


async def test_slow_uploads_of_one_key_leave_places_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_MAX_KEY_UPLOADS", 1)
    async with gateway(tmp_path) as (server, _):
        slow_headers, other_headers = [
            {"authorization": f"Bearer {await make(server, name)}"} for name in ("a", "b")
        ]
        _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port)
        writer.write(
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: "
            + slow_headers["authorization"].encode()
            + b"\r\ncontent-type: multipart/form-data; boundary=x\r\ncontent-length: 900\r\n\r\n"
        )
        await until(lambda: bool(part_files(tmp_path)))
        answer = await server.client.post("/v1/files", files=FORM, headers=slow_headers)
        assert answer.status_code == 503
        assert "1 files of this key" in answer.text
        answer = await server.client.post("/v1/files", files=FORM, headers=other_headers)
        assert answer.status_code == 200
        writer.close()
        await until(lambda: not part_files(tmp_path))
        answer = await server.client.post("/v1/files", files=FORM, headers=slow_headers)
        assert answer.status_code == 200


@contextlib.contextmanager
def _sparse_lines(tmp_path: Path, mebibytes: int) -> Iterator[Path]:
    """A file of lines of a mebibyte each."""
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        for number in range(mebibytes):
            line = batch_line(f"line-{number}", model="m", user="x" * (MIB - 300))
            file.write(line)
    yield path


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_gateway_process_takes_a_large_file_and_answers_each_line(
    workers: str, tmp_path: Path
) -> None:
    """No process holds the file in memory: it has three times as many bytes as may be added."""

    async def engine(call: Call) -> None:
        await call.reply(b'{"object":"list","data":[{"id":"m"}]}')

    async with Upstream(engine) as upstream:
        server = serve_models(tmp_path, {"m": [upstream.url]}, ADMIN, FITSERVE_WORKERS=workers)
        served = await asyncio.to_thread(server.__enter__)
        try:
            client = sdk(served.url, ADMIN)
            batch = await run_batch(client, batch_input(20, model="m"))
            assert batch.status == "completed", batch
            assert len(ids(await results(client, batch.output_file_id))) == 20
            before = served.resident_mib
            with _sparse_lines(tmp_path, 150) as path:
                file = await client.files.create(file=path, purpose="batch", timeout=hang_s())
            assert file.bytes == path.stat().st_size
            assert served.resident_mib - before < 50
            await client.close()
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)


async def test_files_of_a_gateway_with_keys_need_one(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        del server.client.headers["authorization"]
        answer = await server.client.post("/v1/files", files=FORM)
        assert answer.status_code == 401
