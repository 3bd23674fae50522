// A start: its phase, with elapsed and expected time, and a bar where the time is known.
import { attribute, h, text } from "../dom.js";
import { duration } from "../format.js";

/** @param {() => number} now */
export function startBar(now) {
  const bar = h("progress", { max: "1", "aria-label": "Start" });
  const figures = h("span", { class: "muted small" });
  const element = h("div", { class: "progress", hidden: true }, bar, figures);
  return {
    element,
    update(start) {
      attribute(element, "hidden", !start);
      if (!start) return;
      const passed = start.since === null ? 0 : Math.max(0, now() - start.since);
      attribute(bar, "hidden", start.high_s === null);
      bar.value = start.high_s ? Math.min(1, passed / start.high_s) : 0;
      text(figures, startWords(start, now()));
    },
  };
}

function startWords(start, at) {
  const words = [];
  if (start.phase !== null) words.push(`${start.phase} ${duration(at - start.phase_since)}${start.phase_s ? ` of ${duration(start.phase_s)}` : ""}`);
  if (start.low_s !== null) {
    const low = duration(start.low_s);
    const high = duration(start.high_s);
    const whole = low === high ? low : `${low} to ${high}`;
    words.push(`${start.since === null ? "the start takes" : `${duration(at - start.since)} of`} ${whole} in all`);
    if (start.grade === "estimate") words.push("an estimate");
    if (start.grade === "elsewhere") words.push("measured on another machine", "without reading weights");
  }
  if (start.is_cache_empty) words.push("nothing is compiled yet");
  return words.join(", ");
}
