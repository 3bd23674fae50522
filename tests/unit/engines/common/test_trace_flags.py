"""Flags of an engine's own traces, as the profile of each version lists them."""

from __future__ import annotations

import pytest

from gateway.domain import Flag
from gateway.engines.common.trace_flags import (
    drop_trace_arguments,
    trace_arguments,
    trace_environment,
)
from gateway.profiles.profiles import Profiles
from tests.support.makers import engine
from tests.support.versions import SGLANG, VLLM

URL = "http://collector:4317"
TRACED = engine(flags={"otlp-traces-endpoint": Flag(type="str"), "enable-trace": Flag(type="bool")})


@pytest.mark.parametrize("version", VLLM)
def test_vllm_gets_its_collector(version: str) -> None:
    arguments = trace_arguments(Profiles().engine(f"vllm=={version}"), URL)
    assert arguments == (f"--otlp-traces-endpoint={URL}",)


@pytest.mark.parametrize("version", SGLANG)
def test_sglang_gets_its_switch_and_collector(version: str) -> None:
    arguments = trace_arguments(Profiles().engine(f"sglang=={version}"), URL)
    assert arguments == ("--enable-trace", f"--otlp-traces-endpoint={URL}")


def test_an_engine_without_the_flag_or_without_a_collector_gets_nothing() -> None:
    assert trace_arguments(engine(), URL) == trace_arguments(TRACED, "") == ()
    assert trace_environment(engine(), URL) == trace_environment(TRACED, "") == {}
    assert trace_environment(TRACED, URL) == {"OTEL_SERVICE_NAME": TRACED.kind}


def test_only_the_very_arguments_are_dropped() -> None:
    items = trace_arguments(TRACED, URL)
    assert drop_trace_arguments(TRACED, ("a", *items, "b"), URL) == ("a", "b")
    for argv in (
        ("a", "--otlp-traces-endpoint=http://evil:4317", "b"),
        ("a", "--enable-trace"),
        (*items[::-1],),
        (),
    ):
        assert drop_trace_arguments(TRACED, argv, URL) == argv
    assert drop_trace_arguments(TRACED, ("a", *items), "") == ("a", *items)
