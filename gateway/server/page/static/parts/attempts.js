// Every start of a model: the plan, how it ended, and the line that proves it.
import { h } from "../dom.js";
import { duration, moment, tokens } from "../format.js";
import { adviceParts } from "./advice.js";
import { stateChip } from "./state.js";
import { differences } from "./wish_form.js";

/** @param {any[]} attempts oldest first @param {(attempt: number) => void} showLog */
export function attemptList(attempts, showLog) {
  if (!attempts.length) return h("p", { class: "empty" }, "Nothing was started yet.");
  return h(
    "ol",
    { class: "attempts" },
    [...attempts]
      .reverse()
      .map((attempt) =>
        h(
          "li",
          {},
          head(attempt, showLog),
          attempt.failure && failure(attempt.failure, attempt.failed_while),
          attempt.follows && next(attempt.follows),
        ),
      ),
  );
}

function head(attempt, showLog) {
  const chip = stateChip();
  chip.update(attempt.failure ? "failed" : attempt.state);
  const until = attempt.ended_at ?? attempt.ready_at;
  const took =
    until === null
      ? null
      : attempt.ready_at !== null && attempt.ended_at !== null
        ? `served ${duration(attempt.ended_at - attempt.ready_at)}`
        : [
            attempt.ready_at === null ? "ended after" : "ready after",
            duration(until - attempt.started_at),
          ].join(" ");
  return h(
    "div",
    { class: "row between" },
    h(
      "div",
      { class: "row" },
      h("h2", {}, `Start ${attempt.id}`),
      chip.element,
      h("span", {}, attempt.engine.replace("==", " ")),
      h(
        "span",
        { class: "muted" },
        [
          `replica ${attempt.replica}`,
          `${tokens(attempt.max_model_len)} context`,
          attempt.default_differences,
          moment(attempt.started_at),
          took,
        ]
          .filter(Boolean)
          .join(" · "),
      ),
    ),
    h(
      "button",
      {
        type: "button",
        class: "quiet",
        click: () => showLog(attempt.id),
        "aria-label": `Log of start ${attempt.id}`,
      },
      "Log",
    ),
  );
}

function failure(verdict, phase) {
  return h(
    "div",
    { class: "failure" },
    h(
      "p",
      {},
      h("strong", {}, verdict.kind.replaceAll("_", " ")),
      ` while ${phase}: `,
      verdict.message,
    ),
    verdict.line &&
      h(
        "pre",
        { class: "proof", tabindex: "0", "aria-label": "The line that proves it" },
        verdict.line_number ? h("span", { class: "muted" }, `line ${verdict.line_number}  `) : null,
        verdict.line,
      ),
    verdict.advice &&
      !verdict.steps.includes(verdict.advice) &&
      h("p", { class: "muted" }, adviceParts(verdict.advice)),
    verdict.steps.length > 0 &&
      h(
        "ol",
        { class: "steps" },
        verdict.steps.map((step) => h("li", {}, adviceParts(step))),
      ),
    verdict.disturbed &&
      h("p", { class: "muted" }, `Nothing was learned from it: ${verdict.disturbed}`),
  );
}

function next(follows) {
  return h(
    "div",
    { class: "muted" },
    `Then start ${follows.attempt}, ${follows.differs.length ? "changed:" : "by the same plan."}`,
    follows.differs.length ? differences(follows.differs) : null,
  );
}
