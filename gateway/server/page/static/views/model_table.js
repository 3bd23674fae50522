// All models: state, engine, requests, and actions.
import { attribute, h, syncChildren, text } from "../dom.js";
import { duration, addsNothing, plural, tokens } from "../format.js";
import { showAdvice } from "../parts/advice.js";
import { baseUrlLine } from "../parts/base_url.js";
import { progressBar, transferName } from "../parts/progress.js";
import { startView } from "../parts/start.js";
import { stateChip } from "../parts/state.js";

const CHANGES = { underway: "It is being changed.", refused: "The last change was given up." };

/** @param {import("../live.js").Live} live */
export function modelTable(live) {
  const rows = h("ul", { class: "models" });
  const emptyNote = h(
    "div",
    { class: "empty", hidden: true },
    h("p", {}, "No model yet."),
    h("a", { class: "button primary", href: "#/add" }, "Add a model"),
  );
  const address = baseUrlLine();
  const count = h("span", { class: "muted" });
  return {
    element: h(
      "section",
      { class: "card", "aria-labelledby": "models-title" },
      h(
        "div",
        { class: "row between" },
        h("h2", { id: "models-title" }, "Models ", count),
        h("a", { class: "button primary", href: "#/add" }, "Add a model"),
      ),
      emptyNote,
      rows,
      address,
    ),
    update({ models }) {
      if (!models) return;
      text(count, models.length || "");
      attribute(emptyNote, "hidden", models.length > 0);
      attribute(address, "hidden", !models.length);
      syncChildren(
        rows,
        models,
        (model) => model.name,
        () => modelRow(live),
      );
    },
  };
}

function modelRow(live) {
  const name = h("a", { class: "name" });
  const chip = stateChip();
  const detail = h("p", { class: "detail" });
  const progress = progressBar(() => live.now());
  const start = startView(() => live.now(), { short: true });
  const engine = h("span", { class: "muted" });
  const load = h("span", { class: "figure" });
  const age = h("span", { class: "muted" });
  return {
    element: h(
      "li",
      { class: "model" },
      h("div", { class: "who" }, name, engine),
      h("div", { class: "now" }, chip.element, detail, progress.element, start.element),
      h("div", { class: "load" }, load, age),
    ),
    update(model) {
      attribute(name, "href", `#/models/${encodeURIComponent(model.name)}`);
      text(name, model.name);
      chip.update(model.deleting ? "stopping" : model.state);
      const progressWords = model.replicas.find((replica) => replica.progress)?.progress ?? null;
      progress.update(progressWords);
      const starting = model.replicas.find((replica) => replica.start);
      start.update(progressWords ? null : (starting?.start ?? null));
      const words =
        model.state === "ready" ? "" : progressWords ? transferName(model.detail) : model.detail;
      const isShown = addsNothing(
        words,
        chip.words(),
        start.element.hidden ? "" : start.element.textContent,
      );
      showAdvice(
        detail,
        [
          isShown ? "" : words,
          CHANGES[model.change],
          model.better && "Another plan should be better.",
        ]
          .filter(Boolean)
          .join(" "),
      );
      attribute(detail, "hidden", !detail.textContent);
      text(engine, describe(model));
      text(
        load,
        [
          model.running && plural(model.running, "request"),
          model.waiting && `${model.waiting} waiting`,
        ]
          .filter(Boolean)
          .join(", ") || (model.state === "ready" ? "idle" : ""),
      );
      const readySince = Math.min(...model.replicas.map((replica) => replica.ready_at ?? Infinity));
      text(
        age,
        model.state === "ready" && Number.isFinite(readySince)
          ? `up ${duration(live.now() - readySince)}`
          : "",
      );
    },
  };
}

function describe(model) {
  const replica = model.replicas.find((replica) => replica.engine) ?? null;
  if (model.endpoints.length) return plural(model.endpoints.length, "endpoint");
  if (!replica) return model.source ?? "";
  const gpus = replica.gpus.length ? ` on ${plural(replica.gpus.length, "GPU")}` : "";
  const copies = model.replicas.length > 1 ? `${model.replicas.length} × ` : "";
  const engine = replica.engine.replace("==", " ");
  return `${copies}${engine}${gpus} · ${tokens(replica.context)} context`;
}
