// A small line chart of several series over time. The newest values stand beside it as text.
import { attribute, fill, h, keyed, svg, text } from "../dom.js";
import { hue } from "./memory_bar.js";

const WIDTH = 300;
const HEIGHT = 84;

/**
 * @param {string} title
 * @param {(value: number | null) => string} format
 * @returns {{element: any, update: (at: number[], series: {name: string, values: (number | null)[]}[], span: number) => void}}
 */
export function plot(title, format) {
  const lines = svg("g");
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, svg("path", { class: "grid", d: `M0 ${HEIGHT - 0.5}H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 0.5H${WIDTH}` }), lines);
  const top = h("span", { class: "muted small figure" });
  const legend = h("ul", { class: "legend" });
  return {
    element: h("figure", { class: "plot" }, h("figcaption", { class: "row between" }, h("span", { class: "label" }, title), top), chart, legend),
    update(at, series, span) {
      const highest = Math.max(0, ...series.flatMap((one) => one.values.map((value) => value ?? 0)));
      const scale = highest || 1;
      const newest = at.at(-1) ?? 0;
      text(top, highest ? format(highest) : "");
      fill(
        lines,
        series.map((one) => svg("path", { class: `line stroke-${hue(one.name)}`, d: path(at, one.values, (time) => WIDTH - ((newest - time) * WIDTH) / span, (value) => HEIGHT - 2 - (value / scale) * (HEIGHT - 6)) })),
      );
      const now = series.map((one) => ({ name: one.name, said: format(one.values.at(-1) ?? null) }));
      attribute(chart, "aria-label", `${title}: ${now.map((one) => `${one.name} ${one.said}`).join(", ") || "nothing yet"}`);
      keyed(legend, now, (one) => one.name, (one) => {
        const value = h("span", { class: "figure muted" });
        return { element: h("li", {}, h("span", { class: `swatch hue-${hue(one.name)}`, "aria-hidden": "true" }), h("span", {}, one.name), value), update: (item) => text(value, item.said) };
      });
    },
  };
}

/** A line with gaps where there is no value. */
function path(at, values, x, y) {
  let open = false;
  return values
    .map((value, place) => {
      if (value === null || value === undefined) {
        open = false;
        return "";
      }
      const step = `${open ? "L" : "M"}${x(at[place]).toFixed(1)} ${y(value).toFixed(1)}`;
      // A value alone is a dot.
      const alone = !open && (values[place + 1] === null || values[place + 1] === undefined);
      open = true;
      return alone ? `${step}h0.1` : step;
    })
    .join("");
}
