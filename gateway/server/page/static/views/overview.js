// The first page: the machine, its models, and their traffic.
import { h } from "../dom.js";
import { machineCard } from "./machine.js";
import { modelTable } from "./model_table.js";
import { requestsCard } from "./requests.js";
import { trafficCard } from "./traffic.js";

/** @param {{live: import("../live.js").Live}} context */
export function overview({ live }) {
  const machine = machineCard(live);
  const models = modelTable(live);
  const requests = requestsCard(live);
  const traffic = trafficCard();
  return {
    title: "Overview",
    element: h(
      "div",
      { class: "stack" },
      h("h1", { class: "hidden" }, "Overview"),
      models.element,
      requests.element,
      machine.element,
      traffic.element,
    ),
    update(state) {
      machine.update(state);
      models.update(state);
      requests.update(state);
      traffic.update(state);
    },
    close: traffic.close,
  };
}
