// Memory of one GPU or of the machine: planned by model, and in use.
import { h, syncChildren, text } from "../dom.js";
import { bytes } from "../format.js";

const HUES = 8;
const hues = new Map();

/** A model keeps its colour as long as the page is open. */
export function hue(model) {
  if (!hues.has(model)) hues.set(model, hues.size % HUES);
  return hues.get(model);
}

/**
 * @returns {{element: any, update: (memory: {total: number | null, used: number | null, holders:
 *   {model: string, replica: number, planned: number}[]}) => void}}
 */
export function memoryBar() {
  const segments = h("div", { class: "segments" });
  const used = h("div", { class: "used" });
  const bar = h("div", { class: "bar", role: "img" }, segments, used);
  const legend = h("ul", { class: "legend" });
  return {
    element: h("div", { class: "memory" }, bar, legend),
    update({ total, used: usedBytes, holders }) {
      const share = (size) => (total ? `${Math.min(100, (100 * size) / total)}%` : "0%");
      const keyedHolders = holders.map((holder) => ({
        ...holder,
        key: `${holder.model} ${holder.replica}`,
      }));
      syncChildren(
        segments,
        keyedHolders,
        (holder) => holder.key,
        (holder) => {
          const element = h("div", { class: `segment hue-${hue(holder.model)}` });
          return { element, update: (now) => (element.style.width = share(now.planned)) };
        },
      );
      used.hidden = usedBytes === null;
      if (usedBytes !== null) used.style.width = share(usedBytes);
      const planned = keyedHolders.reduce((sum, holder) => sum + holder.planned, 0);
      bar.setAttribute(
        "aria-label",
        [
          usedBytes === null ? null : `${bytes(usedBytes)} of ${bytes(total)} used`,
          planned
            ? `${bytes(planned)} planned for ${keyedHolders.map(({ model }) => model).join(", ")}`
            : "nothing planned",
        ]
          .filter(Boolean)
          .join("; "),
      );
      syncChildren(
        legend,
        keyedHolders,
        (holder) => holder.key,
        (holder) => {
          const size = h("span", { class: "figure" });
          const element = h(
            "li",
            {},
            h("span", { class: `swatch hue-${hue(holder.model)}`, "aria-hidden": "true" }),
            h("a", { href: `#/models/${encodeURIComponent(holder.model)}` }, holder.model),
            size,
          );
          return { element, update: (now) => text(size, bytes(now.planned)) };
        },
      );
    },
  };
}
