// Budgets of keys and groups: the used share of each limit, and the form that sets them.
import { call } from "../api.js";
import { attribute, h } from "../dom.js";
import { duration, number } from "../format.js";
import { showAdvice } from "./advice.js";
import { show } from "./dialog.js";
import { fieldErrors } from "./field_errors.js";

const MEASURES = [
  ["requests", "Requests", "1"],
  ["tokens", "Tokens", "1"],
  ["gpu_seconds", "GPU seconds", "any"],
  ["money", "Money", "any"],
];
const LABELS = Object.fromEntries(MEASURES.map(([measure, label]) => [measure, label]));
const PERIODS = ["day", "month"];

/**
 * The used share, the remainder and the end of each limit; null: there is none.
 * @param {any} owner  a key or a group @param {string} currency
 */
export function budgetMeters(owner, currency) {
  const isSoft = owner.budget?.is_soft;
  const meters = (owner.used ?? []).map((use) => meter(use, { currency, isSoft }));
  return meters.length ? h("ul", { class: "budget" }, meters) : null;
}

function meter({ measure, period, used: amount, limit, ends_at: end }, { currency, isSoft }) {
  const unit = measure === "money" ? currency || "money" : LABELS[measure].replace(/^[RT]/, lower);
  const share = `${number(amount)} of ${number(limit)} ${unit} of this ${period}`;
  const resetS = (new Date(end).getTime() - Date.now()) / 1000;
  const facts = [
    `${number(Math.max(0, limit - amount))} left`,
    `starts over in ${duration(resetS)}`,
    ...(isSoft ? ["warns only"] : []),
  ];
  return h(
    "li",
    {},
    h("span", { class: "figure small" }, share),
    h("progress", {
      max: "1",
      value: Math.min(1, amount / limit),
      "aria-label": share,
      class: amount >= limit ? "spent" : null,
    }),
    h("span", { class: "muted small" }, facts.join(", ")),
  );
}

const lower = (letter) => letter.toLowerCase();

/**
 * Asks for the limits, and replaces the budget by them.
 * @param {string} owner  such as "the key app" @param {string} path  of the budget in the API
 * @param {any} budget  the present one, null without one
 * @returns {Promise<boolean>} whether it was changed
 */
export async function editBudget(owner, path, budget) {
  const limits = MEASURES.flatMap(([measure, label, step]) =>
    PERIODS.map((period) => {
      const field = `${measure}_per_${period}`;
      const input = h("input", {
        id: `budget-${field}`,
        type: "number",
        min: "0",
        step,
        placeholder: "no limit",
        value: budget?.[field] ?? "",
      });
      return [field, input, `${label} per ${period}`];
    }),
  );
  const warning = h("input", {
    id: "budget-warn",
    type: "number",
    min: "1",
    max: "100",
    value: budget?.warn_percent ?? 80,
  });
  const soft = h("input", { id: "budget-soft", type: "checkbox", checked: budget?.is_soft });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const errors = fieldErrors(() => [
    ...limits.map(([field, input]) => [field, input]),
    ["warn_percent", warning],
  ]);

  async function send(event, close) {
    event.preventDefault();
    errors.clear();
    attribute(problem, "hidden", true);
    const amounts = limits.filter(([, input]) => input.value);
    try {
      await call("PUT", path, {
        ...Object.fromEntries(amounts.map(([field, input]) => [field, Number(input.value)])),
        ...(warning.value && { warn_percent: Number(warning.value) }),
        is_soft: soft.checked,
      });
      close(true);
    } catch (error) {
      if (errors.show(error, true)) return;
      showAdvice(problem, error.message);
      attribute(problem, "hidden", false);
    }
  }

  const isChanged = await show(`Budget of ${owner}`, (close) => [
    h(
      "form",
      { class: "stack", submit: (event) => send(event, close) },
      h("p", { class: "muted" }, "Days and months of UTC. What is used stays."),
      h(
        "div",
        { class: "fields" },
        limits.map(([, input, label]) =>
          h("div", { class: "field" }, h("label", { for: input.id }, label), input),
        ),
        h(
          "div",
          { class: "field" },
          h("label", { for: "budget-warn" }, "Warn at percent"),
          warning,
        ),
      ),
      h(
        "label",
        { class: "check", for: "budget-soft" },
        soft,
        h("span", {}, "Only warn: a spent budget refuses no request"),
      ),
      problem,
      h(
        "div",
        { class: "row end" },
        h("button", { type: "button", click: () => close(false) }, "Cancel"),
        h("button", { class: "primary" }, "Set budget"),
      ),
    ),
  ]);
  return isChanged === true;
}
