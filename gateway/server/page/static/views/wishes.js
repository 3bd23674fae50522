// The wishes that a model had: author, time, changes, and the way back to one of them.
import { call } from "../api.js";
import { fill, h } from "../dom.js";
import { moment } from "../format.js";
import { confirm } from "../parts/dialog.js";
import { attempt, note } from "../parts/notes.js";
import { differences } from "../parts/wish_form.js";

const TONES = { "in force": "good", underway: "warn", refused: "bad" };

/** @param {{name: string}} view  the gateway's view of the model */
export function wishes({ name }) {
  const path = `/admin/models/${encodeURIComponent(name)}`;
  const list = h("ol", { class: "history" });

  async function refresh() {
    await attempt(async () => {
      const { data } = await call("GET", `${path}/history`);
      fill(
        list,
        data.map((version) => row(version, () => rollBack(name, path, version, refresh))),
      );
    });
  }

  refresh();
  return {
    element: h(
      "section",
      { class: "card", "aria-labelledby": "wishes-title" },
      h("h2", { id: "wishes-title" }, "Wishes"),
      list,
    ),
    refresh,
  };
}

function row(version, restore) {
  const { number, state, way, key, at, restored, refused, problem } = version;
  const isPresent = state === "in force" || state === "underway";
  return h(
    "li",
    {},
    h(
      "div",
      { class: "row" },
      h("strong", { class: "figure" }, `Wish ${number}`),
      h("span", { class: "tag", "data-tone": TONES[state] ?? "idle" }, state),
      h("span", { class: "muted" }, `${moment(at)} · ${key ? `${key}, ${way}` : way}`),
      !isPresent &&
        !problem &&
        h(
          "button",
          { type: "button", click: () => attempt(restore), "aria-label": `Restore wish ${number}` },
          "Restore",
        ),
    ),
    restored && h("p", { class: "muted" }, `It is wish ${restored} again.`),
    refused && h("p", {}, refused),
    problem && h("p", {}, problem),
    differences(version.changes),
  );
}

/** Asks with the effects, then changes the model back. */
async function rollBack(name, path, { number }, refresh) {
  const effects = await call("POST", `${path}/rollback?dry_run=true`, { number });
  if (!effects.wish.length) {
    note(`${name} has these values already.`);
    return;
  }
  const detail = effects.reason
    ? `No plan: ${effects.reason}`
    : effects.restarts_engines
      ? "New engines are started. If there is room, the old ones serve until then."
      : "No engine is restarted.";
  const isConfirmed = await confirm(`Restore wish ${number} of ${name}?`, detail, {
    action: "Restore",
    more: [differences([...effects.wish, ...effects.plan])],
  });
  if (!isConfirmed) return;
  await call("POST", `${path}/rollback`, { number });
  note(`${name} is being changed.`);
  await refresh();
}
