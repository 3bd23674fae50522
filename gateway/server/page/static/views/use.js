// A model in other programs: its address, calls to copy, and settings of apps.
import { h, text } from "../dom.js";
import { baseUrl } from "../parts/base_url.js";
import { codeBlock } from "../parts/code_block.js";
import { section } from "../parts/plan.js";
import { appSnippets, callSnippets } from "../parts/snippets.js";

const KEY = "KEY";

/** @param {any} view  of the model @param {{live: import("../live.js").Live}} context */
export function use(view, { live }) {
  const task = view.plan?.model.task ?? "generate";
  const settings = { base: baseUrl(), model: view.name, key: KEY, task };
  const key = h("p", { class: "muted" });
  const apps = task === "generate" ? appSnippets(settings) : [];
  const element = h(
    "div",
    { class: "columns" },
    h(
      "section",
      { class: "card", "aria-labelledby": "call-title" },
      h("h2", { id: "call-title" }, "Call it"),
      codeBlock("Base URL", settings.base),
      codeBlock("Model", settings.model),
      key,
      callSnippets(settings).map(snippet),
    ),
    h(
      "section",
      { class: "card", "aria-labelledby": "apps-title" },
      h("h2", { id: "apps-title" }, "Settings of apps"),
      h(
        "p",
        { class: "muted" },
        apps.length
          ? "Every app for OpenAI's API takes the base URL, the model and a key." +
              " More of these apps is in docs/apps.md."
          : "Every app for OpenAI's API takes the base URL, the model and a key: docs/apps.md.",
      ),
      apps.map((app) => section(app.title, snippet({ ...app, title: app.about }))),
    ),
  );
  return {
    element,
    update({ gateway }) {
      text(
        key,
        gateway?.keys
          ? "A key is needed in the place of KEY: make one under Keys."
          : "No key is needed: any text will do in the place of KEY.",
      );
    },
  };
}

const snippet = ({ title, text: code, about }) =>
  codeBlock(about && about !== title ? `${title} (${about})` : title, code);
