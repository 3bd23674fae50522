"""The chat of the page in a real chromium: answers as Markdown, hostile answers, settings, messages
that are written anew, pictures, and the store of a browser."""

from __future__ import annotations

import contextlib
import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, FilePayload, Locator, Route, expect

from tests.support.browser import Visit, visit
from tests.support.dataplane import event
from tests.support.page_gateway import HOSTILE, gateway
from tests.support.page_states import busy_state, model, replica, telling
from tests.support.upstream import Call, Upstream

RICH = f"""# A title

Some *soft*, **loud** and `inline` words, ~~gone~~ &amp; 1 &lt; 2, [a link](https://example.org/a).
A second line.

- one
- two
  1. inner
- [x] done

| name | |
|------|--:|
| a | {HOSTILE} |

> quoted
> words

```python
def f(x):
    return "<b>" + x

print(f("*"))
```

![a picture](https://example.org/x.png)

[A badge: ![passing](https://example.org/badge.svg)](https://example.org/build)

---

The end."""
# The first pixel of a picture, by its address with data.
PIXEL = """async (url) => {
  const data = Uint8Array.from(atob(url.split(",")[1]), (one) => one.charCodeAt(0));
  const canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
  pen.drawImage(await createImageBitmap(new Blob([data])), 0, 0);
  return [...pen.getImageData(0, 0, 1, 1).data];
}"""
# Whether the page takes a picture that is pasted, beside a text or alone.
PASTE = """(words) => {
  const data = new DataTransfer();
  data.items.add(new File(["x"], "x.png", { type: "image/png" }));
  if (words) data.setData("text/plain", words);
  const event = new ClipboardEvent("paste", { clipboardData: data, cancelable: true });
  return !document.querySelector("#chat-ask").dispatchEvent(event);
}"""
# The page's rendering of answers, and nothing else.
TAGS = frozenset(
    re.findall(
        r"\w+",
        "A BLOCKQUOTE BR BUTTON CODE DEL DIV EM FIGCAPTION FIGURE HR LI OL P PRE SPAN STRONG TABLE"
        " TBODY TD TH THEAD TR UL",
    )
)
ELEMENTS = """() => [...document.querySelectorAll(".markdown *")].map((one) => ({
  tag: one.tagName, href: one.getAttribute("href"),
  names: one.getAttributeNames().filter((name) => name.startsWith("on") || name === "style")}))"""
TRAP = """window.hits = []; window.hit = (one) => window.hits.push(one ?? "called");
window.alert = hit; document.addEventListener("securitypolicyviolation",
  (violation) => hit(`${violation.violatedDirective} ${violation.blockedURI}`));"""
ATTACKS = (
    HOSTILE,
    "[a](javascript:hit())",
    "[a](JaVaScRiPt:hit())",
    "[a](java\tscript:hit())",
    "[a](&#106;avascript:hit())",
    "[a](&#x6A;avascript&colon;hit())",
    "[a](data:text/html,<script>hit()</script>)",
    "[a](vbscript:hit())",
    "[a](blob:http://localhost/x)",
    "[a](//evil.example/x)",
    "[a](/admin/models)",
    "<javascript:hit()>",
    "![a](javascript:hit())",
    "![a](http://evil.example/x.png)",
    '![a](x "onerror=hit()")',
    '[a](http://evil.example/" onclick="hit())',
    "[a]: javascript:hit()\n\n[a]",
    "```html onload=hit()\n<script>hit()</script>\n```",
    '```"><img src=x onerror=hit()>\nx\n```',
    "| <img src=x onerror=hit()> |\n|--|\n| <svg onload=hit()> |",
    "<iframe srcdoc='<script>parent.hit()</script>'></iframe>",
    "<style>*{display:none}</style>",
    "<form action=javascript:hit()><button>x</button></form>",
    "# <script>hit()</script>",
    "- <details ontoggle=hit() open>",
    "> <body onload=hit()>",
    "<math><a xlink:href=javascript:hit()>x</a></math>",
    "&lt;img src=x onerror=hit()&gt;",
    "__proto__ [constructor](constructor) [toString]",
)
# Texts that take a parser of Markdown long, or as deep as a stack is.
LONG = {
    "deep": ">" * 20_000 + " end",
    "emphasis": "_a" * 30_000 + " end",
    "brackets": "[" * 30_000 + " end",
    "lists": "\n".join(" " * depth + "- a" for depth in range(200)) + " end",
    "links": "[a](" * 5_000 + " end",
}


def chunks(text: str, size: int) -> Iterator[bytes]:
    return (event(text[at : at + size]) for at in range(0, len(text), size))


class Talker:
    """An engine that says `answer` in pieces of `size` letters, and keeps its requests."""

    def __init__(self, answer: str = "Fine.", size: int = 10**9) -> None:
        self.answer, self.size = answer, size
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, call: Call) -> None:
        if call.head[0].startswith(b"GET"):
            await call.reply(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
            return
        self.requests.append(json.loads(call.body))
        await call.start()
        for piece in chunks(self.answer, self.size):
            await call.chunk(piece)
        await call.chunk(
            b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
        )
        await call.chunk(
            b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 12}}\n\n'
        )
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()


@contextlib.contextmanager
def chatting(folder: Path, browser: Browser, talker: Talker) -> Iterator[Visit]:
    """The chat of the model `m`, which the talker answers."""
    with (
        gateway(folder) as server,
        server.enter(Upstream(talker)) as upstream,
        visit(browser, server.url) as page,
    ):
        server.ask("POST", "/admin/models", {"name": "m", "endpoints": [f"{upstream.url}/v1"]})
        server.until("m", "ready")
        page.tab.add_init_script(TRAP)
        page.go("#/chat")
        expect(page.tab.get_by_role("combobox", name="Model")).to_have_value("m")
        yield page


def say(page: Visit, words: str) -> Locator:
    """The answer to a message, once it is complete."""
    messages = page.tab.locator(".message")
    before = messages.count()
    page.tab.get_by_label("Message", exact=True).fill(words)
    page.tab.keyboard.press("Enter")
    expect(messages).to_have_count(before + 2)
    answer = messages.last
    expect(answer.get_by_role("button", name="Again")).to_be_visible()
    return answer


def test_an_answer_is_shown_as_markdown_and_its_code_is_copied(
    tmp_path: Path, browser: Browser
) -> None:
    talker = Talker(RICH, size=3)
    with chatting(tmp_path, browser, talker) as page:
        answer = say(page, "Be rich.")
        expect(answer.locator(".heading")).to_have_text("A title")
        expect(answer.locator("p").filter(has_text="Some soft, loud")).to_contain_text(
            "inline words, gone & 1 < 2, a link. A second line."
        )
        expect(answer.locator("ul > li")).to_have_count(3)
        expect(answer.locator("ul ol > li")).to_have_text("inner")
        expect(answer.locator("ul > li").last).to_have_text("☑ done")
        expect(answer.locator("tbody td").last).to_have_text(HOSTILE)
        expect(answer.locator("blockquote")).to_have_text("quoted words")
        expect(answer.locator("pre code")).to_have_text(
            'def f(x):\n    return "<b>" + x\n\nprint(f("*"))', use_inner_text=True
        )
        link = answer.get_by_role("link", name="a link")
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        expect(answer.get_by_role("link", name="a picture")).to_be_visible()
        badge = answer.get_by_role("link", name="A badge: passing")
        assert badge.get_attribute("href") == "https://example.org/build"
        expect(answer.get_by_role("link")).to_have_count(3)
        expect(answer.get_by_role("button", name="Copy python")).to_be_visible()
        expect(answer.locator(".actions")).to_contain_text("12 tokens")
        page.check("chat-markdown")
        # The same text in one piece gives the same result.
        streamed = answer.locator(".markdown").inner_html()
        talker.size = 10**9
        answer = say(page, "Once more.")
        assert answer.locator(".markdown").inner_html() == streamed
        assert page.tab.evaluate("hits") == []


def test_a_hostile_answer_becomes_text(tmp_path: Path, browser: Browser) -> None:
    talker = Talker("\n\n".join(ATTACKS), size=7)
    with chatting(tmp_path, browser, talker) as page:
        for attack in (talker.answer, *ATTACKS):
            talker.answer = attack
            say(page, "Attack.")
        # A reader clicks whatever there is.
        page.tab.evaluate(
            "document.querySelectorAll('.markdown :not(a, button)').forEach((one) => one.click())"
        )
        elements = page.tab.evaluate(ELEMENTS)
        assert {element["tag"] for element in elements} <= TAGS
        assert not [element for element in elements if element["names"]]
        assert {element["href"].split(":")[0] for element in elements if element["href"]} <= {
            "http",
            "https",
        }
        assert page.tab.evaluate("hits") == []
        # The kept conversation is as harmless.
        page.tab.reload()
        expect(page.tab.locator(".message")).to_have_count(2 * len(ATTACKS) + 2)
        page.sees("<style>*{display:none}</style>")
        assert {element["tag"] for element in page.tab.evaluate(ELEMENTS)} <= TAGS
        assert page.tab.evaluate("hits") == []


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_an_answer_that_is_hard_to_read_is_shown_too(
    tmp_path: Path, browser: Browser, text: str
) -> None:
    with chatting(tmp_path, browser, Talker(text, size=len(text) // 50)) as page:
        answer = say(page, "Be long.")
        expect(answer.locator(".markdown")).to_contain_text("end")
        assert page.tab.evaluate("hits") == []


def test_settings_of_a_chat_are_sent_and_kept_until_it_is_cleared(
    tmp_path: Path, browser: Browser
) -> None:
    talker = Talker()
    with chatting(tmp_path, browser, talker) as page:
        tab = page.tab
        tab.get_by_text("Options").click()
        tab.get_by_label("System prompt").fill("Be short.")
        tab.get_by_label("Temperature").fill("0.2")
        tab.get_by_label("Most tokens").fill("64")
        tab.get_by_label("Stop at").fill("END\n###")
        page.check("chat-options")
        say(page, "Hello")
        [body] = talker.requests
        assert body["messages"] == [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hello"},
        ]
        assert (body["temperature"], body["max_tokens"], body["stop"]) == (
            0.2,
            64,
            ["END", "###"],
        )
        tab.reload()
        expect(tab.locator(".message")).to_have_count(2)
        page.sees("12 tokens")
        say(page, "And now?")
        assert [message["content"] for message in talker.requests[-1]["messages"]] == [
            "Be short.",
            "Hello",
            "Fine.",
            "And now?",
        ]
        assert talker.requests[-1]["temperature"] == 0.2
        # Another chat has a conversation of its own.
        page.go("#/models/m/chat")
        page.sees("Ask something.")
        tab.get_by_text("Options").click()
        expect(tab.get_by_label("Temperature")).to_have_value("")
        page.go("#/chat")
        tab.get_by_role("button", name="Clear").click()
        page.sees("Ask something.")
        tab.get_by_text("Options").click()
        for label in ("System prompt", "Temperature", "Most tokens", "Stop at"):
            tab.get_by_label(label).fill("")
        assert tab.evaluate("Object.keys(localStorage)") == []


def test_a_message_is_rewritten_and_its_answer_requested_again(
    tmp_path: Path, browser: Browser
) -> None:
    talker = Talker()
    with chatting(tmp_path, browser, talker) as page:
        tab = page.tab
        say(page, "first")
        say(page, "second")
        messages = tab.locator(".message")
        messages.first.get_by_role("button", name="Edit").click()
        expect(tab.get_by_label("Message", exact=True)).to_have_value("first")
        page.sees("The messages after this one are replaced.")
        page.check("chat-edit")
        tab.get_by_role("button", name="Cancel").click()
        expect(messages).to_have_count(4)
        messages.first.get_by_role("button", name="Edit").click()
        tab.get_by_label("Message", exact=True).fill("other")
        tab.get_by_role("button", name="Send").click()
        expect(messages).to_have_count(2)
        expect(messages.last.get_by_role("button", name="Again")).to_be_visible()
        assert [message["content"] for message in talker.requests[-1]["messages"]] == ["other"]
        talker.answer = "Better."
        messages.last.get_by_role("button", name="Again").click()
        page.sees("Better.")
        expect(messages).to_have_count(2)
        assert talker.requests[-1]["messages"] == [{"role": "user", "content": "other"}]


def test_an_answer_asked_for_again_ends_the_edit_of_a_later_message(
    tmp_path: Path, browser: Browser
) -> None:
    with chatting(tmp_path, browser, Talker()) as page:
        tab = page.tab
        for words in ("first", "second", "third"):
            say(page, words)
        messages = tab.locator(".message")
        ask = tab.get_by_label("Message", exact=True)
        ask.fill("A draft.")
        messages.nth(4).get_by_role("button", name="Edit").click()
        messages.nth(1).get_by_role("button", name="Again").click()
        expect(messages).to_have_count(2)
        expect(messages.last.get_by_role("button", name="Again")).to_be_visible()
        expect(tab.get_by_text("The messages after this one are replaced.")).to_be_hidden()
        expect(ask).to_have_value("A draft.")
        say(page, "next")
        tab.reload()
        expect(messages).to_have_count(4)
        page.sees("next")


def test_calls_of_tools_that_are_counted_from_one_leave_no_hole(
    tmp_path: Path, browser: Browser
) -> None:
    called = {"index": 1, "id": "c1", "function": {"name": "current_time", "arguments": "{}"}}
    delta = {"choices": [{"index": 0, "delta": {"tool_calls": [called]}}]}
    first = f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n"
    last = b"".join((*chunks("It is late.", 5), b"data: [DONE]\n\n"))
    requests: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        requests.append(json.loads(route.request.post_data or ""))
        body = first if len(requests) == 1 else last
        route.fulfill(body=body, content_type="text/event-stream")

    with chatting(tmp_path, browser, Talker()) as page:
        page.tab.route("**/v1/chat/completions", answer)
        page.tab.get_by_label("Message", exact=True).fill("What time is it?")
        page.tab.keyboard.press("Enter")
        page.sees("It is late.")
        assert [message["role"] for message in requests[1]["messages"]] == [
            "user",
            "assistant",
            "tool",
        ]
        assert [message["id"] for message in requests[1]["messages"][1]["tool_calls"]] == ["c1"]
        page.tab.reload()
        page.sees("It is late.")


def test_a_conversation_that_finds_no_room_is_reported(tmp_path: Path, browser: Browser) -> None:
    with chatting(tmp_path, browser, Talker()) as page:
        page.tab.evaluate(
            """() => { for (let size = 1 << 23; size; size >>= 1)
              try { localStorage.setItem(`full-${size}`, "x".repeat(size)); } catch {} }"""
        )
        say(page, "Hello")
        page.sees("This browser has no room for this conversation")


def picture(side: int, *, is_clear: bool = False) -> bytes:
    """A square as a PNG, red or transparent."""

    def part(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    kind, pixel = (6, b"\0\0\0\0") if is_clear else (2, b"\xff\0\0")
    head = struct.pack(">IIBBBBB", side, side, 8, kind, 0, 0, 0)
    rows = (b"\0" + pixel * side) * side
    return (
        b"\x89PNG\r\n\x1a\n"
        + part(b"IHDR", head)
        + part(b"IDAT", zlib.compress(rows))
        + part(b"IEND", b"")
    )


@contextlib.contextmanager
def showing(folder: Path, browser: Browser) -> Iterator[tuple[Visit, list[dict[str, Any]]]]:
    """The chat of a model that sees and one that reads only, and the bodies of its requests."""
    ready = [replica(state="ready", phase=None, ready_at=1.0)]
    state = busy_state() | {
        "models": [
            model("sees", "ready", "", replicas=ready, inputs=["text", "image"]),
            model("reads", "ready", "", replicas=ready),
        ]
    }
    requests: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        requests.append(json.loads(route.request.post_data or ""))
        body = b"".join((*chunks("A red square.", 5), b"data: [DONE]\n\n"))
        route.fulfill(body=body, content_type="text/event-stream")

    with (
        gateway(folder) as server,
        server.enter(telling(state)) as tells,
        visit(browser, server.url) as page,
    ):
        page.tab.route("**/admin/live", tells)
        page.tab.route("**/v1/chat/completions", answer)
        page.go("#/chat")
        yield page, requests


def test_a_picture_goes_to_a_model_that_sees(tmp_path: Path, browser: Browser) -> None:
    with showing(tmp_path, browser) as (page, requests):
        tab = page.tab
        add = tab.get_by_role("button", name="Add a picture")
        tab.get_by_role("combobox", name="Model").select_option("reads")
        expect(add).to_be_hidden()
        tab.get_by_role("combobox", name="Model").select_option("sees")
        expect(add).to_be_visible()
        tab.locator("#chat-images").set_input_files(
            [
                FilePayload(name=name, mimeType="image/png", buffer=data)
                for name, data in (
                    ("red.png", picture(8)),
                    ("large.png", picture(3000)),
                    ("text.png", b"no picture"),
                )
            ]
        )
        page.sees("text.png is not a picture that this browser can read.")
        expect(tab.get_by_role("img", name="red.png")).to_be_visible()
        page.check("chat-picture")
        say(page, "What is it?")
        page.sees("A red square.")
        parts = requests[0]["messages"][0]["content"]
        assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
        assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo")
        assert parts[1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
        tab.reload()
        expect(tab.locator(".message").get_by_role("img", name="red.png")).to_be_visible()
        assert tab.evaluate(
            "(() => { const one = document.querySelector('.message canvas');"
            " return [...one.getContext('2d').getImageData(2, 2, 1, 1).data] })()"
        ) == [255, 0, 0, 255]


def test_transparent_parts_are_white_and_a_pasted_table_is_text(
    tmp_path: Path, browser: Browser
) -> None:
    with showing(tmp_path, browser) as (page, requests):
        tab = page.tab
        tab.get_by_role("combobox", name="Model").select_option("sees")
        expect(tab.get_by_role("button", name="Add a picture")).to_be_visible()
        tab.locator("#chat-images").set_input_files(
            FilePayload(name="clear.png", mimeType="image/png", buffer=picture(3000, is_clear=True))
        )
        expect(tab.get_by_role("img", name="clear.png")).to_be_visible()
        say(page, "And this?")
        url = requests[-1]["messages"][-1]["content"][0]["image_url"]["url"]
        assert tab.evaluate(PIXEL, url) == [255, 255, 255, 255]
        assert not tab.evaluate(PASTE, "A table as text.")
        assert tab.evaluate(PASTE, "")
        page.sees("x.png is not a picture that this browser can read.")
