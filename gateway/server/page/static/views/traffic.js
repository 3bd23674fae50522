// What clients ask for and get, of the last minutes.
import { attribute, h } from "../dom.js";
import { latency, number } from "../format.js";
import { plot } from "../parts/plot.js";

const SPAN_S = 600;
const MOST_SERIES = 6;
const rate = (value) => (value === null ? "–" : `${number(value)}/s`);

/** @param {string | null} only  a model; null: the busiest ones */
export function trafficCard(only = null) {
  const plots = [
    [plot("Tokens written", rate), (flow) => flow.completion_tokens],
    [plot("Requests", rate), (flow) => flow.requests],
    [plot("First byte, 95th percentile", latency), (flow) => flow.first_p95_s],
  ];
  const empty = h("p", { class: "muted" }, "Requests show here once they are answered, while a page is open.");
  const grid = h("div", { class: "plots" }, plots.map(([one]) => one.element));
  return {
    element: h("section", { class: "card", "aria-labelledby": "traffic-title" }, h("h2", { id: "traffic-title" }, "Traffic ", h("span", { class: "muted small" }, "last 10 minutes")), empty, grid),
    update({ points, at: now }) {
      const recent = points.filter((point) => point.at > now - SPAN_S);
      const names = only === null ? busiest(recent) : [only];
      const quiet = !recent.some((point) => names.some((name) => (point.models[name]?.requests ?? 0) > 0));
      attribute(empty, "hidden", !quiet);
      attribute(grid, "hidden", quiet);
      if (quiet) return;
      const at = recent.map((point) => point.at);
      for (const [one, value] of plots) {
        one.update(at, names.map((name) => ({ name, values: recent.map((point) => (point.models[name] ? value(point.models[name]) : 0)) })), SPAN_S);
      }
    },
  };
}

function busiest(points) {
  const sums = new Map();
  for (const point of points) for (const [name, flow] of Object.entries(point.models)) sums.set(name, (sums.get(name) ?? 0) + flow.requests);
  return [...sums].filter(([, sum]) => sum > 0).sort((one, other) => other[1] - one[1]).slice(0, MOST_SERIES).map(([name]) => name).sort();
}
