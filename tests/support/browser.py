"""A real chromium with the page, and the faults that fail a test: a console error, a request to
another host, a violation of axe-core's rules, a page wider than its window.

with chromium() as browser, visit(browser, url) as page: page.tab.click(...)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.support.patience import HANG_S, hang_s

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# Seconds after which a browser without a tab counts as hanging.
_START_S = HANG_S
# Chromium ends every request of its tabs when an address of the machine comes or goes, as with each
# container that starts. The page must still show everything.
_NETWORK_CHANGE = "net::ERR_NETWORK_CHANGED"
# The folder for pictures of the states; none are taken without it.
_PICTURES = os.environ.get("PAGE_PICTURES")
# The rules that WCAG 2.2 AA demands, and axe-core's own best practices.
_RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
_OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"
# Texts beyond the padding of their card, unless they scroll or end in dots.
_OUTSIDE = """() => [...document.querySelectorAll(".card *")].filter((one) => {
  const words = [...one.childNodes].some(
    (node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
  const card = one.closest(".card"), style = getComputedStyle(card);
  if (!words || !one.checkVisibility()) return false;
  for (let outer = one; outer !== card; outer = outer.parentElement)
    if (getComputedStyle(outer).overflowX !== "visible") return false;
  const range = document.createRange();
  range.selectNodeContents(one);
  const limit = card.getBoundingClientRect().right - parseFloat(style.paddingRight) + 1;
  return range.getBoundingClientRect().right > limit;
}).map((one) => one.textContent.slice(0, 80))"""
# Short words on links of a bar and on buttons that stand in two lines.
_BROKEN = """() => [...document.querySelectorAll("nav a, button")].filter((one) => {
  if (!one.checkVisibility() || one.textContent.trim().length > 16) return false;
  const range = document.createRange();
  range.selectNodeContents(one);
  const lines = [...range.getClientRects()].filter((line) => line.width > 0);
  return lines.some((line) => line.top >= lines[0].bottom);
}).map((one) => one.textContent)"""
# Parts of a row whose texts are drawn over one another.
_OVERLAPPING = """() => [...document.querySelectorAll(".row")].flatMap((row) => {
  const boxes = [...row.children]
    .filter((one) => one.checkVisibility() && getComputedStyle(one).overflowX === "visible")
    .map((one) => {
      const range = document.createRange();
      range.selectNodeContents(one);
      return [one.textContent.slice(0, 40), range.getBoundingClientRect()];
    });
  return boxes.filter(([, box], index) => index > 0 && box.width > 0
    && boxes[index - 1][1].right > box.left + 1 && boxes[index - 1][1].left < box.right - 1
    && boxes[index - 1][1].bottom > box.top + 1 && boxes[index - 1][1].top < box.bottom - 1,
  ).map(([text]) => text);
})"""
# Bars of tabs that hide a tab.
_CUT = """() => [...document.querySelectorAll("nav")]
  .filter((bar) => bar.checkVisibility() && bar.scrollWidth > bar.clientWidth)
  .map((bar) => bar.textContent)"""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("REQUIRE_CHROMIUM"):
            pytest.fail("there is no chromium (scripts/docker-up installs it on Debian)")
        pytest.skip("needs chromium")
    with contextlib.ExitStack() as stack:
        yield _start(path, stack)


def _start(program: str, stack: contextlib.ExitStack) -> Browser:
    """A browser that has shown an empty tab. One that hangs at its start is replaced."""
    for is_last in (False, False, True):
        attempt, timer = contextlib.ExitStack(), threading.Timer(_START_S, _kill_driver)
        timer.start()
        try:
            playwright = attempt.enter_context(sync_playwright())
            browser = playwright.chromium.launch(
                executable_path=program, args=["--no-sandbox", "--disable-gpu"]
            )
            attempt.callback(browser.close)
            browser.new_page().close()
        except Exception:
            with contextlib.suppress(Exception):
                attempt.close()
            if is_last:
                raise
            continue
        finally:
            timer.cancel()
        stack.push(attempt)
        return browser
    raise AssertionError


def _kill_driver() -> None:
    """Kill the driver; the browser ends with its driver."""
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"playwright" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)


@dataclass
class Visit:
    """A tab that was opened on the page. `expected`: words of console errors that the test brings
    about."""

    tab: Page
    url: str
    expected: tuple[str, ...] = ()
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.tab.on("console", self._console)
        self.tab.on("pageerror", lambda error: self.errors.append(f"{error}"))
        self.tab.on("request", self._request)
        self.tab.on("requestfinished", self._check_answer)
        self.tab.on("requestfailed", self._check_answer)

    def go(self, place: str = "") -> None:
        """Open a view of the page by its fragment, the part behind the #."""
        self.tab.goto(f"{self.url}/{place}")

    def sees(self, text: str) -> None:
        expect(self.tab.get_by_text(text).filter(visible=True).first).to_be_visible()

    def check(self, name: str) -> None:
        """The state that is shown is legible for everybody: at both widths, in light and dark."""
        for size, scheme in ((WIDE, "light"), (NARROW, "dark")):
            self.tab.set_viewport_size(size)  # type: ignore[arg-type]
            self.tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            if _PICTURES:
                self.tab.screenshot(
                    path=Path(_PICTURES) / f"{name}-{size['width']}.png", full_page=True
                )
            assert self.tab.evaluate(_OVERFLOW) <= 0, f"{name} is wider than {size['width']} px"
            assert not (outside := self.tab.evaluate(_OUTSIDE)), (
                f"{name}, {size['width']} px: beyond its card: {outside}"
            )
            for fault, program in (
                ("in two lines", _BROKEN),
                ("cut off", _CUT),
                ("one over the other", _OVERLAPPING),
            ):
                assert not (words := self.tab.evaluate(program)), (
                    f"{name}, {size['width']} px: {fault}: {words}"
                )
            if not self.tab.evaluate("'axe' in window"):
                self.tab.evaluate(AXE_SCRIPT)
            result = self.tab.evaluate("(rules) => axe.run(document, {runOnly: rules})", _RULES)
            wrong = [
                f"{violation['id']}: {violation['help']}: {node['html'][:200]}"
                f" {node['failureSummary']}"
                for violation in result["violations"]
                for node in violation["nodes"]
            ]
            assert not wrong, "\n".join([f"{name}, {scheme}:", *wrong])
        self.tab.set_viewport_size(WIDE)  # type: ignore[arg-type]
        self.tab.emulate_media(color_scheme="light")

    def clean(self) -> None:
        messages = (*self.expected, _NETWORK_CHANGE)
        wrong = [error for error in self.errors if not any(words in error for words in messages)]
        assert not wrong, wrong
        foreign = [request for request in self.requests if not request.startswith(self.url)]
        assert not foreign

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _request(self, request: Request) -> None:
        self.requests.append(request.url)
        self.unanswered.append(request.url)

    def _check_answer(self, request: Request) -> None:
        with contextlib.suppress(ValueError):
            self.unanswered.remove(request.url)

    def story(self) -> str:
        """The requests and errors of the tab, for a test that waited in vain."""
        return (
            f"requests: {self.requests}\nwithout an answer: {self.unanswered}\n"
            f"console: {self.errors}"
        )


@contextlib.contextmanager
def visit(browser: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """A new tab. At its end the test fails if the tab had a fault."""
    context = browser.new_context(viewport=WIDE, **options)  # type: ignore[arg-type]
    context.set_default_timeout(hang_s() * 1000)
    expect.set_options(timeout=hang_s() * 1000)
    tab = context.new_page()
    visit = Visit(tab, url)
    visit.listen()
    try:
        yield visit
        visit.clean()
    except BaseException as error:
        error.add_note(visit.story())
        raise
    finally:
        context.close()
