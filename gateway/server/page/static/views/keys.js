// Keys of callers with their scopes, models, limits and budgets.
import { call, hasKey, useKey } from "../api.js";
import { attribute, fill, h, text } from "../dom.js";
import { moment, number } from "../format.js";
import { showAdvice } from "../parts/advice.js";
import { baseUrlLine } from "../parts/base_url.js";
import { budgetMeters, editBudget } from "../parts/budget.js";
import { confirm, show } from "../parts/dialog.js";
import { fieldErrors } from "../parts/field_errors.js";
import { attempt, note } from "../parts/notes.js";

const SCOPES = [
  ["inference", "ask models"],
  ["read", "see state, plans and metrics"],
  ["admin", "everything"],
];
const CLASSES = [
  ["interactive", "interactive (first)"],
  ["normal", "normal"],
  ["batch", "batch (last)"],
];
const LIMITS = [
  ["requests_per_minute", "Requests per minute"],
  ["tokens_per_minute", "Tokens per minute"],
  ["max_in_flight", "Concurrent requests"],
];

const OPEN_NOTE =
  "There is no key: programs of this machine may do everything. The first key closes the" +
  " gateway to callers without a key, so create an admin key first.";

export function keys() {
  const list = h("ul", { class: "keys" });
  const emptyNote = h("p", { class: "empty", hidden: true });
  let isOpen = false;

  const groups = h("ul", { class: "keys" });
  const groupsTitle = h("h3", { hidden: true }, "Groups");

  const form = newKey(load);

  async function load() {
    const { data } = await call("GET", "/admin/keys");
    const { data: groupViews, currency } = await call("GET", "/admin/key-groups");
    attribute(emptyNote, "hidden", data.length > 0);
    fill(
      list,
      data.map((key) => row(key, currency, load)),
    );
    attribute(groupsTitle, "hidden", groupViews.length === 0);
    fill(
      groups,
      groupViews.map((group) => groupRow(group, currency, load)),
    );
  }

  attempt(load);
  return {
    title: "Keys",
    element: h(
      "div",
      { class: "stack" },
      h("h1", {}, "Keys"),
      h(
        "div",
        { class: "columns" },
        h(
          "section",
          { class: "card", "aria-labelledby": "keys-title" },
          h("h2", { id: "keys-title" }, "Keys in use"),
          emptyNote,
          list,
          groupsTitle,
          groups,
          newGroup(load),
          baseUrlLine(),
        ),
        form.element,
      ),
    ),
    update({ gateway }) {
      const wasOpen = isOpen;
      isOpen = Boolean(gateway) && !gateway.keys;
      text(emptyNote, isOpen ? OPEN_NOTE : "There is no key.");
      // The gateway refuses another first key.
      if (isOpen && !wasOpen) form.choose("admin");
    },
  };
}

function row(key, currency, changed) {
  const limits = LIMITS.filter(([field]) => key[field] !== null && key[field] !== undefined).map(
    ([field, label]) => `${number(key[field])} ${label.toLowerCase()}`,
  );
  const facts = [
    key.models ? `only ${key.models.join(", ")}` : "all models",
    ...limits,
    ...(key.priority_class === "normal" ? [] : [`class ${key.priority_class}`]),
    ...(key.group ? [`group ${key.group}`] : []),
    ...(key.expires ? [`until ${key.expires}`] : []),
    ...(key.is_recorded ? ["RECORDED"] : []),
    key.created_at === null ? "from the settings" : `made ${moment(key.created_at)}`,
  ];
  const path = `/admin/keys/${encodeURIComponent(key.name)}`;
  return h(
    "li",
    {},
    h(
      "div",
      { class: "who" },
      h("span", { class: "name" }, key.name),
      h(
        "span",
        { class: "row tags" },
        key.scopes.map((scope) => h("span", { class: "tag" }, scope)),
      ),
      h("span", { class: "muted small" }, facts.join(" · ")),
      budgetMeters(key, currency),
    ),
    key.created_at === null
      ? null
      : ownerButtons({
          kind: "key",
          name: key.name,
          path,
          budgetPath: `${path}/budget`,
          budget: key.budget,
          removal: "The key becomes invalid immediately. Its current requests are finished.",
          changed,
        }),
  );
}

/** The buttons of a key or a group: its budget, and its removal. */
function ownerButtons({ kind, name, path, budgetPath, budget, removal, changed }) {
  const remove = async () => {
    const isConfirmed = await confirm(`Remove the ${kind} ${name}?`, removal, {
      action: "Remove",
      danger: true,
    });
    if (isConfirmed && (await attempt(() => call("DELETE", path)))) {
      note(`The ${kind} ${name} is removed.`);
      await attempt(changed);
    }
  };
  const edit = async () => {
    if (!(await editBudget(`the ${kind} ${name}`, budgetPath, budget))) return;
    note(`The budget of the ${kind} ${name} is set.`);
    await attempt(changed);
  };
  return h(
    "div",
    { class: "row end" },
    h(
      "button",
      { type: "button", click: edit, "aria-label": `Budget of the ${kind} ${name}` },
      "Budget",
    ),
    h(
      "button",
      {
        type: "button",
        class: "danger",
        click: remove,
        "aria-label": `Remove the ${kind} ${name}`,
      },
      "Remove",
    ),
  );
}

function groupRow(group, currency, changed) {
  const path = `/admin/key-groups/${encodeURIComponent(group.name)}`;
  return h(
    "li",
    {},
    h(
      "div",
      { class: "who" },
      h("span", { class: "name" }, group.name),
      h("span", { class: "muted small" }, group.keys.join(", ") || "no keys"),
      budgetMeters(group, currency),
    ),
    ownerButtons({
      kind: "group",
      name: group.name,
      path,
      budgetPath: path,
      budget: group.budget,
      removal: "Its usage is forgotten. A group with keys stays.",
      changed,
    }),
  );
}

/** The form that adds a group with a budget. */
function newGroup(changed) {
  const name = h("input", {
    id: "group-name",
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
  });
  const send = async (event) => {
    event.preventDefault();
    const groupName = name.value.trim();
    const path = `/admin/key-groups/${encodeURIComponent(groupName)}`;
    if (!(await editBudget(`the group ${groupName}`, path, null))) return;
    name.value = "";
    await attempt(changed);
  };
  return h(
    "form",
    { class: "row whole", submit: send, "aria-label": "New group" },
    h("label", { for: "group-name" }, "New group"),
    name,
    h("button", {}, "Set budget"),
  );
}

function newKey(changed) {
  const name = h("input", {
    id: "key-name",
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
  });
  const models = h("input", {
    id: "key-models",
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "all",
    "aria-describedby": "key-models-help",
  });
  const scopes = SCOPES.map(([scope, help]) => [
    scope,
    h("input", { type: "checkbox", id: `scope-${scope}`, checked: scope === "inference" }),
    help,
  ]);
  const limits = LIMITS.map(([field, label]) => [
    field,
    h("input", { id: `limit-${field}`, type: "number", min: "1", placeholder: "no limit" }),
    label,
  ]);
  const order = h(
    "select",
    { id: "key-class" },
    CLASSES.map(([value, label]) => h("option", { value, selected: value === "normal" }, label)),
  );
  const expires = h("input", { id: "key-expires", type: "date" });
  const group = h("input", {
    id: "key-group",
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "none",
  });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });

  const errors = fieldErrors(() => [
    ["name", name],
    ["models", models],
    ...limits.map(([field, input]) => [field, input]),
    ["expires", expires],
    ["group", group],
  ]);

  async function send(event) {
    event.preventDefault();
    errors.clear();
    attribute(problem, "hidden", true);
    const allowed = models.value.split(/[\s,]+/).filter(Boolean);
    const grant = {
      name: name.value.trim(),
      scopes: scopes.filter(([, box]) => box.checked).map(([scope]) => scope),
      ...(allowed.length && { models: allowed }),
      priority_class: order.value,
      ...(expires.value && { expires: expires.value }),
      ...(group.value.trim() && { group: group.value.trim() }),
      ...Object.fromEntries(
        limits
          .filter(([, input]) => input.value)
          .map(([field, input]) => [field, Number(input.value)]),
      ),
    };
    try {
      const created = await call("POST", "/admin/keys", grant);
      // The first key closes the gateway, for this page too.
      if (!hasKey() && created.scopes.includes("admin")) useKey(created.key);
      event.target.reset();
      await showOnce(created);
      await attempt(changed);
    } catch (error) {
      if (errors.show(error, true)) return;
      showAdvice(problem, error.message);
      attribute(problem, "hidden", false);
    }
  }

  const element = h(
    "form",
    { class: "card", submit: send, "aria-labelledby": "new-key" },
    h("h2", { id: "new-key" }, "New key"),
    h("div", { class: "field" }, h("label", { for: "key-name" }, "Name"), name),
    h(
      "fieldset",
      { class: "stack tight" },
      h("legend", {}, "It may"),
      scopes.map(([scope, box, help]) =>
        h(
          "label",
          { class: "check", for: `scope-${scope}` },
          box,
          h("span", {}, scope, " ", h("span", { class: "muted" }, help)),
        ),
      ),
    ),
    h(
      "div",
      { class: "field" },
      h("label", { for: "key-models" }, "Models"),
      models,
      h("span", { class: "help", id: "key-models-help" }, "with commas"),
    ),
    h(
      "div",
      { class: "fields level" },
      limits.map(([field, input, label]) =>
        h("div", { class: "field" }, h("label", { for: `limit-${field}` }, label), input),
      ),
      h("div", { class: "field" }, h("label", { for: "key-class" }, "Waiting requests"), order),
      h("div", { class: "field" }, h("label", { for: "key-expires" }, "Last day (UTC)"), expires),
      h("div", { class: "field" }, h("label", { for: "key-group" }, "Group"), group),
    ),
    problem,
    h("div", { class: "row end" }, h("button", { class: "primary" }, "Make key")),
  );
  return {
    element,
    /** @param {string} preset  the only scope, until the form is reset */
    choose: (preset) => {
      for (const [scope, box] of scopes) box.checked = scope === preset;
    },
  };
}

/** The key is in this answer, and nowhere after. */
function showOnce(created) {
  const keyField = h("input", {
    id: "made-key",
    type: "text",
    readonly: true,
    class: "mono",
    value: created.key,
    focus: (event) => event.target.select(),
  });
  const copy = h("button", { type: "button", class: "primary" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(created.key);
      text(copy, "Copied");
    } catch {
      keyField.select();
    }
  });
  return show(`The key ${created.name}`, (close) => [
    h("p", {}, "It is shown now and never again."),
    h("div", { class: "field" }, h("label", { for: "made-key" }, "Key"), keyField),
    baseUrlLine(),
    h(
      "div",
      { class: "row end" },
      copy,
      h("button", { type: "button", click: () => close(true) }, "Done"),
    ),
  ]);
}
