// The GPUs with their memory: what is planned for whom, and what is used.
import { attribute, h, syncChildren, text } from "../dom.js";
import { bytes, duration } from "../format.js";
import { memoryBar } from "../parts/memory_bar.js";

/** @param {import("../live.js").Live} live */
export function machineCard(live) {
  const about = h("p", { class: "muted" });
  const gpus = h("ul", { class: "gpus" });
  const prepared = h("p", { class: "muted small" });
  const nodes = h("ul", { class: "gpus", "aria-label": "Machines of the cluster" });
  return {
    element: h(
      "section",
      { class: "card", "aria-labelledby": "machine-title" },
      h("div", { class: "row between" }, h("h2", { id: "machine-title" }, "Machine"), about),
      gpus,
      h(
        "p",
        { class: "muted small" },
        "Upper bar: memory planned for engines, by model. " +
          "Lower bar: memory in use, by any process.",
      ),
      prepared,
      nodes,
    ),
    update({ machine }) {
      if (!machine) return;
      text(
        about,
        [
          machine.cpu,
          `${machine.cores} cores`,
          machine.driver && `driver ${machine.driver}`,
          machine.disk_free !== null && `${bytes(machine.disk_free)} of disk free`,
        ]
          .filter(Boolean)
          .join(" · "),
      );
      const ram = {
        uuid: "ram",
        label: "RAM",
        name: machine.gpus.length ? "" : "no GPU",
        total: machine.ram_total,
        used: machine.ram_used,
        holders: machine.holders,
        processes: [],
      };
      text(
        prepared,
        machine.prepared
          .map((one) =>
            [
              "Prepared: " + one.engine.replace("==", " "),
              bytes(one.bytes),
              `up ${duration(live.now() - one.since)}`,
            ].join(", "),
          )
          .join(" · "),
      );
      attribute(prepared, "hidden", !machine.prepared.length);
      syncChildren(nodes, machine.nodes, (node) => node.name, nodeRow);
      attribute(nodes, "hidden", !machine.nodes.length);
      syncChildren(
        gpus,
        [...machine.gpus.map((gpu) => ({ ...gpu, label: `GPU ${gpu.index}` })), ram],
        (one) => one.uuid,
        memoryRow,
      );
    },
  };
}

function nodeRow() {
  const name = h("span", { class: "label" });
  const gpus = h("span", { class: "muted" });
  const figure = h("span", { class: "figure" });
  return {
    element: h(
      "li",
      {},
      h(
        "div",
        { class: "row between whole" },
        h("span", { class: "name" }, name, " ", gpus),
        figure,
      ),
    ),
    update(one) {
      text(name, one.name);
      text(gpus, one.gpus.map((gpu) => gpu.replace(/^NVIDIA /, "")).join(", ") || "no GPU");
      text(figure, `${one.state} · engines: ${one.engines}`);
      attribute(figure, "class", one.state === "ready" ? "figure" : "figure problem");
    },
  };
}

function memoryRow() {
  const label = h("span", { class: "label" });
  const name = h("span", { class: "muted" });
  const figure = h("span", { class: "figure" });
  const bar = memoryBar();
  const processes = h("p", { class: "muted small" });
  const trouble = h("p", { class: "problem small" });
  return {
    element: h(
      "li",
      {},
      h(
        "div",
        { class: "row between whole" },
        h("span", { class: "name" }, label, " ", name),
        figure,
      ),
      bar.element,
      processes,
      trouble,
    ),
    update(one) {
      text(label, one.label);
      text(name, one.name.replace(/^NVIDIA /, ""));
      text(
        figure,
        one.used === null ? bytes(one.total) : `${bytes(one.used)} of ${bytes(one.total)} used`,
      );
      bar.update(one);
      const running = one.holders.length ? [] : one.processes;
      text(processes, running.length ? `used by ${running.map(processWords).join(", ")}` : "");
      text(trouble, one.lost ?? one.kept ?? "");
      attribute(processes, "hidden", !processes.textContent);
      attribute(trouble, "hidden", !trouble.textContent);
    },
  };
}

function processWords({ name, pid, bytes: size }) {
  const facts = size === null ? [pid] : [pid, bytes(size)];
  return `${name ?? "process"} (${facts.join(", ")})`;
}
