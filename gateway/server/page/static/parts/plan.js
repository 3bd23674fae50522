// A whole plan: results, the reason for each choice, resources, and rejected candidates.
import { h } from "../dom.js";
import { bytes, latency, number, plural, tokens } from "../format.js";
import { adviceParts } from "./advice.js";

// A variable of the environment keeps its name.
const VARIABLE = /^[A-Z][A-Z0-9_]*$/;
const LABELS = {
  max_model_len: "context",
  max_num_seqs: "concurrent requests",
  max_num_batched_tokens: "tokens per batch",
  kv_cache_dtype: "KV cache dtype",
  enforce_eager: "without CUDA graphs",
  custom_all_reduce: "custom all-reduce",
  kv_offload_gib: "KV cache in RAM (GiB)",
};
const PARTS = [
  ["weights", "weights_bytes"],
  ["activations", "activation_bytes"],
  ["graphs", "graph_bytes"],
  ["overhead", "overhead_bytes"],
  ["outside its budget", "beside_bytes"],
  ["KV cache", "kv_bytes"],
];

/** The figures that matter most, as tiles. */
export function planFigures(plan) {
  const { speed, memory } = plan;
  const tiles = [
    ["Engine", plan.engine.kind, `version ${plan.engine.version}`],
    [
      plan.gpus.length ? "GPUs" : "Runs on",
      plan.gpus.length ? String(plan.gpus.length) : "CPU",
      parallel(plan),
    ],
    [
      "Context",
      tokens(plan.max_model_len.value),
      `${number(memory.full_requests, 1)} such requests fit`,
    ],
    [
      "Memory",
      bytes(memory.budget_bytes + memory.beside_bytes),
      `of ${bytes(memory.gpu_bytes)}${memoryWords(plan)}`,
    ],
    speed && ["One request", `${number(speed.stream.value, 0)} tok/s`, band(speed.stream)],
    speed && [
      `${plural(speed.concurrency, "concurrent request")}`,
      `${number(speed.total.value, 0)} tok/s`,
      band(speed.total),
    ],
    speed && ["First token", latency(speed.first_token_2k_s.value), "of a prompt of 2k"],
  ];
  return h(
    "dl",
    { class: "tiles" },
    tiles
      .filter(Boolean)
      .map(([name, value, more]) =>
        h(
          "div",
          {},
          h("dt", {}, name),
          h(
            "dd",
            {},
            h("span", { class: "value" }, value),
            h("span", { class: "muted small" }, more),
          ),
        ),
      ),
  );
}

/** The memory that a plan's bytes are of. */
const memoryWords = (plan) =>
  plan.gpus.length === 0 ? " of RAM" : plan.gpus.length > 1 ? " each" : "";

/** The title of the plan's memory. */
export const memoryTitle = (plan) =>
  plan.gpus.length === 0
    ? "Memory"
    : plan.gpus.length > 1
      ? "Memory of each GPU"
      : "Memory of the GPU";

function parallel(plan) {
  const degrees = [
    ["tensor parallel", plan.tensor_parallel.value],
    ["stages", plan.pipeline_parallel.value],
    ["replicas", plan.replicas.value],
  ].filter(([, count]) => count > 1);
  return degrees.map(([word, count]) => `${word} ${count}`).join(", ") || "one engine";
}

const band = (estimate) => `${number(estimate.low, 0)} to ${number(estimate.high, 0)}`;

export function planWarnings(plan) {
  const warnings = [...plan.warnings, ...(plan.advice ? [plan.advice] : [])];
  return warnings.length
    ? h(
        "ul",
        { class: "warnings" },
        warnings.map((line) => h("li", {}, adviceParts(line))),
      )
    : null;
}

/** Every choice with its reason and where the rule comes from. */
export function planChoices(plan) {
  const rows = Object.entries(plan).filter(
    ([, choice]) => choice && typeof choice === "object" && "reason" in choice && "value" in choice,
  );
  const variables = Object.entries(plan.variables ?? {});
  return table(
    "Choices",
    ["Choice", "Value", "Why", "Source"],
    [...rows, ...variables].map(([name, choice]) => [
      LABELS[name] ?? (VARIABLE.test(name) ? name : name.replaceAll("_", " ")),
      valueText(choice.value),
      choice.reason,
      h("span", { class: "muted" }, choice.source),
    ]),
  );
}

export function planMemory(plan) {
  const { memory } = plan;
  const total = Math.max(memory.gpu_bytes, 1);
  const parts = PARTS.map(([name, field], hue) => ({ name, size: memory[field], hue })).filter(
    (part) => part.size > 0,
  );
  const segments = parts.map((part) => {
    const element = h("div", { class: `segment hue-${part.hue}` });
    element.style.width = `${(100 * part.size) / total}%`;
    return element;
  });
  return h(
    "div",
    { class: "memory" },
    h(
      "div",
      {
        class: "bar tall",
        role: "img",
        "aria-label":
          `Of ${bytes(memory.gpu_bytes)}: ` +
          parts.map((part) => `${part.name} ${bytes(part.size)}`).join(", "),
      },
      h("div", { class: "segments" }, segments),
    ),
    h(
      "ul",
      { class: "legend" },
      parts.map((part) =>
        h(
          "li",
          {},
          h("span", { class: `swatch hue-${part.hue}`, "aria-hidden": "true" }),
          part.name,
          " ",
          h("span", { class: "figure muted" }, bytes(part.size)),
        ),
      ),
    ),
  );
}

/** The reason for a kernel or backend, its flaw, and why the engine passed over others. */
function choiceWords({ reason, note, refused }) {
  const refusals = refused.map(
    ({ kernel, reason: refusal }) => (kernel ? `not ${kernel}: ` : "") + refusal,
  );
  return [reason, note, ...refusals].filter(Boolean).join("; ");
}

export function planKernels(plan) {
  const layers = plan.kernels.map((layer) => [
    `${layer.layer} × ${layer.count}`,
    layer.kernel ?? layer.status,
    choiceWords(layer),
  ]);
  const attention = plan.attention.map((layer) => [
    `attention ${layer.kind} × ${layer.layers}`,
    layer.backend ?? layer.status,
    choiceWords(layer),
  ]);
  return layers.length + attention.length
    ? table("Kernels", ["Layers", "Kernel", "Why"], [...attention, ...layers])
    : null;
}

export function planCommand(plan) {
  const variables = Object.entries(plan.env).map(([name, value]) => `${name}=${value}`);
  return h(
    "pre",
    { class: "command", tabindex: "0", "aria-label": "Command line" },
    [...variables, `${plan.engine.kind} ${plan.engine.version}`, ...plan.argv].join("\n"),
  );
}

/** The other plans of a decision, and the rejected candidates. */
export function otherPlans(decision) {
  const alternatives = decision.plans
    .slice(1)
    .map((plan) => [
      `${plan.engine.kind} ${plan.engine.version}`,
      [
        plan.gpus.length ? plural(plan.gpus.length, "GPU") : "CPU",
        `${tokens(plan.max_model_len.value)} context`,
      ].join(", "),
      plan.speed ? `${number(plan.speed.total.value, 0)} tok/s` : "–",
      plan.warnings[0] ?? "",
    ]);
  const rejected = decision.rejected.map((rejection) => [
    `${rejection.engine.kind} ${rejection.engine.version}`,
    rejection.tensor_parallel > 1 ? `tensor parallel ${rejection.tensor_parallel}` : "undivided",
    rejection.verdict.replaceAll("_", " "),
    rejection.reasons.join("; "),
  ]);
  const missing = (decision.engines ?? [])
    .filter((engine) => !engine.is_available)
    .map((row) => [row.engine.replace("==", " "), row.reason, row.gain_text, row.remedy]);
  return [
    alternatives.length
      ? section(
          `Next best plans (${alternatives.length})`,
          table("Next best plans", ["Engine", "How", "Speed", "What it costs"], alternatives),
        )
      : null,
    rejected.length
      ? section(
          `Ruled out (${rejected.length})`,
          table("Ruled out", ["Engine", "How", "Verdict", "Why"], rejected),
        )
      : null,
    missing.length
      ? section(
          `Engines that are not here (${missing.length})`,
          table(
            "Engines that are not here",
            ["Engine", "Why", "What it would give", "What to do"],
            missing,
          ),
        )
      : null,
  ];
}

/** A decision: the best plan, or why there is none. */
export function decisionView(decision) {
  const plan = decision.plans[0];
  const takes = decision.taken_offers ?? [];
  if (!plan) {
    return [
      h("p", { class: "problem" }, "No plan fits."),
      h(
        "ul",
        { class: "warnings" },
        decision.refusal.map((line) => h("li", {}, adviceParts(line))),
      ),
      ...otherPlans(decision),
    ];
  }
  return [
    planFigures(plan),
    takes.length
      ? h(
          "ul",
          { class: "warnings" },
          takes.map((offer) => h("li", {}, adviceParts(offer.words))),
        )
      : null,
    planWarnings(plan),
    section(memoryTitle(plan), planMemory(plan), true),
    section("Why", planChoices(plan)),
    plan.kernels.length + plan.attention.length ? section("Kernels", planKernels(plan)) : null,
    section("Command line", planCommand(plan)),
    ...otherPlans(decision),
  ];
}

/** @param {string} title */
export function section(title, content, open = false) {
  return h("details", { open }, h("summary", {}, title), content);
}

/** @param {string} caption @param {string[]} head @param {any[][]} rows */
export function table(caption, head, rows) {
  // A narrow table keeps its roles, though its style shows each row as a block.
  const namedCell = (cell, place) =>
    place
      ? h("td", { role: "cell", "data-head": head[place] }, cell)
      : h("th", { scope: "row", role: "rowheader", "data-head": head[0] }, cell);
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      { role: "table" },
      h(
        "thead",
        { role: "rowgroup" },
        h(
          "tr",
          { role: "row" },
          head.map((name) => h("th", { scope: "col", role: "columnheader" }, name)),
        ),
      ),
      h(
        "tbody",
        { role: "rowgroup" },
        rows.map((row) => h("tr", { role: "row" }, row.map(namedCell))),
      ),
    ),
  );
}

const valueText = (value) =>
  value === true ? "yes" : value === false ? "no" : value === "" ? "–" : String(value);
