"""The gateway's own log."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
import structlog

from gateway.logging import configure_logging

EVIL = "\x1b]0;owned\x07\x9b2J\u202e"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _configuration() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]
    structlog.reset_defaults()


def speak(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("info")
    structlog.get_logger("fitserve.of-this-test").warning("failed", line=EVIL, names=[EVIL], reason=f"a {EVIL}")
    logging.getLogger("library").warning("said %s", EVIL)
    logging.getLogger("library").error("broke", exc_info=ValueError(EVIL))
    return stream.getvalue()


def test_what_engines_say_does_not_steer_the_terminal_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    said = speak(monkeypatch, Terminal())
    assert said.count("owned") == 5
    assert "\x1b]" not in said  # its own colours begin with another character
    assert not {"\x07", "\x9b", "\u202e"} & set(said)


def test_a_terminal_gets_lines_to_read_without_those_of_the_web_server(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("info")
    structlog.get_logger("fitserve").info("listening", url="http://127.0.0.1:1", keys=False, why="two words")
    structlog.get_logger("fitserve").warning("low")
    logging.getLogger("uvicorn.error").info("Started server process [1]")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d listening  url=http://127.0.0.1:1 keys=False why='two words'", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: low", second)


def test_json_has_what_was_said_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.loads(line) for line in speak(monkeypatch, io.StringIO()).splitlines()]
    assert [lines[0]["line"], lines[0]["names"], lines[1]["event"]] == [EVIL, [EVIL], f"said {EVIL}"]
