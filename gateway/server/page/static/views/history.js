// Events with their evidence as they come, of all models and days, or of one.
import { call, events } from "../api.js";
import { attribute, fill, h, syncChildren, text } from "../dom.js";
import { clock, plural } from "../format.js";
import { adviceParts } from "../parts/advice.js";
import { attempt } from "../parts/notes.js";

const MAX_ROWS = 1000;
const REST_MS = 3000;

/** @param {{live: import("../live.js").Live}} context */
export function history() {
  const stop = new AbortController();
  const list = h("div", { class: "stack" });
  const emptyNote = h("p", { class: "empty", hidden: true });
  const older = h(
    "p",
    { class: "muted small", hidden: true },
    `These are the newest ${plural(MAX_ROWS, "event")}. Older ones: fitserve events.`,
  );
  const model = h("select", { id: "history-model", change: () => show() });
  const day = h("select", { id: "history-day", change: () => show() });
  /** Newest first. */
  let entries = [];
  let newestId = 0;

  async function read() {
    await attempt(async () => {
      const {
        data,
        newest: last,
        oldest,
      } = await call("GET", `/admin/events?follow=false&last=${MAX_ROWS}`, undefined, {
        signal: stop.signal,
      });
      newestId = last;
      entries = [...data].reverse();
      attribute(older, "hidden", !data.length || data[0].id <= oldest);
      show();
    });
    while (!stop.signal.aborted) {
      try {
        for await (const data of events("GET", `/admin/events?after=${newestId}`, undefined, {
          signal: stop.signal,
        }))
          addEntry(JSON.parse(data));
      } catch (error) {
        if (!stop.signal.aborted) console.debug("the events ended:", error.message);
      }
      if (!stop.signal.aborted) await new Promise((resume) => setTimeout(resume, REST_MS));
    }
  }

  function addEntry(event) {
    newestId = event.id ?? event.newest;
    if (!event.words) return;
    entries = [event, ...entries].slice(0, MAX_ROWS);
    show();
  }

  function show() {
    const names = new Set(entries.map((entry) => entry.model).filter(Boolean));
    choose(model, "All models", [...names].sort());
    const byDay = Map.groupBy(entries, dayOf);
    choose(day, "All days", [...byDay.keys()]);
    const days = [...byDay]
      .filter(([name]) => !day.value || name === day.value)
      .map(([name, rows]) => ({
        name,
        rows: rows.filter((row) => !model.value || row.model === model.value),
      }))
      .filter(({ rows }) => rows.length);
    text(
      emptyNote,
      entries.length ? "Nothing happened to this model on this day." : "Nothing has happened yet.",
    );
    attribute(emptyNote, "hidden", days.length > 0);
    syncChildren(list, days, (day) => day.name, dayList);
  }

  read();
  return {
    title: "History",
    element: h(
      "div",
      { class: "stack" },
      h("h1", {}, "History"),
      h(
        "div",
        { class: "row" },
        h(
          "div",
          { class: "row whole choose" },
          h("label", { for: "history-model" }, "Model"),
          model,
        ),
        h("div", { class: "row whole choose" }, h("label", { for: "history-day" }, "Day"), day),
      ),
      h("section", { class: "card", "aria-label": "Events" }, emptyNote, list, older),
    ),
    close: () => stop.abort(),
  };
}

/** The choices of a filter. The chosen one stays. */
function choose(select, allLabel, names) {
  const choices = ["", ...names];
  if ([...select.options].map((option) => option.value).join("\n") === choices.join("\n")) return;
  const chosenName = select.value;
  fill(
    select,
    choices.map((name) => h("option", { value: name }, name || allLabel)),
  );
  select.value = choices.includes(chosenName) ? chosenName : "";
}

const DAY = new Intl.DateTimeFormat([], { dateStyle: "full" });
const dayOf = (event) => DAY.format(event.at * 1000);

function dayList({ name }) {
  const rows = h("ol", { class: "history" });
  return {
    element: h("section", {}, h("h2", {}, name), rows),
    update: (day) =>
      syncChildren(
        rows,
        day.rows,
        (event) => String(event.id),
        (event) => ({ element: row(event), update() {} }),
      ),
  };
}

function row(event) {
  const evidence = Object.keys(event.data ?? {}).length
    ? h(
        "details",
        {},
        h("summary", {}, "Evidence"),
        h(
          "pre",
          {
            class: "command",
            tabindex: "0",
            role: "group",
            "aria-label": `Evidence of event ${event.id}`,
          },
          JSON.stringify(event.data, null, 2),
        ),
      )
    : null;
  return h(
    "li",
    {},
    h(
      "div",
      { class: "row" },
      h("span", { class: "muted figure" }, clock(event.at, true)),
      event.model && h("a", { href: `#/models/${encodeURIComponent(event.model)}` }, event.model),
      h("span", { class: "tag" }, event.kind.replace(/[._]/g, " ")),
    ),
    h("p", {}, adviceParts(event.words)),
    evidence,
  );
}
