// A plot of several series over time, drawn by uPlot: axes with units and times, gaps where nothing
// was measured, values under the pointer.
import { attribute, fill, h, syncChildren, text } from "../dom.js";
import { hue } from "./memory_bar.js";

const HEIGHT = 150;
const AXIS_PX = 58;
// A plot of this many pixels has room for a label of the time axis.
const LABEL_PX = 64;

let loading = null;
const library = () => (loading ??= import("../vendor/uplot.js").then((module) => module.default));

/**
 * @param {string} title
 * @param {{format: (value: number | null) => string, moment: (at: number) => string, bars?:
 *   boolean}} options
 *   format: a value with its unit; moment: a time of the axis; bars: of counts, one for each time,
 * on top of each other
 * @returns {{element: any, update: (data: {at: number[], series: {name: string, values: (number |
 *   null)[]}[], from: number, to: number}) => void, close: () => void}}
 *   at, from, to: Unix seconds; a value null: nothing was measured
 */
export function plot(title, { format, moment, bars = false }) {
  const place = h("div", { class: "canvas", role: "img" });
  const tip = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const legend = h("ul", { class: "legend" });
  const element = h(
    "figure",
    { class: "plot" },
    h("figcaption", { class: "label" }, title),
    h("div", { class: "over" }, place, tip),
    legend,
  );
  let data = null;
  let chart = null;
  let drawnNames = "";
  let uPlot = null;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => chart?.redraw(false);
  const size = new ResizeObserver(() => draw());
  size.observe(place);
  dark.addEventListener("change", redraw);

  function draw() {
    const width = place.clientWidth;
    if (!data || !uPlot || !width) return;
    const names = data.series.map((curve) => curve.name).join("\n");
    if (chart && names !== drawnNames) {
      chart.destroy();
      chart = null;
    }
    drawnNames = names;
    const values = bars ? stackSeries(data.series) : data.series.map((curve) => curve.values);
    if (!chart) chart = new uPlot(options(width), [data.at, ...values], place);
    else {
      if (chart.width !== width) chart.setSize({ width, height: HEIGHT });
      chart.setData([data.at, ...values]);
    }
  }

  function options(width) {
    const colour = (name) => () => getComputedStyle(element).getPropertyValue(name);
    const axis = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line"), width: 1 },
      font: "11px sans-serif",
    };
    const paths = bars ? uPlot.paths.bars({ size: [0.7, 48] }) : undefined;
    return {
      width,
      height: HEIGHT,
      padding: [8, bars ? LABEL_PX / 2 : 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: {
        x: { range: () => [data.from, data.to] },
        y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] },
      },
      axes: [
        {
          ...axis,
          space: LABEL_PX,
          size: 30,
          values: (_, splits) => splits.map((at) => moment(at)),
          ...(bars && { splits: () => everyDay(data.at, width) }),
        },
        {
          ...axis,
          space: 30,
          size: AXIS_PX,
          values: (_, splits) =>
            splits.map((value) =>
              value === null || (bars && !Number.isInteger(value))
                ? ""
                : format(value).replace(/\.0+(?= )/, ""),
            ),
        },
      ],
      series: [
        {},
        ...data.series.map((curve) => ({
          label: curve.name,
          stroke: colourOf(curve.name),
          width: bars ? 0 : 1.6,
          paths,
          ...(bars
            ? { fill: colourOf(curve.name), points: { show: false } }
            : { points: { filter: lonePoints } }),
        })),
      ],
      hooks: { setCursor: [point] },
    };
  }

  /** The values at the pointer, shown next to it. */
  function point({ cursor }) {
    const { idx: at, left } = cursor;
    const rows =
      at === null || at === undefined
        ? []
        : data.series.filter(
            (curve) =>
              curve.values[at] !== null &&
              curve.values[at] !== undefined &&
              !(bars && !curve.values[at]),
          );
    attribute(tip, "hidden", !rows.length || left < 0);
    if (!rows.length) return;
    fill(
      tip,
      h("p", { class: "muted" }, moment(data.at[at], true)),
      rows.map((row) => h("p", {}, swatch(row.name), `${row.name} ${format(row.values[at])}`)),
    );
    const most = place.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(most, left + AXIS_PX + 12))}px`;
  }

  return {
    element,
    update(given) {
      data = given;
      const legendRows = data.series.map((curve) => ({
        name: curve.name,
        figure: format(
          bars
            ? curve.values.reduce((sum, value) => sum + (value ?? 0), 0)
            : (curve.values.at(-1) ?? null),
        ),
      }));
      const rowWords = legendRows.map(({ name, figure }) => `${name} ${figure}`).join(", ");
      const highest = Math.max(
        0,
        ...(bars ? stackSeries(data.series) : data.series.map((curve) => curve.values))
          .flat()
          .map((value) => value ?? 0),
      );
      attribute(
        place,
        "aria-label",
        `${title}: ${rowWords || "nothing yet"}; highest ${format(highest)}`,
      );
      syncChildren(
        legend,
        legendRows,
        (legendRow) => legendRow.name,
        (legendRow) => {
          const value = h("span", { class: "figure muted" });
          return {
            element: h("li", {}, swatch(legendRow.name), h("span", {}, legendRow.name), value),
            update: (item) => text(value, item.figure),
          };
        },
      );
      if (uPlot) draw();
      else
        library().then(
          (module) => ((uPlot = module), draw()),
          () => {},
        );
    },
    close() {
      size.disconnect();
      dark.removeEventListener("change", redraw);
      chart?.destroy();
      chart = null;
      data = null;
    },
  };
}

const swatch = (name) => h("span", { class: `swatch hue-${hue(name)}`, "aria-hidden": "true" });

/** The colour of the style sheet, for a canvas. */
function colourOf(name) {
  const probe = h("span", { class: `hue-${hue(name)}`, hidden: true });
  document.body.append(probe);
  const colour = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return colour;
}

/** Sums from the last series to each: the first is drawn first, and the others over it. */
function stackSeries(series) {
  return series.map((_, first) =>
    series[first].values.map((_value, at) =>
      series.slice(first).reduce((sum, curve) => sum + (curve.values[at] ?? 0), 0),
    ),
  );
}

/** The days that have room for a label, the last among them. */
function everyDay(at, width) {
  const step = Math.max(1, Math.ceil((at.length * LABEL_PX) / Math.max(1, width - AXIS_PX)));
  return at.filter((_, place) => (at.length - 1 - place) % step === 0);
}

/** Positions of values without neighbours, which no line shows; null: every value has a point. */
function lonePoints(chart, series, isEachDrawn) {
  if (isEachDrawn) return null;
  const values = chart.data[series];
  const isEmpty = (value) => value === null || value === undefined;
  return values.flatMap((value, place) =>
    !isEmpty(value) && isEmpty(values[place - 1]) && isEmpty(values[place + 1]) ? [place] : [],
  );
}

/**
 * Points with an empty one between those that are further apart than `most` seconds, so that a line
 * breaks there.
 * @template {{at: number}} T
 * @param {T[]} points
 * @param {number} most
 * @returns {(T | {at: number, models: null})[]}
 */
export function withGaps(points, most) {
  return points.flatMap((point, place) => {
    const formerPoint = points[place - 1];
    return formerPoint && point.at - formerPoint.at > most
      ? [{ at: (formerPoint.at + point.at) / 2, models: null }, point]
      : [point];
  });
}
