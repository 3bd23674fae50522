// Requests and tokens of each of the last 30 days, by model or by key.
import { call } from "../api.js";
import { attribute, fill, h } from "../dom.js";
import { number } from "../format.js";
import { attempt } from "../parts/notes.js";
import { table } from "../parts/plan.js";
import { plot } from "../parts/plot.js";

const DAY_S = 86400;
const MOST_SERIES = 7;
const COUNTS = [
  ["requests", "Requests"],
  ["prompt_tokens", "Prompt tokens"],
  ["cached_tokens", "of these cached"],
  ["completion_tokens", "Tokens written"],
];
const PLOTS = [
  ["completion_tokens", "Tokens written"],
  ["prompt_tokens", "Prompt tokens"],
  ["requests", "Requests"],
];

export function usage() {
  const status = h("p", { class: "muted" }, "Reading …");
  const content = h("div", { class: "stack", hidden: true });
  const by = h(
    "select",
    { id: "usage-by", change: () => show() },
    [
      ["model", "model"],
      ["key", "key"],
    ].map(([value, word]) => h("option", { value }, word)),
  );
  const plots = PLOTS.map(([field, title]) => [
    plot(title, { format: (value) => number(value, 0), moment: day, bars: true }),
    field,
  ]);
  const rows = h("div");
  let report = null;

  function show() {
    const days = everyDay(report.first, report.last);
    const name = (row) => (by.value === "key" ? row.key || "no key" : row.model);
    for (const [plot, field] of plots) {
      plot.update({
        at: days,
        series: sums(report.data, name, field, days),
        from: days[0] - DAY_S / 2,
        to: days.at(-1) + DAY_S / 2,
      });
    }
    fill(
      rows,
      table("Usage", ["Model", "Key", ...COUNTS.map(([, word]) => word)], totals(report.data)),
    );
  }

  attempt(async () => {
    report = await call("GET", "/admin/usage?by=day,model,key");
    fill(
      status,
      report.data.length ? `${report.first} to ${report.last}, days of UTC` : "No requests yet.",
    );
    attribute(content, "hidden", !report.data.length);
    if (report.data.length) show();
  });
  fill(
    content,
    h("div", { class: "row whole choose" }, h("label", { for: "usage-by" }, "By"), by),
    h(
      "div",
      { class: "plots" },
      plots.map(([plot]) => plot.element),
    ),
    rows,
  );
  return {
    title: "Usage",
    element: h(
      "div",
      { class: "stack" },
      h("h1", {}, "Usage"),
      h("div", { class: "card" }, status, content),
    ),
    close: () => plots.forEach(([plot]) => plot.close()),
  };
}

/** The Unix time in seconds at which a day begins in UTC, such as "2026-11-29". */
const secondsOf = (date) => Date.parse(`${date}T00:00:00Z`) / 1000;

const day = (at) =>
  new Date(at * 1000).toLocaleDateString([], { timeZone: "UTC", month: "short", day: "numeric" });

function everyDay(first, last) {
  const days = [];
  for (let at = secondsOf(first); at <= secondsOf(last); at += DAY_S) days.push(at);
  return days;
}

/** A series for each of the busiest names, and one for all others. */
function sums(data, nameOf, field, days) {
  const total = new Map();
  for (const row of data) total.set(nameOf(row), (total.get(nameOf(row)) ?? 0) + row[field]);
  const busiest = [...total]
    .sort((series, next) => next[1] - series[1])
    .slice(0, MOST_SERIES)
    .map(([name]) => name);
  const remainder = total.size > busiest.length ? ["all others"] : [];
  const places = new Map(days.map((at, place) => [at, place]));
  const series = new Map([...busiest, ...remainder].map((name) => [name, days.map(() => 0)]));
  for (const row of data) {
    const values = series.get(nameOf(row)) ?? series.get("all others");
    values[places.get(secondsOf(row.day))] += row[field];
  }
  return [...series].map(([name, values]) => ({ name, values }));
}

/** The rows of the table: one for each model and key. */
function totals(data) {
  const countsByName = new Map();
  for (const row of data) {
    const name = JSON.stringify([row.model, row.key]);
    const counts = countsByName.get(name) ?? COUNTS.map(() => 0);
    countsByName.set(
      name,
      COUNTS.map(([field], place) => counts[place] + row[field]),
    );
  }
  return [...countsByName].map(([name, counts]) => {
    const [model, key] = JSON.parse(name);
    return [model, key || "no key", ...counts.map((count) => number(count, 0))];
  });
}
