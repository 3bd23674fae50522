// The state of a model, a replica or a start, as a dot and a word.
import { attribute, h, text } from "../dom.js";

const TONES = {
  ready: "good",
  answering: "good",
  verified: "good",
  starting: "busy",
  verifying: "busy",
  underway: "busy",
  unreachable: "bad",
  failed: "bad",
  quarantined: "bad",
  no_plan: "bad",
  refused: "bad",
  backing_off: "warn",
  "waiting for a place": "warn",
  "waiting for the model": "warn",
  "waiting for the first token": "busy",
  stopping: "idle",
  stopped: "idle",
};

const WORDS = { no_plan: "no plan", backing_off: "waits to retry", quarantined: "given up" };

const SENTENCES = {
  starting: "is starting",
  verifying: "is starting",
  backing_off: "waits to retry",
  asleep: "is waking up",
  stopped: "is not loaded",
  stopping: "is stopping",
  unreachable: "is unreachable",
  quarantined: "was given up",
  no_plan: "has no plan",
};

/** The state of a model as the end of a sentence. */
export const stateWords = (state) => SENTENCES[state] ?? `is ${state}`;

export function stateChip() {
  const word = h("span");
  const element = h(
    "span",
    { class: "state" },
    h("span", { class: "dot", "aria-hidden": "true" }),
    word,
  );
  return {
    element,
    update(state) {
      attribute(element, "data-tone", TONES[state] ?? "idle");
      text(word, WORDS[state] ?? state);
    },
    words: () => word.textContent,
  };
}
