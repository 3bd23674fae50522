// A start: its phases as steps, with elapsed and expected time, and a bar where the time is known.
import { attribute, h, syncChildren, text } from "../dom.js";
import { bytes, duration, addsNothing } from "../format.js";
import { transferName } from "./progress.js";
import { stateWords } from "./state.js";

/**
 * The phases that ended, the one that runs, and those that are expected; one line where there is no
 * room for them.
 * @param {() => number} now
 * @param {{short?: boolean}} [options]
 */
export function startView(now, { short = false } = {}) {
  const list = h("ol", { class: "phases", "aria-label": "Phases of the start" });
  const bar = h("progress", { max: "1", "aria-label": "Start" });
  const figures = h("span", { class: "muted small" });
  const element = h(
    "div",
    { class: "stack tight start", hidden: true },
    list,
    h("div", { class: "progress" }, bar, figures),
  );
  return {
    element,
    update(start) {
      attribute(element, "hidden", !start);
      if (!start) return;
      const elapsedS = start.since === null ? 0 : Math.max(0, now() - start.since);
      attribute(list, "hidden", short || !start.steps.length);
      if (!short)
        syncChildren(
          list,
          start.steps,
          (step) => step.phase,
          () => stepRow(now),
        );
      attribute(bar, "hidden", start.high_s === null);
      bar.value = start.high_s ? Math.min(1, elapsedS / start.high_s) : 0;
      text(
        figures,
        [short ? phaseWords(start, now()) : "", wholeWords(start, now())]
          .filter(Boolean)
          .join(", "),
      );
    },
  };
}

function stepRow(now) {
  const name = h("span");
  const time = h("span", { class: "figure muted" });
  const element = h("li", {}, name, " ", time);
  return {
    element,
    update(step) {
      const state = step.took_s !== null ? "done" : step.since !== null ? "now" : "next";
      attribute(element, "data-step", state);
      attribute(element, "aria-current", state === "now" ? "step" : null);
      text(name, step.phase);
      const usual = step.expected_s ? duration(step.expected_s) : "";
      if (state === "done") text(time, duration(step.took_s));
      else if (state === "now")
        text(time, `${duration(now() - step.since)}${usual && ` of ${usual}`}`);
      else text(time, usual);
    },
  };
}

/** "loading weights 12 s of 30 s"; "": no phase is known. */
function phaseWords(start, at) {
  const step = start.steps.find((step) => step.since !== null);
  return step
    ? [step.phase, duration(at - step.since), step.expected_s && `of ${duration(step.expected_s)}`]
        .filter(Boolean)
        .join(" ")
    : "";
}

function wholeWords(start, at) {
  const words = [];
  if (start.low_s !== null) {
    const low = duration(start.low_s);
    const high = duration(start.high_s);
    const seconds = low === high ? low : `${low} to ${high}`;
    words.push(
      start.since === null
        ? `the start takes ${seconds} in all`
        : `${duration(at - start.since)} of ${seconds} in all`,
    );
    if (start.grade === "estimate") words.push("an estimate");
    if (start.grade === "elsewhere")
      words.push("measured on another machine", "without reading weights");
  }
  if (start.is_cache_empty)
    words.push(
      start.low_s === null
        ? "a first start, so its time is unknown"
        : "slower than later ones, as nothing is compiled yet",
    );
  return words.join(", ");
}

/**
 * The thing that a request to a model waits for: "waiting: a is starting (loading weights 41 s)".
 * @param {any} model  of the live state
 * @param {number} at  the gateway's clock
 * @param {number} since  when the request was sent
 */
export function waitWords(model, at, since) {
  const elapsed = duration(at - since);
  if (model.state === "ready") return `waiting for the first token, ${elapsed}`;
  const { replicas } = model;
  const replica = replicas.find(({ progress, start }) => progress || start) ?? replicas[0];
  const transfer =
    replica?.progress &&
    [
      transferName(replica.phase),
      `${bytes(replica.progress.done)} of ${bytes(replica.progress.total)}`,
    ].join(": ");
  const phase =
    transfer ||
    (replica?.start && phaseWords(replica.start, at)) ||
    (model.state === "asleep" ? "" : model.detail);
  const state = stateWords(model.state);
  const phaseNote = phase && !addsNothing(phase, state) ? ` (${phase})` : "";
  return `waiting: ${model.name} ${state}${phaseNote}, ${elapsed}`;
}
