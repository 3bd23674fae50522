// The engines of one model as they are now: state, GPUs, and the requests that they work on.
import { attribute, h, syncChildren, text } from "../dom.js";
import { bytes, duration, addsNothing, plural, tokens } from "../format.js";
import { progressBar, transferName } from "../parts/progress.js";
import { startView } from "../parts/start.js";
import { stateChip } from "../parts/state.js";

/** @param {import("../live.js").Live} live @param {string} name */
export function replicaCard(live, name) {
  const list = h("ul", { class: "replicas" });
  const waitNote = h("span", { class: "muted small" });
  const element = h(
    "section",
    { class: "card", "aria-labelledby": "replicas-title", hidden: true },
    h("h2", { id: "replicas-title" }, "Now ", waitNote),
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
      const queueWords = model.waiting ? `${plural(model.waiting, "request")} waiting` : "";
      text(waitNote, [queueWords, model.copies].filter(Boolean).join(" · "));
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
  const description = h("span", { class: "muted" });
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
        h("div", { class: "row" }, name, chip.element, description),
        load,
      ),
      progress.element,
      start.element,
    ),
    update(replica) {
      text(name, `Replica ${replica.index}`);
      chip.update(replica.state);
      progress.update(replica.progress);
      start.update(replica.progress ? null : replica.start);
      const gpus = replica.gpus.map(
        (uuid) => machine()?.gpus.find((gpu) => gpu.uuid === uuid)?.index ?? uuid,
      );
      const startedAt = replica.ready_at ?? replica.started_at;
      const facts = replica.engine
        ? [
            replica.engine.replace("==", " "),
            gpus.length ? `GPU ${gpus.join(", ")}` : "CPU",
            bytes(replica.bytes),
            `${tokens(replica.context)} context`,
            replica.grade,
            startedAt && ageWords(replica.ready_at !== null, live.now() - startedAt),
          ]
        : [];
      const phase = replica.progress
        ? transferName(replica.phase)
        : addsNothing(replica.phase, chip.words(), replica.start ? start.element.textContent : "")
          ? null
          : replica.phase;
      text(
        description,
        [phase, ...facts].filter(Boolean).join(" · ") ||
          (addsNothing(replica.detail, chip.words()) ? "" : replica.detail),
      );
      text(
        load,
        replica.engine && replica.state === "ready"
          ? `${replica.in_flight} of ${plural(replica.at_once, "concurrent request")}`
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
    update(endpoint) {
      text(url, endpoint.url);
      chip.update(endpoint.state);
      text(detail, endpoint.detail);
    },
  };
}
