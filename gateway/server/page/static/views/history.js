// What happened, with its evidence, as it happens.
import { events } from "../api.js";
import { attribute, h } from "../dom.js";
import { moment } from "../format.js";

const BEFORE = 100;
const MOST = 500;
const REST_MS = 3000;

export function history() {
  const stop = new AbortController();
  const list = h("ol", { class: "history" });
  const empty = h("p", { class: "empty" }, "Nothing has happened yet.");
  let newest = null;

  async function read() {
    while (!stop.signal.aborted) {
      const from = newest === null ? `last=${BEFORE}` : `after=${newest}`;
      try {
        for await (const data of events("GET", `/admin/events?${from}`, undefined, { signal: stop.signal })) take(JSON.parse(data));
      } catch (error) {
        if (!stop.signal.aborted) console.debug("the events ended:", error.message);
      }
      if (!stop.signal.aborted) await new Promise((go) => setTimeout(go, REST_MS));
    }
  }

  function take(event) {
    newest = event.id ?? event.newest;
    if (!event.words) return;
    attribute(empty, "hidden", true);
    list.prepend(row(event));
    while (list.childNodes.length > MOST) list.lastChild.remove();
  }

  read();
  return {
    title: "History",
    element: h("div", { class: "stack" }, h("h1", {}, "History"), h("section", { class: "card", "aria-label": "Events" }, empty, list)),
    close: () => stop.abort(),
  };
}

function row(event) {
  const evidence = Object.keys(event.data ?? {}).length ? h("details", {}, h("summary", {}, "Evidence"), h("pre", { class: "command", tabindex: "0", role: "region", "aria-label": "Evidence" }, JSON.stringify(event.data, null, 2))) : null;
  return h(
    "li",
    {},
    h("div", { class: "row" }, h("span", { class: "tag" }, event.kind.replaceAll("_", " ")), event.model && h("a", { href: `#/models/${encodeURIComponent(event.model)}` }, event.model), h("span", { class: "muted small" }, moment(event.at))),
    h("p", {}, event.words),
    evidence,
  );
}
