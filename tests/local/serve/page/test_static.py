"""The page in a real chromium, in front of a gateway with scripted engines: every flow, at both widths, in light and dark."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from playwright.sync_api import Browser, Route, expect

from gateway.domain import LaunchSpec
from tests.support.browser import chromium, visit
from tests.support.dataplane import event
from tests.support.fake_nvml import two_3090
from tests.support.makers import LLAMA_8B, machine
from tests.support.paths import ROOT
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream

ADMIN = "page-secret-1"
ENGINES = ["vllm==0.26.0"]
FAILED_LOG = tuple((0, line) for line in (ROOT / "tests/logs/failed-000-wna16-n32-0.19.1.log").read_text().splitlines())
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def script(spec: LaunchSpec) -> EngineScript:
    if spec.model.startswith("bad"):
        return EngineScript(model=spec.model, lines=((0, HOSTILE), *FAILED_LOG), exit_code=1, serve=False)
    return EngineScript(model=spec.model, max_model_len=400_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


class Served:
    """A gateway in a thread of its own, so that the browser can be driven from this one."""

    def __init__(self, portal: BlockingPortal, one: Running) -> None:
        self._portal, self._one = portal, one
        self.url = one.url

    def add(self, name: str, source: Path, **fields: Any) -> None:
        self._portal.call(lambda: self._one.add(name, source, engines=ENGINES, gpus=1, **fields))

    def until(self, name: str, state: str) -> None:
        self._portal.call(self._one.until, name, state)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._portal.call(lambda: self._one.client.request(method, path, json=body))
        assert answer.status_code < 300, answer.text
        return answer.json()

    def enter(self, manager: Any) -> Any:
        return self._portal.wrap_async_context_manager(manager)


@contextlib.contextmanager
def gateway(folder: Path, **settings: Any) -> Iterator[Served]:
    hardware, nvml = machine("2x3090"), two_3090()
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(running(folder, script, hardware=hardware, nvml=nvml, **settings)) as one,
    ):
        if settings.get("admin_key"):
            one.client.headers["authorization"] = f"Bearer {settings['admin_key']}"
        yield Served(portal, one)


def llama(folder: Path) -> Path:
    return model_folder(folder, **{**LLAMA_8B, "max_position_embeddings": 8192})


def test_a_model_is_added_changed_stopped_started_and_deleted(tmp_path: Path, browser: Browser) -> None:
    source = llama(tmp_path / "my-Llama")
    with gateway(tmp_path) as one, visit(browser, one.url) as page:
        tab = page.tab
        page.go()
        page.sees("No model yet.")
        page.sees("GeForce RTX 3090")
        page.check("empty")
        tab.get_by_role("link", name="Add a model").first.click()
        # While one types, what was asked before is given up.
        plans: list[str] = []
        tab.on(
            "requestfinished",
            lambda request: plans.append(request.post_data or "") if request.url.endswith("/admin/plan") else None,
        )
        tab.get_by_text("Engine and plan").click()
        tab.get_by_label("Engines").fill(ENGINES[0])
        tab.get_by_label("Model", exact=True).press_sequentially(str(source), delay=0)
        page.sees("This would be started:")
        assert [json.loads(plan)["source"] for plan in plans] == [str(source)]
        expect(tab.get_by_label("Name", exact=True)).to_have_value("my-llama")
        tab.locator("summary", has_text="Why").click()
        page.sees("the dtype of the weights")
        page.check("add")
        tab.get_by_label("Name", exact=True).fill("m")
        tab.get_by_role("button", name="Add").click()
        expect(tab.get_by_role("heading", name="m", exact=True)).to_be_visible()
        page.sees("0 of 256 requests at once")
        page.check("model")
        # A change is shown before it is made.
        tab.get_by_role("link", name="Edit").click()
        tab.get_by_text("Engine and plan").click()
        tab.get_by_label("Most context").fill("2048")
        page.sees("Engines are started anew")
        page.check("edit")
        tab.get_by_role("button", name="Change").click()
        dialog = tab.get_by_role("dialog")
        expect(dialog).to_contain_text("2048")
        page.check("edit-confirm")
        dialog.get_by_role("button", name="Change").click()
        one.until("m", "ready")
        page.sees("2k context")
        tab.get_by_role("link", name="Starts").click()
        page.sees("Start 2")
        # Escape says no.
        tab.get_by_role("button", name="Stop").click()
        tab.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        tab.get_by_role("button", name="Stop").click()
        dialog.get_by_role("button", name="Stop").click()
        tab.get_by_role("button", name="Start", exact=True).click()
        page.sees("Start 3")
        tab.get_by_role("button", name="Delete").click()
        page.check("delete-confirm")
        dialog.get_by_role("button", name="Delete").click()
        page.sees("No model yet.")
        page.expected = ("404",)  # it was gone while its view was open


def test_a_start_that_fails_shows_its_proof_and_what_an_engine_prints_is_text(tmp_path: Path, browser: Browser) -> None:
    with gateway(tmp_path) as one, visit(browser, one.url) as page:
        one.add("bad-model", llama(tmp_path / "model"), policy={"max_attempts": 1})
        one.until("bad-model", "quarantined")
        page.go("#/models/bad-model/starts")
        page.sees("no kernel")
        page.sees("Failed to find a kernel that can implement the WNA16 linear layer")
        page.check("starts")
        page.tab.get_by_role("button", name="Log of start 1").click()
        page.sees(HOSTILE)
        page.tab.get_by_label("Filter lines").fill("alert(2)")
        expect(page.tab.locator(".log > div:visible")).to_have_count(1)
        assert page.tab.locator("main img, main script").count() == 0
        page.check("log")
        page.tab.get_by_role("link", name="History").click()
        page.tab.locator("summary", has_text="Evidence").first.click()
        page.sees("no_kernel")
        page.check("history")
        page.go()
        page.sees("given up")
        page.tab.get_by_role("link", name="bad-model").first.click()
        expect(page.tab.get_by_role("button", name="Try again now")).to_be_visible()


def test_a_key_is_asked_for_once_made_shown_once_and_removed(tmp_path: Path, browser: Browser) -> None:
    with gateway(tmp_path, admin_key=ADMIN) as one, visit(browser, one.url) as page:
        page.expected = ("401",)
        tab, dialog = page.tab, page.tab.get_by_role("dialog")
        page.go("#/keys")
        expect(dialog).to_contain_text("This gateway needs a key")
        page.check("key-asked")
        tab.get_by_label("Key", exact=True).fill("wrong")
        tab.keyboard.press("Enter")
        expect(dialog).to_contain_text("is not one of this gateway")
        tab.get_by_label("Key", exact=True).fill(ADMIN)
        tab.keyboard.press("Enter")
        page.sees("from the settings")
        expect(dialog).to_have_count(0)
        tab.get_by_label("Name").fill("app-1")
        tab.get_by_label("Requests per minute").fill("60")
        tab.get_by_role("button", name="Make key").click()
        made = dialog.get_by_label("Key", exact=True).input_value()
        assert made.startswith("fs-")
        page.check("key-made")
        dialog.get_by_role("button", name="Done").click()
        page.sees("60 requests per minute")
        page.check("keys")
        assert made not in tab.content()
        tab.reload()
        page.sees("app-1")
        assert tab.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 1, ""]
        tab.get_by_role("button", name="Remove the key app-1").click()
        dialog.get_by_role("button", name="Remove").click()
        expect(tab.get_by_text("The key app-1 is removed.")).to_be_visible()
        expect(tab.get_by_role("button", name="Remove the key app-1")).to_have_count(0)


async def talks(call: Call) -> None:
    """Thinks, calls a tool, and says what the tool answered."""
    if call.head[0].startswith(b"GET"):
        await call.reply(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
        return
    asked = json.loads(call.body)
    await call.start()
    answers = [message["content"] for message in asked["messages"] if message["role"] == "tool"]
    if asked.get("tools") and not answers:
        function = {"name": "calculate", "arguments": '{"a": 6, "b": 7, '}
        await call.chunk(_delta({"reasoning_content": "It is a product."}))
        await call.chunk(_delta({"tool_calls": [{"index": 0, "id": "call-1", "type": "function", "function": function}]}))
        rest = {"arguments": '"operation": "multiply"}'}
        await call.chunk(_delta({"tool_calls": [{"index": 0, "function": rest}]}))
    elif asked["messages"][-1]["content"] == "for ever":
        await call.chunk(event("It begins"))
        await call.closed.wait()
        return
    else:
        for word in ("The answer is ", *answers, HOSTILE):
            await call.chunk(event(word))
    await call.chunk(b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}}\n\n')
    await call.chunk(b"data: [DONE]\n\n")
    await call.end()


def _delta(delta: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode() + b"\n\n"


def test_a_chat_streams_thinks_calls_tools_and_can_be_stopped(tmp_path: Path, browser: Browser) -> None:
    with gateway(tmp_path) as one, one.enter(Upstream(talks)) as upstream, visit(browser, one.url) as page:
        one.ask("POST", "/admin/models", {"name": "m", "endpoints": [f"{upstream.url}/v1"]})
        one.until("m", "ready")
        tab = page.tab
        page.go("#/chat")
        tab.get_by_text("Options").click()
        tab.get_by_label("Offer two tools").check()
        tab.get_by_label("Message").fill("What is 6 times 7?")
        tab.keyboard.press("Enter")
        page.sees(f"The answer is 42{HOSTILE}")
        page.sees('calculate({"a": 6, "b": 7, "operation": "multiply"})')
        page.sees("12 tokens")
        tab.get_by_text("Thoughts").filter(visible=True).click()
        page.sees("It is a product.")
        page.check("chat")
        page.tab.get_by_role("link", name="Usage").click()
        page.sees("no key")
        page.check("usage")
        page.go("#/chat")
        tab.get_by_label("Message").fill("for ever")
        tab.get_by_role("button", name="Send").click()
        page.sees("It begins")
        tab.get_by_role("button", name="Stop").click()
        page.sees("Stopped.")
        page.go("#/models/m")
        page.sees(upstream.url)
        page.check("endpoint")


def replica(**fields: Any) -> dict[str, Any]:
    made = {"index": 0, "state": "starting", "detail": "", "phase": "loading weights", "progress": None, "attempt": 7}
    made |= {
        "started_at": 999_940.0,
        "ready_at": None,
        "engine": "vllm==0.26.0",
        "grade": "checked",
        "gpus": ["GPU-a", "GPU-b"],
    }
    return made | {"context": 131072, "bytes": 70 << 30, "in_flight": 0, "at_once": 256} | fields


def model(name: str, state: str, detail: str, **fields: Any) -> dict[str, Any]:
    made = {"name": name, "aliases": [], "source": f"org/{name}", "state": state, "detail": detail, "created_at": 1.0}
    made |= {"used_at": None, "stopped": False, "deleting": False, "change": None, "better": False, "running": 0, "waiting": 0}
    return made | {"replicas": [replica(state=state)], "endpoints": []} | fields


def busy_state() -> dict[str, Any]:
    """Eight GPUs, of which one is lost, and models in every state."""
    gigabyte = 1 << 30
    loading = {"done": 21 * gigabyte, "total": 63 * gigabyte, "rate": 300.0 * (1 << 20)}
    bringing = replica(phase="Downloading org/new", progress=loading, engine=None, gpus=[])
    models = [
        model(
            "serves", "ready", "", running=12, waiting=3, replicas=[replica(state="ready", ready_at=900_000.0, in_flight=12)]
        ),
        model(
            "a-model-with-a-name-that-is-as-long-as-names-may-be-" + "x" * 44, "backing_off", "OutOfMemory. Next start in 20 s."
        ),
        model("new", "starting", "Downloading org/new: 21 GiB of 63 GiB (33 %)", replicas=[bringing]),
        model("sleeper", "stopped", "nobody asked for it for 5 minutes", replicas=[]),
        model("given-up", "quarantined", HOSTILE),
    ]
    gpus = [
        {
            "index": index,
            "uuid": f"GPU-{'abcdefgh'[index]}",
            "name": "NVIDIA H200",
            "capability": "9.0",
            "total": 141 * gigabyte,
        }
        | {"used": (index * 17) * gigabyte, "unified": False, "lost": None, "kept": None, "holders": [], "processes": []}
        for index in range(8)
    ]
    for gpu in gpus[:2]:
        gpu["holders"] = [{"model": one["name"], "replica": 0, "planned": 40 * gigabyte} for one in models[:2]]
    gpus[2]["processes"] = [{"pid": 4242, "name": "python", "bytes": 34 * gigabyte}]
    gpus[6]["lost"] = "Xid 79 (GPU has fallen off the bus)."
    about = {"cpu": "AMD EPYC 9654", "cores": 192, "ram_total": 2048 * gigabyte, "ram_used": 512 * gigabyte, "disk_free": None}
    flows = [
        {"at": 999_700.0 + 5 * step, "models": {name: {"requests": 2 + step % 5, "refused": 0, "prompt_tokens": 90, "completion_tokens": 400 + 40 * (step % 7) * rank, "first_p50_s": 0.1, "first_p95_s": 0.2 * rank} for rank, name in enumerate(("serves", "new"), 1)}}
        for step in range(60)
    ]  # fmt: skip
    return {
        "at": 1_000_000.0,
        "gateway": {"version": "0.1.0", "host": "docker", "workers": 1, "problems": ["The disk is full."], "keys": False},
        "models": models,
        "machine": about | {"driver": "580.95.05", "cuda": "13.0", "notes": [], "holders": [], "gpus": gpus},
        "points": flows,
    }


def told(state: dict[str, Any]) -> Callable[[Route], None]:
    """Answers for the stream."""
    body = f"data: {json.dumps(state)}\n\n"
    return lambda route: route.fulfill(body=body, headers={"content-type": "text/event-stream"})


def test_a_large_machine_in_trouble_is_legible(tmp_path: Path, browser: Browser) -> None:
    with gateway(tmp_path) as one, visit(browser, one.url) as page:
        page.tab.clock.install(time=1_000_000)
        page.tab.route("**/admin/live", told(busy_state()))
        page.go()
        page.sees("12 requests, 3 waiting")
        page.sees("21 GiB of 63 GiB, 300 MiB/s, 2 min 23 s left")
        page.sees("Xid 79 (GPU has fallen off the bus).")
        page.sees("used by python (4242, 34 GiB)")
        page.sees(HOSTILE)
        assert page.tab.get_by_role("img", name="Tokens written: new").count() == 1
        page.check("busy")


def test_the_keyboard_alone_does_and_a_connection_that_is_lost_is_told(tmp_path: Path, browser: Browser) -> None:
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(gateway(tmp_path))
        page = stack.enter_context(visit(browser, one.url))
        page.go()
        page.sees("No model yet.")
        page.sees("Live")
        tab = page.tab
        focused = "document.activeElement.textContent.trim()"
        tab.keyboard.press("Tab")
        assert tab.evaluate(focused) == "Skip to content"
        while tab.evaluate(focused) != "Keys":
            tab.keyboard.press("Tab")
        tab.keyboard.press("Enter")
        page.sees("There is no key")
        assert tab.evaluate("document.activeElement.id") == "main"
        # A tab that nobody sees costs nothing: its stream is closed, and comes back.
        page.expected = ("ERR_", "404")
        tab.route("**/admin/live", lambda route: route.abort())
        tab.go_back()
        tab.reload()
        page.sees("Connecting")
        tab.unroute("**/admin/live")
        page.sees("Live")


def test_a_visit_that_goes_wrong_is_told(browser: Browser, tmp_path: Path) -> None:
    """What the other tests count on."""
    with gateway(tmp_path) as one:
        for wrong, words in (
            ("console.error('broken')", "broken"),
            ("setTimeout(() => { throw new Error('thrown') })", "thrown"),
            ("document.body.append(Object.assign(new Image(), {src: 'http://localhost:9/x.png'}))", "Content Security Policy"),
            ("document.body.setAttribute('style', 'color: red')", "Content Security Policy"),
        ):
            with pytest.raises(AssertionError, match=words), visit(browser, one.url) as page:
                page.go()
                page.sees("Live")
                page.tab.evaluate(wrong)
                while not page.errors:
                    page.tab.wait_for_timeout(10)
        with visit(browser, one.url) as page:
            page.go()
            page.sees("Live")
            page.tab.evaluate("document.querySelector('#main').append(document.createElement('input'))")
            with pytest.raises(AssertionError, match="label"):
                page.check("wrong")
