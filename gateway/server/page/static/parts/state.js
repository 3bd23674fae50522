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

export function stateChip() {
  const word = h("span");
  const element = h("span", { class: "state" }, h("span", { class: "dot", "aria-hidden": "true" }), word);
  return {
    element,
    update(state) {
      attribute(element, "data-tone", TONES[state] ?? "idle");
      text(word, WORDS[state] ?? state);
    },
  };
}
