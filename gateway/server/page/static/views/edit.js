// The form that changes a model. It shows the differences before it applies them.
import { call } from "../api.js";
import { attribute, fill, h, text } from "../dom.js";
import { duration } from "../format.js";
import { showAdvice } from "../parts/advice.js";
import { confirm } from "../parts/dialog.js";
import { fieldErrors } from "../parts/field_errors.js";
import { note } from "../parts/notes.js";
import { differences, fieldsOf, patchOf, wishForm } from "../parts/wish_form.js";

const REST_MS = 500;

/** @param {any} view  the gateway's view of the model */
export function edit(view) {
  const path = `/admin/models/${encodeURIComponent(view.name)}`;
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const status = h("p", { class: "muted", role: "status" }, "Nothing is changed yet.");
  const rows = h("div");
  const submit = h("button", { class: "primary", disabled: true }, "Change");
  const form = wishForm({
    wish: view.wish,
    present: presentValues(view),
    fields: fieldsOf(view.wish),
    changed: () => schedulePlan(),
  });
  const errors = fieldErrors(form.inputs);
  let timer = 0;
  let submission = null;
  const formerFields = form.read();

  function schedulePlan() {
    clearTimeout(timer);
    submission?.abort();
    const patch = patchOf(formerFields, form.read());
    fill(rows);
    attribute(problem, "hidden", true);
    errors.clear();
    const isSame = !Object.keys(patch).length;
    attribute(submit, "disabled", isSame);
    text(status, isSame ? "Nothing is changed yet." : "Planning …");
    if (!isSame) timer = setTimeout(() => dryRun(patch), REST_MS);
  }

  async function dryRun(patch) {
    const request = (submission = new AbortController());
    try {
      const answer = await call("PATCH", `${path}?dry_run=true`, patch, { signal: request.signal });
      if (request.signal.aborted) return;
      showAdvice(
        status,
        answer.reason
          ? `No plan: ${answer.reason}`
          : answer.restarts_engines
            ? "New engines are started. If there is room, the old ones serve until then."
            : [
                "No engine is restarted.",
                answer.no_effect && `The plan stays: ${answer.no_effect}.`,
              ]
                .filter(Boolean)
                .join(" "),
      );
      fill(rows, differences([...answer.wish, ...answer.plan]));
    } catch (error) {
      if (!request.signal.aborted)
        showAdvice(status, errors.show(error) ? "A field has to be changed first." : error.message);
    }
  }

  async function send(event) {
    event.preventDefault();
    const patch = patchOf(formerFields, form.read());
    if (
      !(await confirm(`Change ${view.name}?`, status.textContent, {
        action: "Change",
        more: [rows.cloneNode(true)],
      }))
    )
      return;
    try {
      await call("PATCH", path, patch);
      note(`${view.name} is being changed.`);
      location.hash = `#/models/${encodeURIComponent(view.name)}`;
    } catch (error) {
      if (errors.show(error, true)) return;
      showAdvice(problem, error.message);
      attribute(problem, "hidden", false);
    }
  }

  const element = h(
    "div",
    { class: "columns" },
    h(
      "form",
      { class: "card", submit: send, "aria-label": `Edit ${view.name}` },
      form.element,
      problem,
      h("div", { class: "row end" }, submit),
    ),
    h(
      "section",
      { class: "card", "aria-labelledby": "changes" },
      h("h2", { id: "changes" }, "Changes"),
      status,
      rows,
    ),
  );
  return { element, update: form.update };
}

/** Values for the fields that the wish leaves empty: the choices of the running plan. */
function presentValues({ plan, keep_alive: keptFor }) {
  const keepAlive =
    keptFor === null || keptFor === undefined
      ? {}
      : { "policy.keep_alive": keptFor < 0 ? "for ever" : duration(keptFor) };
  if (!plan) return keepAlive;
  const chosenFields = {
    context: plan.max_model_len,
    tensor_parallel: plan.tensor_parallel,
    replicas: plan.replicas,
    dtype: plan.dtype,
    concurrency: plan.max_num_seqs,
  };
  const values = Object.entries(chosenFields)
    .filter(([, choice]) => choice)
    .map(([name, choice]) => [name, String(choice.value)]);
  return {
    ...Object.fromEntries(values),
    gpus: plan.gpus.length ? String(plan.gpus.length) : "CPU",
    engines: `${plan.engine.kind}==${plan.engine.version}`,
    ...keepAlive,
  };
}
