// A transfer: a bar with its bytes, its rate and the time that is left.
import { attribute, h, text } from "../dom.js";
import { bytes, duration } from "../format.js";

// Seconds over which a rate is measured here, where the gateway reports none.
const SPAN_S = 20;

/**
 * @param {() => number} now
 * @returns {{element: any, update: (progress: {done: number, total: number, rate: number | null} |
 *   null) => void}}
 */
export function progressBar(now) {
  const bar = h("progress", { max: "1", "aria-label": "Transferred" });
  const figures = h("span", { class: "figure muted small" });
  const element = h("div", { class: "progress", hidden: true }, bar, figures);
  let samples = [];
  return {
    element,
    update(progress) {
      attribute(element, "hidden", !progress);
      if (!progress) return void (samples = []);
      samples = [
        ...samples.filter((sample) => sample.at > now() - SPAN_S && sample.done <= progress.done),
        { at: now(), done: progress.done },
      ];
      bar.value = progress.total ? progress.done / progress.total : 0;
      const rate = progress.rate ?? rateOf(samples);
      const left = rate
        ? `, ${bytes(rate)}/s, ${duration((progress.total - progress.done) / rate)} left`
        : "";
      text(figures, `${bytes(progress.done)} of ${bytes(progress.total)}${left}`);
    },
  };
}

/** "Downloading org/name: 1 GiB of 9 GiB" -> "Downloading org/name", next to its bar. */
export const transferName = (words) => (words ?? "").split(": ")[0];

/** Bytes per second; null: not known yet. */
function rateOf(samples) {
  const [first, last] = [samples[0], samples.at(-1)];
  return last.at - first.at >= 2 && last.done > first.done
    ? (last.done - first.done) / (last.at - first.at)
    : null;
}
