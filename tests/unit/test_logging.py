"""The gateway's own log."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.logging import Logger, configure_logging
from tests.support.paths import ROOT

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


def speak(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("info")
    Logger("fitserve.of-this-test").warning("failed", line=EVIL, names=[EVIL], reason=f"a {EVIL}")
    logging.getLogger("library").warning("said %s", EVIL)
    logging.getLogger("library").error("broke", exc_info=ValueError(EVIL))
    return stream.getvalue()


def test_the_words_of_engines_do_not_steer_the_terminal_of_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = speak(monkeypatch, Terminal())
    assert output.count("owned") == 5
    assert "\x1b]" not in output  # its own colours begin with another character
    assert not {"\x07", "\x9b", "\u202e"} & set(output)


def test_a_terminal_gets_lines_to_read_without_those_of_the_web_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("info")
    Logger("fitserve").info("listening", url="http://127.0.0.1:1", keys=False, why="two words")
    Logger("fitserve").warning("low")
    logging.getLogger("uvicorn.error").info("Started server process [1]")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d listening  url=http://127.0.0.1:1 keys=False why='two words'", first
    )
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: low", second)


def test_no_value_begins_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forged line would look like one of the gateway."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("info")
    Logger("fitserve.of-this-test").info("removed", model="m\n10:00:00\tkeys=none", key="\u2028k")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"model='m\n10:00:00\tkeys=none'  key='\u2028k'".replace("  ", " "))


def test_json_has_messages_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.loads(line) for line in speak(monkeypatch, io.StringIO()).splitlines()]
    assert [lines[0]["line"], lines[0]["names"], lines[1]["event"]] == [
        EVIL,
        [EVIL],
        f"said {EVIL}",
    ]


def test_a_line_has_its_own_fields_before_those_of_every_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("warning")
    log = Logger("fitserve.test")
    log.info("too low to be told")
    try:
        int("broken")
    except ValueError as error:
        log.exception("of what is handled", at=Path("/a"), share=50)
        error_in_log = error
    log.critical("100 % of %s", exc_info=error_in_log)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert list(first) == ["at", "share", "event", "logger", "level", "timestamp", "exception"]
    assert (first["at"], first["share"], first["level"], second["level"]) == (
        "PosixPath('/a')",
        50,
        "error",
        "critical",
    )
    assert second["event"] == "100 % of %s"
    assert first["exception"].startswith("Traceback")
    assert second["exception"].endswith("'broken'")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", first["timestamp"])


def test_a_command_tells_a_warning_with_its_fields_on_standard_error() -> None:
    code = (
        "from gateway.logging import Logger; Logger('fitserve.test').warning('the folder was open',"
        " mode='0o755')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (result.stdout, result.stderr[9:]) == ("", "warning: the folder was open  mode=0o755\n")
