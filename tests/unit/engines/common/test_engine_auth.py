"""The door of an engine whose endpoints for development are open: only a caller with the key comes
in, by any path."""

from __future__ import annotations

import asyncio
import runpy
import sys
from typing import Any

import pytest

from gateway.engines.common.engine_auth import (
    DEV_MODE,
    drop_dev_endpoints,
    needs_auth,
    wrap_command,
)
from tests.support.makers import plan

KEY = "0123abcd"


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the program that stands before the engine's own, which is not run."""
    lines: list[str] = []
    monkeypatch.setenv("KEY", KEY)
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: lines.append(name))
    monkeypatch.setitem(sys.modules, "fitserve_door", None)
    python, option, program, flag = wrap_command(("python3", "-m", "some.server_2"), "KEY")
    assert (python, option, flag) == ("python3", "-c", "--middleware=fitserve_door.Door")
    assert KEY not in program
    variables: dict[str, Any] = {}
    exec(program, variables)
    assert lines == ["some.server_2"]
    return variables["Door"]


def send_request(door: Any, kind: str, *headers: bytes) -> list[Any]:
    """The outcome of a request: the answer of the door, or its entry."""
    replies: list[Any] = []

    async def inside(*_: object) -> None:
        replies.append("in")

    async def send(message: dict[str, Any]) -> None:
        replies.append(message.get("status", message["type"]))

    scope = {
        "type": kind,
        "path": "/health",
        "headers": [(b"host", b"x"), *((b"authorization", value) for value in headers)],
    }
    asyncio.run(door(inside)(scope, None, send))
    return replies


def test_only_requests_with_the_key_reach_an_engine(door: Any) -> None:
    assert send_request(door, "http", f"Bearer {KEY}".encode()) == ["in"]
    assert send_request(door, "websocket", f"Bearer {KEY}".encode()) == ["in"]
    for values in (
        (),
        (b"",),
        (KEY.encode(),),
        (f"bearer {KEY}".encode(),),
        (f"Bearer {KEY}0".encode(),),
        (b"Bearer " + b"x" * 8,),
    ):
        assert send_request(door, "http", *values) == [401, "http.response.body"]
        assert send_request(door, "websocket", *values) == ["websocket.close"]
    twice = (f"Bearer {KEY}".encode(), b"Bearer other")
    assert send_request(door, "http", *twice) == [401, "http.response.body"]
    assert send_request(door, "lifespan") == ["in"]


def test_an_engine_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEY", raising=False)
    with pytest.raises(KeyError):
        exec(wrap_command(("python3", "-m", "server"), "KEY")[2], {})


@pytest.mark.parametrize(
    "command", [("python3", "server.py", "x"), ("python3", "-m", "a'b"), ("python3", "-m", "")]
)
def test_a_command_without_a_module_gets_no_authentication_layer(command: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="no place for a door"):
        wrap_command(command, "KEY")
    with pytest.raises(ValueError, match="no place for a door"):
        wrap_command(("python3", "-m", "server"), None)


def test_the_door_is_needed_if_the_endpoints_are_open() -> None:
    assert needs_auth({"VLLM_SERVER_DEV_MODE": "1"})
    assert not needs_auth({})


def test_a_start_without_a_gateway_opens_no_endpoints() -> None:
    plain = plan("3090")
    plan_with_endpoints = plain.evolve(
        argv=(*plain.argv, "--enable-sleep-mode", "--no-log-error-stack"),
        env={**plain.env, **dict([DEV_MODE])},
    )
    assert drop_dev_endpoints(plan_with_endpoints) == plain
    assert drop_dev_endpoints(plain) is plain
