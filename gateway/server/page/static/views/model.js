// One model: its plan with reasons, every start, the log, a chat, and its actions.
import { call } from "../api.js";
import { attribute, fill, h, text } from "../dom.js";
import { addsNothing, moment, plural } from "../format.js";
import { adviceParts, showAdvice } from "../parts/advice.js";
import { attemptList } from "../parts/attempts.js";
import { logView } from "../parts/log.js";
import { modelActions } from "../parts/model_actions.js";
import {
  decisionView,
  memoryTitle,
  otherPlans,
  planChoices,
  planCommand,
  planFigures,
  planKernels,
  planMemory,
  planWarnings,
  section,
} from "../parts/plan.js";
import { stateChip } from "../parts/state.js";
import { chat } from "./chat.js";
import { edit } from "./edit.js";
import { replicaCard } from "./replicas.js";
import { missingNote } from "./missing.js";
import { requestsCard } from "./requests.js";
import { trafficCard } from "./traffic.js";
import { use } from "./use.js";
import { wishes } from "./wishes.js";

const TABS = [
  ["plan", "Plan"],
  ["starts", "Starts"],
  ["log", "Log"],
  ["chat", "Chat"],
  ["use", "Use it"],
  ["edit", "Edit"],
  ["wishes", "Wishes"],
];

/** @param {{live: import("../live.js").Live}} context @param {string} name @param {string} [tab] */
export function model({ live }, name, tab = "plan") {
  let drawnState = null;
  let tabView = null;
  let isLoading = false;
  let wasThere = false;
  /** The notice of its absence; "": it is there. */
  let absence = "";
  const chip = stateChip();
  const detail = h("p", { class: "detail" });
  const description = h("p", { class: "muted small" });
  const actions = modelActions(name);
  const body = h("div", { class: "stack" });
  const path = `#/models/${encodeURIComponent(name)}`;
  const tabs = h(
    "nav",
    { class: "tabs", "aria-label": "Of this model" },
    TABS.map(([key, word]) =>
      h(
        "a",
        {
          href: key === "plan" ? path : `${path}/${key}`,
          "aria-current": key === tab ? "page" : null,
        },
        word,
      ),
    ),
  );

  async function load() {
    isLoading = true;
    try {
      const view = await call("GET", `/admin/models/${encodeURIComponent(name)}`);
      tabView = tabView?.refresh ? (tabView.refresh(view), tabView) : build(view);
    } catch (error) {
      fill(body, h("p", { class: "empty" }, adviceParts(error.message)));
      tabView = null;
    }
    isLoading = false;
  }

  function build(view) {
    tabView?.close?.();
    const makePart =
      {
        plan: planPart,
        starts: startsPart,
        log: logPart,
        chat: chatPart,
        use: usePart,
        edit: editPart,
        wishes,
      }[tab] ?? planPart;
    const next = makePart(view, { live, name, path });
    fill(body, next.element);
    next.update?.(live.state);
    return next;
  }

  /** Shows that the model does not exist, with links to other models. */
  function showAbsence(models) {
    if (live.added.has(name)) return;
    tabView?.close?.();
    tabView = null;
    drawnState = null;
    const alias = models.find((model) => model.aliases.includes(name));
    const words = wasThere
      ? `${name} was removed.`
      : alias
        ? `${name} is another name of ${alias.name}.`
        : `This gateway has no model ${name}.`;
    const links = (alias ? [alias] : models).map((model) => [
      model.name,
      `#/models/${encodeURIComponent(model.name)}`,
    ]);
    const notice = JSON.stringify([words, links]);
    if (notice === absence) return;
    absence = notice;
    fill(body, missingNote(words, [...links, ["Add a model", "#/add"]]));
  }

  return {
    title: name,
    element: h(
      "div",
      { class: "stack" },
      h(
        "div",
        { class: "title" },
        h("div", { class: "row" }, h("h1", {}, name), chip.element),
        actions.element,
        detail,
        description,
      ),
      tabs,
      body,
    ),
    update(state) {
      if (!state.models) return;
      const model = live.model(name);
      for (const element of [chip.element, detail, description, tabs])
        attribute(element, "hidden", !model);
      actions.update(model);
      if (!model) return showAbsence(state.models);
      live.added.delete(name);
      wasThere = true;
      absence = "";
      chip.update(model.deleting ? "stopping" : model.state);
      const isShown =
        model.state === "ready" ||
        addsNothing(model.detail, chip.words()) ||
        (tab === "plan" && model.replicas.some((replica) => replica.phase === model.detail));
      showAdvice(
        detail,
        [isShown ? "" : model.detail, model.change === "underway" ? "It is being changed." : ""]
          .filter(Boolean)
          .join(" "),
      );
      attribute(detail, "hidden", !detail.textContent);
      text(description, describe(model));
      tabView?.update?.(state);
      // The whole view is read again when something has happened to the model.
      const fingerprint = JSON.stringify([
        model.state,
        model.change,
        model.better,
        model.replicas.map((replica) => [replica.attempt, replica.state]),
      ]);
      if (fingerprint !== drawnState && !isLoading) {
        drawnState = fingerprint;
        load();
      }
    },
    close: () => tabView?.close?.(),
  };
}

function describe(now) {
  const names = now.aliases.length ? `also ${now.aliases.join(", ")}` : "";
  const requests =
    now.running + now.waiting
      ? `${plural(now.running, "request")} now${now.waiting ? `, ${now.waiting} waiting` : ""}`
      : "";
  return [
    now.source ?? now.endpoints.map((endpoint) => endpoint.url).join(", "),
    names,
    requests || (now.used_at ? `last request ${moment(now.used_at)}` : "no request yet"),
  ]
    .filter(Boolean)
    .join(" · ");
}

function planPart(view, { live, name }) {
  const traffic = trafficCard(name);
  const replicas = replicaCard(live, name);
  const requests = requestsCard(live, name);
  const content = h("div", { class: "stack" });
  const refresh = (model) => fill(content, ...planContent(model));
  refresh(view);
  const update = (state) => {
    replicas.update(state);
    requests.update(state);
    traffic.update(state);
  };
  return {
    element: h(
      "div",
      { class: "stack" },
      replicas.element,
      requests.element,
      content,
      traffic.element,
    ),
    refresh,
    update,
    close: traffic.close,
  };
}

function planContent(view) {
  const cards = [];
  if (view.change)
    cards.push(
      h(
        "section",
        { class: "card" },
        h("h2", {}, `Change ${view.change.state}`),
        h("p", {}, view.change.detail),
      ),
    );
  if (view.plan) {
    const parts = [
      h("h2", {}, "Plan"),
      planFigures(view.plan),
      planWarnings(view.plan),
      section(memoryTitle(view.plan), planMemory(view.plan), true),
      section("Why", planChoices(view.plan)),
      view.plan.kernels.length + view.plan.attention.length
        ? section("Kernels", planKernels(view.plan))
        : null,
      section("Command line", planCommand(view.plan)),
      ...(view.decision ? otherPlans(view.decision) : []),
    ];
    cards.push(h("section", { class: "card" }, parts));
  } else if (view.decision)
    cards.push(h("section", { class: "card" }, h("h2", {}, "Plan"), decisionView(view.decision)));
  else if (!view.wish.endpoints.length)
    cards.push(h("p", { class: "empty" }, "It is not planned yet."));
  if (view.rival)
    cards.push(
      h(
        "section",
        { class: "card" },
        h("h2", {}, "A better plan"),
        h("p", {}, view.rival.words),
        h("p", { class: "muted" }, view.rival.command),
      ),
    );
  if (view.abilities) cards.push(abilities(view.abilities));
  return cards;
}

const PROOF_TONES = { proven: "good", unknown: "idle" };

function abilities(proofs) {
  const rows = Object.entries(proofs).map(([ability, proof]) =>
    h(
      "li",
      {},
      h(
        "span",
        {
          class: "tag",
          "data-tone": PROOF_TONES[proof.state] ?? "warn",
        },
        proof.state,
      ),
      " ",
      h("span", { class: "label" }, ability.replaceAll("_", " ")),
      " ",
      h("span", { class: "muted" }, proof.evidence),
    ),
  );
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "What it does for apps"),
    h("ul", { class: "abilities" }, rows),
  );
}

function startsPart(view, { path }) {
  const content = h("div", { class: "card" });
  const refresh = (model) =>
    fill(
      content,
      attemptList(model.attempts, (attempt) => (location.hash = `${path}/log/${attempt}`)),
    );
  refresh(view);
  return { element: content, refresh };
}

function logPart(view, { name }) {
  const startId = Number(location.hash.split("/")[4]) || null;
  const choice = h("select", {
    id: "start",
    "aria-label": "Log of",
    change: () => log.read(Number(choice.value) || null),
  });
  const log = logView(name, h("div", { class: "filter" }, choice));
  let newestId;
  const refresh = ({ attempts }) => {
    const chosenId = newestId === undefined ? (startId ?? "") : choice.value;
    fill(
      choice,
      h("option", { value: "" }, "the newest start"),
      [...attempts]
        .reverse()
        .map((attempt) =>
          h(
            "option",
            { value: attempt.id },
            `start ${attempt.id}, ${attempt.failure ? "failed" : attempt.state}`,
          ),
        ),
    );
    choice.value = chosenId;
    // A start that began meanwhile is the newest one.
    const lastId = attempts.at(-1)?.id ?? null;
    if (newestId === undefined || (!choice.value && lastId !== newestId))
      log.read(Number(choice.value) || null);
    newestId = lastId;
  };
  refresh(view);
  return {
    element: h("section", { class: "card", "aria-label": "Log" }, log.element),
    refresh,
    close: log.close,
  };
}

function chatPart(view, { live, name }) {
  const talk = chat({ live }, name);
  return { element: talk.element, refresh: () => {}, update: talk.update, close: talk.close };
}

function usePart(view, context) {
  let tabView = use(view, context);
  const element = h("div", {}, tabView.element);
  // The calls are those of the plan's task, which may be known later.
  const refresh = (model) => {
    if (model.plan?.model.task === view.plan?.model.task) return;
    view = model;
    tabView = use(view, context);
    fill(element, tabView.element);
  };
  return { element, refresh, update: (state) => tabView.update(state) };
}

function editPart(view) {
  return { ...edit(view), refresh: () => {} };
}
