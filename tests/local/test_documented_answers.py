"""Calls of `curl` in docs/ with their answers: a gateway with scripted engines answers likewise.

A page shows a part of an answer: its fields must be there, and fields of a fixed meaning have the
shown value. Calls of a page follow each other, so their ids are translated.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.documented import PAGES
from tests.support.patience import Patience, hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript, FakeEngine

pytestmark = pytest.mark.anyio

GATEWAY_URL = "http://127.0.0.1:8080"
# Name and value of a field of JSON; "" is the value of an object.
FIELD = re.compile(r'"(\w+)":\s*("(?:[^"\\]|\\.)*"|[\w.-]+)?')
# Beginnings of lines that are no JSON.
PLAIN_BEGINS = (":", "HTTP/", "x-", "data: [DONE]")
ID = re.compile(r"\b(?:file|batch)[-_][0-9a-f]{16,}\b")
# The answer there is that of the tiny model of `fitserve demo`; tests/e2e/test_demo.py.
OTHERS = ("README.md",)
# Fields whose value in a page is that of every gateway.
FIXED = {
    "code",
    "completed",
    "completion_window",
    "custom_id",
    "endpoint",
    "failed",
    "index",
    "message",
    "name",
    "object",
    "param",
    "purpose",
    "role",
    "state",
    "status",
    "status_code",
    "total",
    "type",
}


class ShownCall(NamedTuple):
    """A command of a shell and the lines of its answer."""

    page: str
    command: str
    answer: str


def split_command(text: str) -> tuple[str, str]:
    """A command, whose quotes may have several lines, and the lines below it."""
    lines = text.split("\n")
    for count in range(1, len(lines)):
        command = "\n".join(lines[:count])
        with suppress(ValueError):
            shlex.split(command)
            return command, "\n".join(lines[count:])
    return text, ""


def shown_calls() -> list[ShownCall]:
    """Every call whose block shows it with its answer, in the order of its page."""
    return [
        ShownCall(page.name, *split_command(part))
        for page in PAGES
        if page.name not in OTHERS
        for block in page.read_text().split("```text\n$ ")[1:]
        if "curl " in (text := block.partition("```")[0].replace("\\\n", " "))
        for part in text.split("\n$ ")
    ]


def missing_parts(shown_answer: str, real: str) -> list[str]:
    """Parts of a shown answer that the real one lacks."""
    # Lines of a page are short, so a text of JSON has breaks there.
    shown_fields = FIELD.findall(re.sub(r"\n ", " ", shown_answer))
    real_fields = FIELD.findall(real)
    names = {name for name, _ in real_fields}
    missing = [
        f"{name}: {value}"
        for name, value in shown_fields
        if name not in names or (name in FIXED and (name, value) not in real_fields)
    ]
    lines = {line.strip().lower() for line in real.splitlines()}
    plain_lines = [line for line in shown_answer.splitlines() if line.startswith(PLAIN_BEGINS)]
    return missing + [line for line in plain_lines if line.strip().lower() not in lines]


def translated_ids(shown_answer: str, real: str) -> dict[str, str]:
    """The real id of each shown one, by the name of its field."""
    real_values = dict(reversed(FIELD.findall(real)))
    return {
        value.strip('"'): real_values[name].strip('"')
        for name, value in FIELD.findall(shown_answer)
        if ID.fullmatch(value.strip('"')) and name in real_values
    }


class Shell:
    """Runs shown commands against a gateway."""

    def __init__(self, gateway: Running, folder: Path) -> None:
        self.gateway = gateway
        self.folder = folder
        self.ids: dict[str, str] = {}

    async def run(self, command: str) -> str:
        text = command.replace(GATEWAY_URL, self.gateway.url)
        text = text.replace("/srv/models/qwen", str(self.folder / "model"))
        for shown_id, real_id in self.ids.items():
            text = text.replace(shown_id, real_id)
        text = text.replace("curl ", "curl --silent --noproxy '*' ", 1)
        result = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", text],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=hang_s(),
        )
        return result.stdout

    async def check(self, call: ShownCall) -> list[str]:
        """Parts that the answer lacks. A call that only reads is repeated until it has them."""
        is_reading = not re.search(r" -(?:d|F|X|-data)\b|>", call.command)
        patience = Patience()
        while True:
            answer = await self.run(call.command)
            missing = missing_parts(call.answer, answer)
            if not missing or not is_reading or patience.is_over():
                break
            await asyncio.sleep(patience.pause_s(0.05))
        self.ids |= translated_ids(call.answer, answer)
        return [f"{call.page}: {shlex.quote(call.command)}: {part} of {answer}" for part in missing]


async def test_calls_are_answered_as_their_pages_show(tmp_path: Path) -> None:
    def script(spec: object) -> EngineScript:
        return EngineScript(model=getattr(spec, "model", None), start_delay_s=1)

    model_folder(tmp_path / "model")
    missing: list[str] = []
    async with (
        FakeEngine(EngineScript(model="bge"), lambda line: None) as engine,
        running(tmp_path, script, waiting_comment_s=0.05) as gateway,
    ):
        url = f"http://127.0.0.1:{engine.port}/v1"
        await gateway.client.post("/admin/models", json={"name": "bge", "endpoint": url})
        shell = Shell(gateway, tmp_path)
        for call in shown_calls():
            missing += await shell.check(call)
    assert missing == [], "\n".join(missing)


def test_pages_show_calls_with_answers() -> None:
    assert {call.page for call in shown_calls()} >= {"api.md", "batches.md"}
    assert len(shown_calls()) >= 10


@pytest.mark.parametrize(
    ("shown_answer", "real", "missing"),
    [
        ('{"state":"ready", ...}', '{"name":"a","state":"ready"}', []),
        ('{"state":"ready", ...}', '{"name":"a","state":"starting"}', ['state: "ready"']),
        ('{"id":"b", "usage":{...}}', '{"id":"a","usage":{}}', []),
        ('{"usage":{...}}', '{"id":"a"}', ["usage: "]),
        ('{"message":"two\n words"}', '{"message":"two words"}', []),
        (": waiting\ndata: [DONE]", "data: [DONE]\n", [": waiting"]),
        ("HTTP/1.1 404 Not Found", "HTTP/1.1 404 Not Found\r\n", []),
    ],
)
def test_a_missing_part_is_found(shown_answer: str, real: str, missing: list[str]) -> None:
    assert missing_parts(shown_answer, real) == missing


def test_a_shown_body_is_json() -> None:
    commands = [call.command for call in shown_calls() if call.command.startswith("curl ")]
    for command in commands:
        for body in re.findall(r"-d '([^']*)'", command):
            json.loads(body)
