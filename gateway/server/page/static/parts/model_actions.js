// Buttons for a model: stop, start, try again, update, delete. Irreversible ones ask first.
import { call } from "../api.js";
import { attribute, h } from "../dom.js";
import { confirm } from "./dialog.js";
import { attempt, note } from "./notes.js";
import { differences } from "./wish_form.js";

/** @param {string} name */
export function modelActions(name) {
  const path = `/admin/models/${encodeURIComponent(name)}`;
  const button = (word, work, tone = "") => {
    const element = h("button", { type: "button", class: tone }, word);
    element.addEventListener("click", async () => {
      attribute(element, "disabled", true);
      await attempt(work);
      attribute(element, "disabled", null);
    });
    return element;
  };
  const start = button("Start", () => call("POST", `${path}/start`), "primary");
  const stop = button("Stop", async () => {
    const isConfirmed = await confirm(
      `Stop ${name}?`,
      "Its engines finish their requests, then end. The model stays unloaded until it is started.",
      { action: "Stop" },
    );
    if (isConfirmed) await call("POST", `${path}/stop`);
  });
  const retry = button("Try again now", () => call("POST", `${path}/retry`), "primary");
  const update = button("Update", () => updateModel(name, path));
  const remove = button("Delete", () => removeModel(name, path), "danger");
  return {
    element: h("div", { class: "row actions" }, retry, start, stop, update, remove),
    update(model) {
      const exists = model !== null && !model.deleting;
      const runs = exists && model.endpoints.length === 0 && model.source !== null;
      attribute(start, "hidden", !(runs && model.stopped));
      attribute(stop, "hidden", !(runs && !model.stopped));
      attribute(
        retry,
        "hidden",
        !(runs && ["quarantined", "backing_off", "no_plan"].includes(model.state)),
      );
      attribute(update, "hidden", !(runs && !model.source.startsWith("/")));
      attribute(remove, "hidden", !exists);
    },
  };
}

async function updateModel(name, path) {
  const formerCommits = (await call("GET", path)).wish.commits;
  const newCommits = (await call("PATCH", `${path}?dry_run=true`, { commits: null })).commits;
  const moved = Object.entries(newCommits).filter(
    ([repository, commit]) => formerCommits[repository] !== commit,
  );
  if (!moved.length) {
    note(`${name}: nothing newer.`);
    return;
  }
  const rows = moved.map(([repository, commit]) => ({
    field: repository,
    former: formerCommits[repository]?.slice(0, 12) ?? null,
    present: commit.slice(0, 12),
  }));
  const isConfirmed = await confirm(
    `Update ${name}?`,
    "The new commit is brought here and takes the place of the old one, " +
      "which comes back where it fails.",
    { action: "Update", more: [differences(rows)] },
  );
  if (!isConfirmed) return;
  const removals = Object.fromEntries(
    Object.keys(formerCommits)
      .filter((repository) => !(repository in newCommits))
      .map((repository) => [repository, null]),
  );
  await call("PATCH", path, { commits: { ...removals, ...newCommits } });
  note(`${name} is being updated.`);
}

async function removeModel(name, path) {
  const weights = h("input", { type: "checkbox", id: "weights" });
  const isConfirmed = await confirm(
    `Delete ${name}?`,
    "Its engines end and it is forgotten. Clients that ask for it get an error.",
    {
      action: "Delete",
      danger: true,
      more: [
        h(
          "label",
          { class: "check", for: "weights" },
          weights,
          "Delete its weights from the disk too, where no other model needs them",
        ),
      ],
    },
  );
  if (!isConfirmed) return;
  await call("DELETE", `${path}${weights.checked ? "?weights=true" : ""}`);
  note(`${name} is being removed.`);
  location.hash = "#/";
}
