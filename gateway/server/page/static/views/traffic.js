// Requests, tokens and times to the first byte of the last minutes.
import { attribute, h } from "../dom.js";
import { clock, latency, number } from "../format.js";
import { plot, withGaps } from "../parts/plot.js";

const SPAN_S = 600;
// The gateway counts every five seconds: where a count is missing, nothing was measured.
const GAP_S = 12;
const MAX_SERIES = 6;
const rate = (value) => (value === null ? "–" : `${number(value)}/s`);

/** @param {string | null} modelName  a model; null: the busiest ones */
export function trafficCard(modelName = null) {
  // A point has only models that something happened to.
  const plots = [
    [
      plot("Tokens written", { format: rate, moment: clock }),
      (flow) => flow?.completion_tokens ?? 0,
    ],
    [plot("Requests", { format: rate, moment: clock }), (flow) => flow?.requests ?? 0],
    [
      plot("First byte, 95th percentile", { format: latency, moment: clock }),
      (flow) => flow?.first_p95_s ?? null,
    ],
  ];
  const emptyNote = h(
    "p",
    { class: "muted", hidden: true },
    "No request was answered in the last 10 minutes.",
  );
  const grid = h(
    "div",
    { class: "plots" },
    plots.map(([plot]) => plot.element),
  );
  let drawnNames = "";
  return {
    element: h(
      "section",
      { class: "card", "aria-labelledby": "traffic-title" },
      h(
        "h2",
        { id: "traffic-title" },
        "Traffic ",
        h("span", { class: "muted small" }, "last 10 minutes"),
      ),
      emptyNote,
      grid,
    ),
    update({ points, at: now, models }) {
      if (!models) return;
      const recent = points.filter((point) => point.at > now - SPAN_S);
      const names = modelName === null ? busiest(recent) : [modelName];
      const quiet = !recent.some((point) =>
        names.some((name) => (point.models[name]?.requests ?? 0) > 0),
      );
      attribute(emptyNote, "hidden", !quiet);
      attribute(grid, "hidden", quiet);
      const news = JSON.stringify([recent.at(-1)?.at, recent.length, names]);
      if (quiet || news === drawnNames) return;
      drawnNames = news;
      const drawnPoints = withGaps(recent, GAP_S);
      const at = drawnPoints.map((point) => point.at);
      for (const [plot, value] of plots) {
        const series = names.map((name) => ({
          name,
          values: drawnPoints.map(({ models }) => (models === null ? null : value(models[name]))),
        }));
        plot.update({ at, series, from: now - SPAN_S, to: now });
      }
    },
    close: () => plots.forEach(([plot]) => plot.close()),
  };
}

function busiest(points) {
  const sums = new Map();
  for (const point of points)
    for (const [name, flow] of Object.entries(point.models))
      sums.set(name, (sums.get(name) ?? 0) + flow.requests);
  return [...sums]
    .filter(([, sum]) => sum > 0)
    .sort((series, next) => next[1] - series[1])
    .slice(0, MAX_SERIES)
    .map(([name]) => name)
    .sort();
}
