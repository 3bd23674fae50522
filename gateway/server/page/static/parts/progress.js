// How far something is: a bar where that is known, with its rate and the time that is left; else words alone.
import { attribute, h, text } from "../dom.js";
import { bytes, duration } from "../format.js";

/** @returns {{element: any, update: (progress: {done: number, total: number, rate: number | null} | null) => void}} */
export function progressBar() {
  const bar = h("progress", { max: "1", "aria-label": "Downloaded" });
  const figures = h("span", { class: "figure muted small" });
  const element = h("div", { class: "progress", hidden: true }, bar, figures);
  return {
    element,
    update(progress) {
      attribute(element, "hidden", !progress);
      if (!progress) return;
      bar.value = progress.total ? progress.done / progress.total : 0;
      const left = progress.rate ? `, ${bytes(progress.rate)}/s, ${duration((progress.total - progress.done) / progress.rate)} left` : "";
      text(figures, `${bytes(progress.done)} of ${bytes(progress.total)}${left}`);
    },
  };
}
