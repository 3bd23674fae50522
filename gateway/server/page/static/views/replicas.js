// The engines of one model as they are now: state, GPUs, and the requests that they work on.
import { attribute, h, syncChildren, text } from "../dom.js";
import { bytes, duration, isSaid, plural, tokens } from "../format.js";
import { progressBar, transferName } from "../parts/progress.js";
import { startView } from "../parts/start.js";
import { stateChip } from "../parts/state.js";

/** @param {import("../live.js").Live} live @param {string} name */
export function replicaCard(live, name) {
  const list = h("ul", { class: "replicas" });
  const waiting = h("span", { class: "muted small" });
  const element = h(
    "section",
    { class: "card", "aria-labelledby": "replicas-title", hidden: true },
    h("h2", { id: "replicas-title" }, "Now ", waiting),
    list,
  );
  return {
    element,
    update({ machine }) {
      const model = live.model(name);
      if (!model) return;
      const rows = [
        ...model.replicas.map((replica) => ({ ...replica, key: `replica ${replica.index}` })),
        ...model.endpoints.map((endpoint) => ({ ...endpoint, key: endpoint.url })),
      ];
      attribute(element, "hidden", !rows.length);
      text(waiting, model.waiting ? `${plural(model.waiting, "request")} waiting` : "");
      syncChildren(
        list,
        rows,
        (row) => row.key,
        (row) => ("url" in row ? endpointRow() : replicaRow(live, () => machine)),
      );
    },
  };
}

const ageWords = (isReady, seconds) =>
  isReady ? `up ${duration(seconds)}` : `started ${duration(seconds)} ago`;

function replicaRow(live, machine) {
  const chip = stateChip();
  const name = h("span", { class: "label" });
  const about = h("span", { class: "muted" });
  const load = h("span", { class: "figure" });
  const progress = progressBar(() => live.now());
  const start = startView(() => live.now());
  return {
    element: h(
      "li",
      {},
      h(
        "div",
        { class: "row between" },
        h("div", { class: "row" }, name, chip.element, about),
        load,
      ),
      progress.element,
      start.element,
    ),
    update(one) {
      text(name, `Replica ${one.index}`);
      chip.update(one.state);
      progress.update(one.progress);
      start.update(one.progress ? null : one.start);
      const gpus = one.gpus.map(
        (uuid) => machine()?.gpus.find((gpu) => gpu.uuid === uuid)?.index ?? uuid,
      );
      const since = one.ready_at ?? one.started_at;
      const facts = one.engine
        ? [
            one.engine.replace("==", " "),
            gpus.length ? `GPU ${gpus.join(", ")}` : "CPU",
            bytes(one.bytes),
            `${tokens(one.context)} context`,
            one.grade,
            since && ageWords(one.ready_at !== null, live.now() - since),
          ]
        : [];
      const phase = one.progress
        ? transferName(one.phase)
        : isSaid(one.phase, chip.words(), one.start ? start.element.textContent : "")
          ? null
          : one.phase;
      text(
        about,
        [phase, ...facts].filter(Boolean).join(" · ") ||
          (isSaid(one.detail, chip.words()) ? "" : one.detail),
      );
      text(
        load,
        one.engine && one.state === "ready"
          ? `${one.in_flight} of ${plural(one.at_once, "request")} at once`
          : "",
      );
    },
  };
}

function endpointRow() {
  const chip = stateChip();
  const url = h("span", { class: "label mono" });
  const detail = h("span", { class: "muted" });
  return {
    element: h("li", {}, h("div", { class: "row" }, url, chip.element, detail)),
    update(one) {
      text(url, one.url);
      chip.update(one.state);
      text(detail, one.detail);
    },
  };
}
