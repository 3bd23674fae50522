"""`fitserve transcripts` against a whole gateway, and the signs of a recorder in other commands."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.secret import Secret
from gateway.server.transcripts.transcript_cipher import TranscriptCipher
from tests.support.commands import fitserve
from tests.support.dataplane import CHAT
from tests.support.key_gateway import ADMIN, gateway
from tests.support.transcripts import write_keys
from tests.support.upstream import Call

pytestmark = pytest.mark.anyio


async def run(url: str, *words: str) -> tuple[int, str]:
    """The exit code of a command, and the text that it prints."""
    result = await asyncio.to_thread(fitserve, *words, FITSERVE_URL=url, FITSERVE_KEY=ADMIN)
    return result.returncode, result.stdout + result.stderr


async def answer_with_text(call: Call) -> None:
    message = {"role": "assistant", "content": "an answer"}
    usage = {"prompt_tokens": 30, "completion_tokens": 20}
    body: dict[str, Any] = {"choices": [{"index": 0, "message": message}], "usage": usage}
    await call.reply(json.dumps(body).encode())


async def test_a_recorded_key_is_marked_and_its_requests_are_read(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys")
    folder = tmp_path / "gateway"
    folder.mkdir()
    async with gateway(folder, answer_with_text, transcript_key_file=keys) as (server, _):
        url = server.url
        code, secret = await run(url, "keys", "add", "app", "--record")
        assert code == 0
        assert "RECORDED" in (await run(url, "keys", "ls"))[1]
        assert "Recorded: key app." in (await run(url, "ps"))[1]
        for text in ("hello there", "other words"):
            response = await server.client.post(
                CHAT,
                json={"model": "a", "messages": [{"role": "user", "content": text}]},
                headers={"authorization": f"Bearer {secret.split()[0]}"},
            )
            assert response.status_code == 200
        rows: list[dict[str, Any]] = []
        while len(rows) < 2:
            _, text = await run(url, "transcripts", "ls", "--json")
            rows = json.loads(text)["data"]
        _, text = await run(url, "transcripts", "ls", "--search", "HELLO")
        assert rows[1]["id"] in text
        assert rows[0]["id"] not in text
        _, text = await run(url, "transcripts", "ls", "--last", "1")
        assert f"--before {rows[0]['id']}" in text
        _, text = await run(url, "transcripts", "show", rows[1]["id"])
        assert "hello there" in text
        assert "30 + 20" in text
        assert "first token after" in text
        code, text = await run(url, "transcripts", "replay", rows[1]["id"], "--model", "b")
        assert (code, text.count("an answer")) == (0, 2)
        code, text = await run(url, "transcripts", "replay", rows[1]["id"], "--model", "absent")
        assert (code, "absent" in text) == (1, True)
        _, text = await run(url, "transcripts", "export", "--search", "other words")
        (line,) = text.splitlines()
        assert json.loads(line)["id"] == rows[0]["id"]
        assert (await run(url, "transcripts", "rm"))[0] == 2
        assert "transcripts deleted" in (await run(url, "transcripts", "rm", "--all"))[1]
        assert (await run(url, "transcripts", "show", rows[0]["id"]))[0] == 1


async def test_a_gateway_without_a_recorder_says_how_to_have_one(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        code, text = await run(server.url, "transcripts", "ls")
        assert (code, "FITSERVE_TRANSCRIPT_KEY_FILE" in text) == (1, True)
        code, text = await run(server.url, "keys", "add", "app", "--record")
        assert (code, "FITSERVE_TRANSCRIPT_KEY_FILE" in text) == (2, True)
        assert "Recorded" not in (await run(server.url, "ps"))[1]


def test_a_new_key_encrypts_and_decrypts() -> None:
    key = Secret(fitserve("transcripts", "new-key").stdout.strip())
    other_key = Secret(fitserve("transcripts", "new-key").stdout.strip())
    token = TranscriptCipher([key]).encrypt(b"text")
    assert TranscriptCipher([other_key, key]).decrypt(token) == b"text"
    assert TranscriptCipher([other_key]).decrypt(token) is None
