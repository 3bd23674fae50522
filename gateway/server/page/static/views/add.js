// Add a model: the form, and next to it the plan, updated while you type.
import { call } from "../api.js";
import { attribute, fill, h, text } from "../dom.js";
import { showAdvice } from "../parts/advice.js";
import { fieldErrors } from "../parts/field_errors.js";
import { modelSearch } from "../parts/model_search.js";
import { decisionView } from "../parts/plan.js";
import { ENDPOINT_FIELDS, withoutEmpty, wishForm, words } from "../parts/wish_form.js";

const REST_MS = 400;

/** @param {{live: import("../live.js").Live}} context */
export function add({ live }) {
  let isNamed = false;
  let submission = null;
  let timer = 0;
  let kind = "source";
  let ownerKey = "";

  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const status = h(
    "p",
    { class: "muted", role: "status" },
    "The plan appears here as you type. Nothing is started.",
  );
  const plan = h("div", { class: "stack plan" });
  const source = h("input", {
    id: "source",
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    placeholder: "Qwen/Qwen3-8B or /models/my-model",
    "aria-describedby": "source-help",
  });
  const sourceLabel = h("label", { for: "source" }, "Model");
  const sourceHelp = h("span", { class: "help", id: "source-help" });
  const name = h("input", {
    id: "name",
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    "aria-describedby": "name-help",
  });
  const nameNote = h("p", { class: "small", role: "status" });
  const search = modelSearch({ choose: chooseModel });
  const form = wishForm({ changed: () => schedulePlan() });
  const endpointForm = wishForm({ fields: ENDPOINT_FIELDS, changed: () => schedulePlan() });
  const errors = fieldErrors(() => [
    ["name", name],
    [kind === "source" ? "source" : "endpoints", source],
    ...(kind === "source" ? form : endpointForm).inputs(),
  ]);
  const submit = h("button", { class: "primary" }, "Add");
  const kinds = ["source", "endpoint"].map((kindName) => {
    const id = `kind-${kindName}`;
    const radio = h("input", {
      type: "radio",
      name: "kind",
      id,
      value: kindName,
      checked: kindName === kind,
      change: () => ((kind = kindName), showKind(), schedulePlan()),
    });
    return h(
      "label",
      { class: "choice", for: id },
      radio,
      kindName === "source" ? "Run a model here" : "An engine that runs elsewhere",
    );
  });

  function showKind() {
    const runs = kind === "source";
    text(sourceLabel, runs ? "Model" : "Base URLs");
    text(
      sourceHelp,
      runs
        ? "a Hugging Face repository, or a folder of this machine"
        : "ending in /v1, separated by commas; fitserve never starts or stops them",
    );
    attribute(
      source,
      "placeholder",
      runs ? "Qwen/Qwen3-8B or /models/my-model" : "http://gpu-2:8000/v1",
    );
    attribute(search.element, "hidden", !runs);
    attribute(form.element, "hidden", !runs);
    attribute(endpointForm.element, "hidden", runs);
  }

  /** Takes a model that was found, and plans it. */
  function chooseModel(address) {
    source.value = address;
    if (!isNamed) name.value = nameFor(address);
    showOwner();
    schedulePlan();
    source.focus();
  }

  /** A model of this name is offered to be edited. */
  function showOwner() {
    const typedName = name.value.trim();
    const model = live.state.models?.find(
      (existing) => existing.name === typedName || existing.aliases.includes(typedName),
    );
    const key = model ? `${typedName} ${model.name}` : "";
    if (key === ownerKey) return;
    ownerKey = key;
    if (!model) return void fill(nameNote);
    const address = `#/models/${encodeURIComponent(model.name)}/edit`;
    fill(
      nameNote,
      `${typedName} is there already: `,
      h("a", { href: address, class: "inline" }, `edit ${model.name}`),
      ", or take another name.",
    );
  }

  function wish() {
    const address = source.value.trim();
    if (kind === "source")
      return { name: name.value.trim() || "plan", source: address, ...withoutEmpty(form.read()) };
    const endpoints = words(address);
    return { name: name.value.trim(), endpoints, ...withoutEmpty(endpointForm.read()) };
  }

  function schedulePlan() {
    clearTimeout(timer);
    submission?.abort();
    errors.clear();
    fill(plan);
    if (kind !== "source" || !source.value.trim()) {
      text(
        status,
        kind === "source"
          ? "The plan appears here as you type. Nothing is started."
          : "There is nothing to plan: the engine runs elsewhere.",
      );
      return;
    }
    text(status, "Planning …");
    timer = setTimeout(dryRun, REST_MS);
  }

  async function dryRun() {
    const request = (submission = new AbortController());
    try {
      const decision = await call("POST", "/admin/models?dry_run=true", wish(), {
        signal: request.signal,
      });
      if (request.signal.aborted) return;
      text(status, decision.plans.length ? "This would be started:" : "");
      fill(plan, ...decisionView(decision));
    } catch (error) {
      if (!request.signal.aborted)
        showAdvice(status, errors.show(error) ? "A field has to be changed first." : error.message);
    }
  }

  async function send(event) {
    event.preventDefault();
    attribute(problem, "hidden", true);
    attribute(submit, "disabled", true);
    try {
      const model = await call("POST", "/admin/models", wish());
      live.added.add(model.name);
      location.hash = `#/models/${encodeURIComponent(model.name)}`;
    } catch (error) {
      const isAtField = errors.show(error, true);
      showAdvice(problem, isAtField ? "" : error.message);
      attribute(problem, "hidden", isAtField);
      attribute(submit, "disabled", false);
    }
  }

  source.addEventListener("input", () => {
    if (!isNamed) name.value = nameFor(source.value);
    showOwner();
    schedulePlan();
  });
  name.addEventListener("input", () => {
    isNamed = name.value !== "";
    errors.clear();
    showOwner();
  });
  showKind();
  return {
    title: "Add a model",
    element: h(
      "div",
      { class: "stack" },
      h("h1", {}, "Add a model"),
      search.element,
      h(
        "div",
        { class: "columns" },
        h(
          "form",
          { class: "card", submit: send },
          h("fieldset", { class: "row" }, h("legend", { class: "hidden" }, "What it is"), kinds),
          h("div", { class: "field" }, sourceLabel, source, sourceHelp),
          h(
            "div",
            { class: "field" },
            h("label", { for: "name" }, "Name"),
            name,
            h("span", { class: "help", id: "name-help" }, "what clients put in `model`"),
            nameNote,
          ),
          form.element,
          endpointForm.element,
          problem,
          h("div", { class: "row end" }, h("a", { class: "button", href: "#/" }, "Cancel"), submit),
        ),
        h(
          "section",
          { class: "card", "aria-labelledby": "dry-run" },
          h("h2", { id: "dry-run" }, "Dry run"),
          status,
          plan,
        ),
      ),
    ),
    update(state) {
      form.update(state);
      showOwner();
    },
    close() {
      search.close();
      clearTimeout(timer);
      submission?.abort();
    },
  };
}

/** "Qwen/Qwen3-8B" -> "qwen3-8b" */
function nameFor(source) {
  const lastPart = source.trim().replace(/\/+$/, "").split("/").pop() ?? "";
  return lastPart
    .toLowerCase()
    .replace(/[^a-z0-9_.-]+/g, "-")
    .replace(/^[.-]+/, "")
    .slice(0, 90);
}
