// The requests in flight, oldest first: key, model and progress, with a button that ends one.
import { call } from "../api.js";
import { attribute, h, syncChildren, text } from "../dom.js";
import { bytes, duration, latency, number } from "../format.js";
import { confirm } from "../parts/dialog.js";
import { attempt } from "../parts/notes.js";
import { stateChip } from "../parts/state.js";

/**
 * @param {import("../live.js").Live} live
 * @param {string | null} [modelName]  a model, whose page hides the list while it is empty
 */
export function requestsCard(live, modelName = null) {
  const count = h("span", { class: "muted" });
  const emptyNote = h("p", { class: "muted" }, "Nobody is waiting for an answer.");
  const list = h("ul", { class: "requests", tabindex: "0", "aria-label": "Requests in flight" });
  const more = h("p", { class: "muted small" });
  const classes = h("p", { class: "muted small" });
  const element = h(
    "section",
    { class: "card", "aria-labelledby": "requests-title", hidden: true },
    h("h2", { id: "requests-title" }, "Requests now ", count),
    emptyNote,
    list,
    more,
    classes,
  );
  return {
    element,
    update({ requests }) {
      if (!requests) return attribute(element, "hidden", true);
      const rows = requests.data.filter(
        (request) => modelName === null || request.model === modelName,
      );
      attribute(element, "hidden", modelName !== null && !rows.length);
      text(count, modelName === null && rows.length ? number(rows.length + requests.more) : "");
      attribute(emptyNote, "hidden", rows.length > 0);
      attribute(list, "hidden", !rows.length);
      text(
        more,
        requests.more
          ? `These are the oldest ${number(requests.data.length)}` +
              `${modelName === null ? "" : " of all models"};` +
              ` ${number(requests.more)} more are in flight.`
          : "",
      );
      text(classes, waitingNote(requests.waiting, modelName, live.now()));
      syncChildren(
        list,
        rows,
        (row) => `${row.id} ${row.began_at}`,
        () => requestRow(live),
      );
    },
  };
}

/** The waiting requests by class: "Waiting: 190 of batch to a, the oldest for 40 s." */
function waitingNote(waitingRows, modelName, now) {
  const rows = waitingRows.filter((row) => modelName === null || row.model === modelName);
  const parts = rows.map(
    (row) =>
      `${number(row.requests)} of ${row.priority_class}` +
      `${modelName === null ? ` to ${row.model}` : ""}` +
      `, the oldest for ${duration(now - row.oldest_at)}`,
  );
  return parts.length ? `Waiting: ${parts.join("; ")}.` : "";
}

function requestRow(live) {
  let request = null;
  const model = h("a", { class: "name" });
  const from = h("span", { class: "muted small" });
  const chip = stateChip();
  const so_far = h("span", { class: "muted small" });
  const age = h("span", { class: "figure" });
  const end = h("button", { type: "button", class: "danger" }, "End");
  end.addEventListener("click", async () => {
    const { id, model: name, began_at } = request;
    const isConfirmed = await confirm(
      "End this request?",
      `It was sent to ${name} ${duration(live.now() - began_at)} ago.` +
        " Its client gets an error, and its engine lets go of it.",
      { action: "End", danger: true },
    );
    if (isConfirmed)
      await attempt(() => call("DELETE", `/admin/requests/${encodeURIComponent(id)}`));
  });
  return {
    element: h(
      "li",
      {},
      h("div", { class: "who" }, model, from),
      h("div", { class: "now" }, chip.element, so_far),
      age,
      end,
    ),
    update(latest) {
      request = latest;
      attribute(model, "href", `#/models/${encodeURIComponent(latest.model)}`);
      text(model, latest.model);
      text(
        from,
        [
          latest.endpoint.replaceAll("_", " "),
          latest.key ? `key ${latest.key}` : "no key",
          latest.address,
        ]
          .filter(Boolean)
          .join(" · "),
      );
      chip.update(latest.phase);
      text(
        so_far,
        latest.first_byte_s === null
          ? ""
          : `${bytes(latest.sent_bytes)} so far, first byte after ${latency(latest.first_byte_s)}`,
      );
      text(age, duration(live.now() - latest.began_at));
      attribute(end, "aria-label", `End the request ${latest.id} to ${latest.model}`);
    },
  };
}
