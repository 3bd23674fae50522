// The GPUs with their memory: planned by model, and in use.
import { attribute, h, syncChildren, text } from "../dom.js";
import { bytes, duration } from "../format.js";
import { memoryBar } from "../parts/memory_bar.js";

/** @param {import("../live.js").Live} live */
export function machineCard(live) {
  const description = h("p", { class: "muted" });
  const gpus = h("ul", { class: "gpus" });
  const prepared = h("p", { class: "muted small" });
  const nodes = h("ul", { class: "gpus", "aria-label": "Machines of the cluster" });
  const links = h("ul", { class: "gpus", "aria-label": "Networks between machines" });
  return {
    element: h(
      "section",
      { class: "card", "aria-labelledby": "machine-title" },
      h("div", { class: "row between" }, h("h2", { id: "machine-title" }, "Machine"), description),
      gpus,
      h(
        "p",
        { class: "muted small" },
        "Upper bar: memory planned for engines, by model. " +
          "Lower bar: memory in use, by any process.",
      ),
      prepared,
      nodes,
      links,
    ),
    update({ machine }) {
      if (!machine) return;
      text(
        description,
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
          .map((engine) =>
            [
              "Prepared: " + engine.engine.replace("==", " "),
              bytes(engine.bytes),
              `up ${duration(live.now() - engine.since)}`,
            ].join(", "),
          )
          .join(" · "),
      );
      attribute(prepared, "hidden", !machine.prepared.length);
      syncChildren(nodes, machine.nodes, (node) => node.name, nodeRow);
      attribute(nodes, "hidden", !machine.nodes.length);
      syncChildren(links, machine.links, (link) => `${link.a} ${link.b}`, linkRow);
      attribute(links, "hidden", !machine.links.length);
      syncChildren(
        gpus,
        [...machine.gpus.map((gpu) => ({ ...gpu, label: `GPU ${gpu.index}` })), ram],
        (engine) => engine.uuid,
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
    update(machine) {
      text(name, machine.name);
      text(gpus, machine.gpus.map((gpu) => gpu.replace(/^NVIDIA /, "")).join(", ") || "no GPU");
      const models = machine.models.length ? ` · ${machine.models.join(", ")}` : "";
      text(figure, `${machine.state} · engines: ${machine.engines}${models}`);
      attribute(figure, "class", machine.state === "ready" ? "figure" : "figure problem");
    },
  };
}

function linkRow() {
  const ends = h("span", { class: "name" });
  const figure = h("span", { class: "figure" });
  return {
    element: h("li", {}, h("div", { class: "row between whole" }, ends, figure)),
    update(link) {
      text(ends, `Network of ${link.a} and ${link.b}`);
      const day = link.measured_at && new Date(link.measured_at * 1000).toISOString().slice(0, 10);
      text(figure, day ? `${link.words} · ${day}` : link.words);
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
    update(memory) {
      text(label, memory.label);
      text(name, memory.name.replace(/^NVIDIA /, ""));
      text(
        figure,
        memory.used === null
          ? bytes(memory.total)
          : `${bytes(memory.used)} of ${bytes(memory.total)} used`,
      );
      bar.update(memory);
      const shownProcesses = memory.holders.length ? [] : memory.processes;
      const users = shownProcesses.map(processWords).join(", ");
      text(processes, users && `used by ${users}`);
      text(trouble, memory.lost ?? memory.kept ?? "");
      attribute(processes, "hidden", !processes.textContent);
      attribute(trouble, "hidden", !trouble.textContent);
    },
  };
}

function processWords({ name, pid, bytes: size }) {
  const facts = size === null ? [pid] : [pid, bytes(size)];
  return `${name ?? "process"} (${facts.join(", ")})`;
}
