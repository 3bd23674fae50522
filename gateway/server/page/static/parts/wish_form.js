// The form of a wish, one row of the table per field. The command line sets all other fields.
import { attribute, fill, h } from "../dom.js";

/**
 * @typedef {object} Field
 * @property {string} name   of the wish; "policy.x" is within its policy
 * @property {string} label
 * @property {"text" | "number" | "list" | "flags" | "texts" | "gpus" | "check" | "template" |
 *   string[]} kind  flags, texts: name=value in lines; an array: the choices of a select
 * @property {string} [help]
 * @property {string} [example]
 */

/** @type {Record<string, Field[]>} */
const FIELDS = {
  "": [
    {
      name: "goal",
      label: "Made for",
      kind: ["balanced", "latency", "throughput", "context", "agents"],
      help: "one user, many concurrent requests, long contexts, conversations that return, or all",
    },
    {
      name: "context",
      label: "Context",
      kind: "number",
      help: "tokens that the model will have: 8192, 32k",
    },
    {
      name: "gpus",
      label: "GPUs",
      kind: "gpus",
      help: "all, few, how many, or their numbers: 0,1",
      example: "as many as help",
    },
    { name: "concurrency", label: "Concurrent requests", kind: "number", help: "expected" },
  ],
  "When it is loaded": [
    {
      name: "policy.keep_alive",
      label: "Keep loaded",
      kind: "text",
      help: "without a request: 5m, 1h30m, 0, or -1 for ever",
    },
    {
      name: "policy.priority",
      label: "Priority",
      kind: "number",
      help: "the lowest gives way first",
    },
    {
      name: "policy.wait_s",
      label: "Requests wait",
      kind: "number",
      help: "seconds, while it becomes ready",
    },
    {
      name: "policy.max_attempts",
      label: "Failed starts",
      kind: "number",
      help: "before it is given up",
    },
    { name: "policy.pinned", label: "Never unload it", kind: "check" },
  ],
  "Engine and plan": [
    {
      name: "engines",
      label: "Engines",
      kind: "list",
      help: "vllm, or sglang==0.5.23; empty: all",
      example: "all",
    },
    {
      name: "image",
      label: "Container image",
      kind: "text",
      help: "instead of the one its project publishes",
    },
    { name: "tensor_parallel", label: "Tensor parallel", kind: "number" },
    { name: "replicas", label: "Replicas", kind: "number", help: "empty: as many as help" },
    {
      name: "copies",
      label: "Copies by load",
      kind: "text",
      help: "instead of replicas, least and most: 1-4",
    },
    {
      name: "min_context",
      label: "Least context",
      kind: "number",
      help: "instead of one context; a plan with less is refused",
    },
    { name: "max_context", label: "Most context", kind: "number", help: "instead of one context" },
    { name: "dtype", label: "Dtype", kind: ["auto", "bfloat16", "float16", "float32"] },
    {
      name: "speculative",
      label: "Speculation",
      kind: ["", "auto", "off", "mtp", "ngram"],
      help: "without a drafter",
    },
    { name: "drafter", label: "Drafter", kind: "text", help: "folder or repository" },
    { name: "num_speculative_tokens", label: "Drafted tokens", kind: "number" },
    {
      name: "args",
      label: "Engine flags",
      kind: "flags",
      help: "one per line, flag=value; they win over the planner",
    },
    { name: "env", label: "Variables", kind: "texts", help: "one per line, NAME=value" },
    {
      name: "chat_template",
      label: "Chat template",
      kind: "template",
      help: "a Jinja text, instead of the model's own",
    },
    {
      name: "text_only",
      label: "Accept a text-only plan",
      kind: "check",
      help: "where the model also takes images, video or audio",
    },
    { name: "check", label: "Ask the engine's own code before its start", kind: "check" },
    {
      name: "policy.allow_remote_code",
      label: "Let the engine run code of the model's repository",
      kind: "check",
    },
  ],
  "Names and source": [
    { name: "aliases", label: "Other names", kind: "list", help: "with commas" },
    {
      name: "loras",
      label: "LoRA adapters",
      kind: "texts",
      help: "one per line, name=folder or name=org/repository",
    },
    { name: "revision", label: "Revision", kind: "text", help: "branch, tag or commit" },
  ],
};

const WHERE = {
  name: "endpoints",
  label: "Base URLs",
  kind: "list",
  help: "ending in /v1, with commas",
};

/**
 * Fields of an engine that runs elsewhere, in addition to its address.
 * @type {Record<string, Field[]>}
 */
export const ENDPOINT_FIELDS = {
  "": [
    {
      name: "endpoint_key",
      label: "Its key",
      kind: "text",
      help:
        "where the gateway finds it, never the key itself: file:NAME in DATA_DIR/endpoint-keys," +
        " or env:FITSERVE_ENDPOINT_KEY_NAME",
      example: "none",
    },
    { name: "aliases", label: "Other names", kind: "list", help: "with commas" },
    {
      name: "policy.wait_s",
      label: "Requests wait",
      kind: "number",
      help: "seconds, while none of them answers",
    },
  ],
};

/** The fields of an existing model. */
export const fieldsOf = (wish) =>
  wish.endpoints.length ? { "": [WHERE, ...ENDPOINT_FIELDS[""]] } : FIELDS;

const DEFAULTS = { goal: "balanced", dtype: "auto", check: true };
let forms = 0;

/**
 * @param {{wish?: Record<string, any>, present?: Record<string, string>, fields?: Record<string,
 *   Field[]>, changed: () => void}} options
 *   wish: the existing wish; present: the values in force of its empty fields
 * @returns {{element: any, read: () => Record<string, any>, inputs: () => [string, any][],
 *   update: (state: any) => void}}
 *   inputs: by the name of their field; read: every field, null where it is empty; `policy` is an
 *   object of its own; update: shows fields of GPUs where the live state has some
 */
export function wishForm({ wish = {}, present = {}, fields = FIELDS, changed }) {
  const prefix = `wish-${(forms += 1)}`;
  const inputs = new Map();

  function control(field) {
    const id = `${prefix}-${field.name.replace(".", "-")}`;
    const currentValue = present[field.name];
    const example = currentValue && { example: `${currentValue} now` };
    const input = inputOf({ ...field, ...example }, id);
    write(input, field, pick(wish, field.name) ?? DEFAULTS[field.name]);
    input.addEventListener("input", changed);
    inputs.set(field, input);
    if (field.kind === "check") return h("label", { class: "check", for: id }, input, field.label);
    // A choice has no room for it next to the choice.
    const words =
      Array.isArray(field.kind) && currentValue && currentValue !== input.value
        ? [field.help, `now ${currentValue}`].filter(Boolean).join("; ")
        : field.help;
    const help = words && h("span", { class: "help", id: `${id}-help` }, words);
    if (help) attribute(input, "aria-describedby", `${id}-help`);
    return h(
      "div",
      { class: isLines(field) ? "field wide" : "field" },
      h("label", { for: id }, field.label),
      input,
      help,
    );
  }

  const parts = Object.entries(fields).map(([title, group]) => {
    const grid = h("div", { class: "fields" }, group.map(control));
    return title ? h("details", {}, h("summary", {}, title), grid) : grid;
  });
  return {
    element: h("div", { class: "stack" }, parts),
    inputs: () => [...inputs].map(([field, input]) => [field.name, input]),
    update({ machine }) {
      const hasGpus = !machine || machine.gpus.length > 0 || machine.nodes.length > 0;
      for (const [field, input] of inputs)
        if (field.kind === "gpus")
          attribute(input.closest(".field"), "hidden", !hasGpus && !input.value);
    },
    read() {
      /** @type {Record<string, any>} */
      const values = {};
      for (const [field, input] of inputs) {
        const [head, innerName] = field.name.split(".");
        const value = valueOf(input, field);
        if (innerName) (values[head] ??= {})[innerName] = value;
        else values[head] = value;
      }
      return values;
    },
  };
}

/** The merge patch that turns `formerFields` into `newFields`, only of the fields of the latter. */
export function patchOf(formerFields, newFields) {
  /** @type {Record<string, any>} */
  const patch = {};
  for (const [name, value] of Object.entries(newFields)) {
    const old = formerFields[name] ?? null;
    if (JSON.stringify(old) === JSON.stringify(value) || (value === null && isEmpty(old))) continue;
    if (name === "policy") {
      const innerPatch = patchOf(old ?? {}, value);
      if (Object.keys(innerPatch).length) patch[name] = innerPatch;
    } else if (["args", "env", "loras"].includes(name) && value !== null) {
      patch[name] = {
        ...Object.fromEntries(Object.keys(old ?? {}).map((key) => [key, null])),
        ...value,
      };
    } else patch[name] = value;
  }
  return patch;
}

/** The fields that have a value. */
export function withoutEmpty(fields) {
  const entries = Object.entries(fields).map(([name, value]) => [name, withoutEmptyInside(value)]);
  return Object.fromEntries(entries.filter(([, value]) => !isEmpty(value)));
}

function withoutEmptyInside(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value)
    ? withoutEmpty(value)
    : value;
}

function isEmpty(value) {
  return (
    value === null ||
    value === undefined ||
    (typeof value === "object" && Object.keys(value).length === 0)
  );
}

function pick(wish, name) {
  return name.split(".").reduce((value, part) => value?.[part], wish);
}

function inputOf(field, id) {
  const commonFields = {
    id,
    name: field.name,
    placeholder: field.example,
    autocomplete: "off",
    spellcheck: "false",
  };
  if (Array.isArray(field.kind))
    return h(
      "select",
      { id, name: field.name },
      field.kind.map((choice) => h("option", { value: choice }, choice || "none")),
    );
  if (field.kind === "check") return h("input", { id, name: field.name, type: "checkbox" });
  if (isLines(field)) return h("textarea", { ...commonFields, rows: 2, class: "mono" });
  return h("input", {
    ...commonFields,
    type: "text",
    inputmode: field.kind === "number" ? "numeric" : null,
  });
}

function write(input, field, value) {
  if (field.kind === "check") input.checked = value === true;
  else if (field.kind === "template") input.value = value?.text ?? "";
  else if (isLines(field))
    input.value = Object.entries(value ?? {})
      .map(([name, value]) => `${name}=${value}`)
      .join("\n");
  else if (Array.isArray(value)) input.value = value.join(", ");
  else input.value = value ?? "";
}

function valueOf(input, field) {
  if (field.kind === "check") return input.checked;
  const text = input.value.trim();
  if (!text) return null;
  if (field.kind === "number") return numberOf(text);
  if (field.kind === "list") return words(text);
  if (field.kind === "template") return { text: input.value, name: "" };
  if (isLines(field))
    return Object.fromEntries(
      text
        .split("\n")
        .filter((line) => line.trim())
        .map(field.kind === "flags" ? flagOf : pairOf),
    );
  if (field.kind === "gpus") return gpusOf(text);
  return text;
}

/** A number, or the text as it is, for which the gateway has an error. */
const numberOf = (text) => (/^-?\d+(\.\d+)?$/.test(text) ? Number(text) : text);

/** @param {string} text */
export const words = (text) => text.split(/[\s,]+/).filter(Boolean);

function gpusOf(text) {
  if (text === "all" || text === "few") return text;
  return /^\d+$/.test(text) ? Number(text) : words(text);
}

const isLines = (field) => ["flags", "texts", "template"].includes(field.kind);

/** "NAME=a=b" -> ["NAME", "a=b"] */
function pairOf(line) {
  const [name, ...valueParts] = line.split("=");
  return [name.trim(), valueParts.join("=").trim()];
}

/** "--flag=4" -> ["flag", 4]; a flag without a value is true. */
function flagOf(line) {
  const [name, value] = pairOf(line.trim().replace(/^--/, ""));
  if (!line.includes("=") || value === "true") return [name, true];
  return [name, value === "false" ? false : numberOf(value)];
}

/**
 * The differences that a change makes, as rows.
 * @param {{field: string, former: string | null, present: string | null}[]} rows
 */
export function differences(rows) {
  const list = h("ul", { class: "differences" });
  return fill(
    list,
    ...rows.map((row) =>
      h(
        "li",
        {},
        h("span", { class: "label" }, row.field),
        " ",
        h("del", {}, row.former ?? "–"),
        " → ",
        h("ins", {}, row.present ?? "–"),
      ),
    ),
  );
}
