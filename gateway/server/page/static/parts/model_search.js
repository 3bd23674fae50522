// A search for models: those of the Hub or of this machine, and whether each fits.
import { call } from "../api.js";
import { attribute, fill, h } from "../dom.js";
import { bytes, number, plural, tokens } from "../format.js";
import { showAdvice } from "./advice.js";
import { folderBrowser } from "./folder_browser.js";
import { section, table } from "./plan.js";

const USES = [
  ["", "any use"],
  ["chat", "chat"],
  ["code", "code"],
  ["vision", "pictures"],
  ["embed", "embeddings"],
];

/** @param {{choose: (source: string) => void}} options  choose: takes a model of the results */
export function modelSearch({ choose }) {
  let pendingSearch = null;
  const query = textField("search-words", "qwen3 8b");
  const folders = textField("search-folders", "/models");
  const use = h(
    "select",
    { id: "search-use" },
    USES.map(([value, word]) => h("option", { value }, word)),
  );
  const submit = h("button", {}, "Search");
  const browser = folderBrowser({
    choose,
    search: (folder) => {
      folders.value = folder;
      folders.focus();
    },
  });
  const browse = h(
    "button",
    {
      type: "button",
      "aria-expanded": "false",
      click: () => attribute(browse, "aria-expanded", String(browser.toggle())),
    },
    "Browse folders",
  );
  const status = h("p", { class: "muted", role: "status" });
  const results = h("div", { class: "stack" });

  async function search(event) {
    event.preventDefault();
    pendingSearch?.abort();
    const request = (pendingSearch = new AbortController());
    const body = {
      words: query.value.trim(),
      use: use.value || null,
      folders: folders.value
        .split(",")
        .map((folder) => folder.trim())
        .filter(Boolean),
    };
    fill(results);
    showAdvice(status, "Models are searched, and each is planned for this machine …");
    attribute(status, "aria-busy", "true");
    try {
      const answer = await searchAloud(body, status, request.signal);
      showAdvice(status, summary(answer, body.words));
      fill(results, ...resultTables(answer.data, choose));
    } catch (error) {
      if (request.signal.aborted) return;
      showAdvice(status, error.message);
    }
  }

  return {
    element: h(
      "form",
      { class: "card", role: "search", "aria-labelledby": "search-title", submit: search },
      h("h2", { id: "search-title" }, "Find a model"),
      h(
        "div",
        { class: "fields search" },
        labelField(query, "Words", "in its name; empty: suggestions, the best first"),
        labelField(use, "Use"),
        labelField(folders, "Folders", "of this machine, searched too; with commas"),
        submit,
      ),
      h("div", { class: "row" }, browse),
      browser.element,
      status,
      results,
    ),
    close: () => {
      pendingSearch?.abort();
      browser.close();
    },
  };
}

/** The answer to a search. Meanwhile the status says how many models are planned. */
async function searchAloud(body, status, signal) {
  const name = crypto.randomUUID?.() ?? String(Math.random()).slice(2);
  const timer = setInterval(async () => {
    try {
      const state = await call("GET", `/admin/search/${name}`, undefined, { signal });
      const words = progressWords(state);
      if (words && status.getAttribute("aria-busy")) showAdvice(status, words);
    } catch {
      // The answer comes now, or its error says more.
    }
  }, PROGRESS_MS);
  try {
    return await call("POST", "/admin/search", { ...body, name }, { signal });
  } finally {
    clearInterval(timer);
    // The status belongs to the next search once this one is given up.
    if (!signal.aborted) attribute(status, "aria-busy", null);
  }
}

const PROGRESS_MS = 700;

function progressWords({ phase, place, total }) {
  if (phase === "waiting") return "Another search runs first …";
  if (phase === "searching") return "The Hub is searched …";
  if (phase === "none") return "";
  const verb = phase === "reading" ? "read" : "planned for this machine";
  return `${place} of ${plural(total, "model")} ${verb} …`;
}

function textField(id, example) {
  return h("input", {
    id,
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: example,
  });
}

function labelField(input, label, help = "") {
  const note = help && h("span", { class: "help", id: `${input.id}-help` }, help);
  if (note) attribute(input, "aria-describedby", note.id);
  return h("div", { class: "field" }, h("label", { for: input.id }, label), input, note);
}

function summary({ data, note }, words) {
  const fittingCount = data.filter((model) => model.fits).length;
  const count = data.length
    ? `Fitting this machine while no other model is loaded: ${fittingCount} of ${data.length}.`
    : `No model was found.${words ? " Other words find others." : ""}`;
  return [count, note].filter(Boolean).join(" ");
}

/** The models that fit, and folded away those that do not. */
function resultTables(models, choose) {
  const fittingModels = models.filter((model) => model.fits);
  const refused = models.filter((model) => !model.fits);
  const hasGpus = fittingModels.some((model) => model.gpus);
  const head = ["Model", "Context", "One request", ...(hasGpus ? ["GPUs"] : []), "Size", "Form"];
  const rows = fittingModels.map((model) => [
    chooser(model, choose),
    tokens(model.context),
    model.tokens_s === null ? "unknown" : `${number(model.tokens_s, 0)} tok/s`,
    ...(hasGpus ? [model.gpus ? String(model.gpus) : "CPU"] : []),
    bytes(model.weights_bytes),
    model.form,
  ]);
  return [
    fittingModels.length ? table("Models that fit", head, rows) : null,
    refused.length
      ? section(
          `These do not fit (${refused.length})`,
          table(
            "Models that do not fit",
            ["Model", "Why"],
            refused.map((model) => [model.name, model.why]),
          ),
          !fittingModels.length,
        )
      : null,
  ];
}

function chooser({ name, source }, choose) {
  const button = h(
    "button",
    { type: "button", "aria-label": `Choose ${name}`, click: () => choose(source) },
    "Choose",
  );
  return h("div", { class: "row" }, h("span", { class: "found" }, name), button);
}
