// Recorded requests and answers: search, texts, tokens, times, and the answer of another model.
import { call } from "../api.js";
import { attribute, fill, h } from "../dom.js";
import { latency, moment, number } from "../format.js";
import { attempt } from "../parts/notes.js";
import { section, table } from "../parts/plan.js";

const PATH = "/admin/transcripts";
const PHASES = [
  ["queued", "queued_s"],
  ["at the engine", "first_byte_s"],
  ["answer", "duration_s"],
];

export function transcripts({ live }, id = null) {
  return id === null ? list() : single(live, id);
}

function list() {
  const search = h("input", { id: "transcript-search", type: "search" });
  const model = h("input", { id: "transcript-model", type: "text", placeholder: "all" });
  const rows = h("ul", { class: "requests", "aria-label": "Transcripts" });
  const note = h("p", { class: "muted", role: "status" });
  const more = h("button", { type: "button", hidden: true }, "Older");
  let lastId = null;

  async function load(isFirst) {
    const query = new URLSearchParams({ search: search.value, model: model.value.trim() });
    if (!isFirst) query.set("last_id", lastId);
    const page = await call("GET", `${PATH}?${query}`);
    if (isFirst) fill(rows);
    rows.append(...page.data.map(row));
    lastId = page.last_id;
    attribute(more, "hidden", lastId === null);
    fill(note, rows.children.length ? null : "No transcript fits.");
  }

  more.addEventListener("click", () => attempt(() => load(false)));
  const submit = (event) => {
    event.preventDefault();
    attempt(() => load(true));
  };
  attempt(() => load(true));
  return page(
    "Transcripts",
    h(
      "form",
      { class: "row whole", submit, role: "search" },
      h("label", { for: "transcript-search" }, "Text"),
      search,
      h("label", { for: "transcript-model" }, "Model"),
      model,
      h("button", {}, "Search"),
    ),
    rows,
    note,
    more,
  );
}

function row(view) {
  const facts = view.is_locked
    ? ["locked: no key decrypts it"]
    : [view.model, view.key && `key ${view.key}`, view.status || view.outcome];
  return h(
    "li",
    {},
    h(
      "div",
      { class: "who" },
      h(
        "a",
        { class: "name", href: `#/transcripts/${encodeURIComponent(view.id)}` },
        moment(view.at),
      ),
      h("span", { class: "muted small" }, facts.filter(Boolean).join(" · ")),
    ),
    h("div", { class: "now" }, view.excerpt),
    h("span", { class: "figure" }, tokensOf(view)),
  );
}

function single(live, id) {
  const content = h("div", { class: "stack" });
  const view = page("Transcript", h("a", { href: "#/transcripts" }, "All transcripts"), content);
  const path = `${PATH}/${encodeURIComponent(id)}`;
  attempt(async () => fill(content, details(live, await call("GET", path), path)));
  return view;
}

function details(live, view, path) {
  if (view.is_locked) return h("p", {}, "No key of the gateway decrypts this transcript.");
  const answers = h("div", { class: "columns" }, answer(view.model, view));
  const models = h(
    "select",
    { id: "replay-model" },
    (live.state.models ?? []).map(({ name }) => h("option", { value: name }, name)),
  );
  const button = h("button", { class: "primary" }, "Replay");
  const replay = async (event) => {
    event.preventDefault();
    attribute(button, "disabled", true);
    await attempt(async () => {
      const now = await call("POST", `${path}/replay`, { model: models.value });
      const note = now.is_exact ? "" : " (parts of the request were removed)";
      fill(answers, answer(view.model, view), answer(`${now.model}, now${note}`, now));
    });
    attribute(button, "disabled", false);
  };
  const facts = [
    ["Time", moment(view.at)],
    ["Key", view.key || "no key"],
    ["Replica", view.replica || "none"],
    ["Path", view.path],
    ["Request", view.request_id],
    ...view.notes.map((note) => ["Note", note]),
  ];
  return [
    table("Facts", ["Fact", "Value"], facts),
    timeLine(view),
    section("Request", text("Request", JSON.stringify(view.request, null, 2))),
    h(
      "form",
      { class: "row whole", submit: replay },
      h("label", { for: "replay-model" }, "Send it to"),
      models,
      button,
    ),
    answers,
  ];
}

function answer(title, view) {
  const facts = [`status ${view.status}`, `${tokensOf(view)} tokens`, latency(view.duration_s)];
  return h(
    "section",
    { class: "card", "aria-label": `Answer of ${title}` },
    h("h2", {}, title),
    h("p", { class: "muted small" }, facts.join(" · ")),
    text("Answer", view.answer),
  );
}

/** The parts of the request's time, as a bar and in words. */
function timeLine(view) {
  let begin = 0;
  const words = [];
  const segments = PHASES.map(([name, field], hue) => {
    const end = view[field] ?? begin;
    const seconds = Math.max(0, end - begin);
    begin = Math.max(begin, end);
    words.push(`${name} ${latency(seconds)}`);
    const element = h("div", { class: `segment hue-${hue}` });
    element.style.width = `${(100 * seconds) / (view.duration_s || 1)}%`;
    return element;
  });
  const label = words.join(" · ");
  return h(
    "div",
    { class: "memory" },
    h(
      "div",
      { class: "bar", role: "img", "aria-label": label },
      h("div", { class: "segments" }, segments),
    ),
    h("p", { class: "muted small" }, label),
  );
}

const text = (label, content) =>
  h("pre", { class: "command", tabindex: "0", "aria-label": label }, content);

/** Tokens of prompt and answer: "12 + 34". */
const tokensOf = (view) => `${number(view.prompt_tokens)} + ${number(view.completion_tokens)}`;

function page(title, ...parts) {
  return {
    title,
    element: h(
      "div",
      { class: "stack" },
      h("h1", {}, title),
      h("div", { class: "card stack" }, parts),
    ),
  };
}
