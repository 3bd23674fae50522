// An engine's log as it grows. Lines are text, whatever an engine prints.
import { pieces } from "../api.js";
import { attribute, fill, h, text } from "../dom.js";
import { showAdvice } from "./advice.js";

const TAIL = 500;
const MAX_LINES = 3000;

/** @param {string} model @param {any} choice  selects the log, in addition to the filter */
export function logView(model, choice) {
  let request = null;
  const status = h("p", { class: "muted small", role: "status" });
  const lines = h("pre", {
    class: "log",
    tabindex: "0",
    role: "region",
    "aria-label": "Engine log",
  });
  const follow = h("input", { type: "checkbox", id: "follow", checked: true });
  const filter = h("input", {
    type: "search",
    id: "filter",
    placeholder: "Filter lines",
    "aria-label": "Filter lines",
    input: () => lines.childNodes.forEach(screen),
  });

  function screen(line) {
    attribute(line, "hidden", !line.textContent.toLowerCase().includes(filter.value.toLowerCase()));
  }

  async function read(attempt) {
    request?.abort();
    const ownRequest = (request = new AbortController());
    fill(lines);
    text(status, "");
    const choiceQuery = attempt === null ? "" : `&attempt=${attempt}`;
    let line = "";
    try {
      for await (const piece of pieces(
        "GET",
        `/admin/models/${encodeURIComponent(model)}/logs?follow=true&tail=${TAIL}${choiceQuery}`,
        undefined,
        { signal: ownRequest.signal },
      )) {
        const rows = (line + piece).split("\n");
        line = rows.pop() ?? "";
        append(rows);
      }
      append(line ? [line] : []);
      text(status, lines.childNodes.length ? "The engine has ended." : "Nothing was printed.");
    } catch (error) {
      if (!ownRequest.signal.aborted) showAdvice(status, error.message);
    }
  }

  function append(rows) {
    if (!rows.length) return;
    const added = rows
      .slice(-MAX_LINES)
      .map((line) => h("div", { class: tone(line) }, line || " "));
    added.forEach(screen);
    lines.append(...added);
    while (lines.childNodes.length > MAX_LINES) lines.firstChild.remove();
    if (follow.checked) lines.scrollTop = lines.scrollHeight;
  }

  return {
    element: h(
      "div",
      { class: "stack tight" },
      h(
        "div",
        { class: "row between" },
        h("div", { class: "row" }, choice, h("div", { class: "filter" }, filter)),
        h("label", { class: "check", for: "follow" }, follow, "Follow"),
      ),
      lines,
      status,
    ),
    read,
    close: () => request?.abort(),
  };
}

function tone(line) {
  if (/\b(ERROR|CRITICAL|Traceback|\w+Error:)/.test(line)) return "bad";
  return /\bWARNING\b/.test(line) ? "warn" : null;
}
