// Settings of a chat, one row of the table each. The model decides empty ones.
import { h } from "../dom.js";
import { TOOLS } from "./chat_tools.js";

/**
 * @type {{name: string, label: string, help?: string, kind: "text" | "lines" | "number",
 *   attributes?: Record<string, any>}[]}
 */
const FIELDS = [
  { name: "system", label: "System prompt", kind: "text" },
  {
    name: "temperature",
    label: "Temperature",
    kind: "number",
    help: "0: always the likeliest word; empty: as the model says",
    attributes: { min: "0", max: "2", step: "0.1" },
  },
  {
    name: "max_tokens",
    label: "Most tokens",
    kind: "number",
    help: "empty: as many as the context has",
    attributes: { min: "1", step: "1" },
  },
  { name: "stop", label: "Stop at", kind: "lines", help: "texts that end an answer, one per line" },
];

/** @param {Record<string, any>} values  as `read` gave them @param {() => void} changed */
export function chatOptions(values, changed) {
  const inputs = FIELDS.map((field) => {
    const id = `chat-${field.name}`;
    const commonFields = {
      id,
      name: field.name,
      value: values[field.name] ?? "",
      input: changed,
      ...(field.help && { "aria-describedby": `${id}-help` }),
    };
    return [
      field,
      field.kind === "number"
        ? h("input", { type: "number", ...field.attributes, ...commonFields })
        : h("textarea", { rows: 2, ...commonFields }),
    ];
  });
  const tools = h("input", {
    type: "checkbox",
    id: "chat-tools",
    checked: values.tools === true,
    change: changed,
  });
  return {
    element: h(
      "details",
      {},
      h("summary", {}, "Options"),
      h(
        "div",
        { class: "stack tight" },
        h(
          "div",
          { class: "fields" },
          inputs.map(([field, input]) =>
            h(
              "div",
              { class: field.kind === "number" ? "field" : "field wide" },
              h("label", { for: input.id }, field.label),
              input,
              field.help && h("span", { class: "help", id: `${input.id}-help` }, field.help),
            ),
          ),
        ),
        h(
          "label",
          { class: "check", for: "chat-tools" },
          tools,
          "Offer two tools: the time of this browser, and a calculator",
        ),
      ),
    ),
    /** The values to keep: texts by name. */
    read() {
      const filled = inputs
        .map(([field, input]) => [field.name, input.value])
        .filter(([, value]) => value.trim());
      return { ...Object.fromEntries(filled), ...(tools.checked && { tools: true }) };
    },
    /** The fields of a request. */
    fields() {
      const { temperature, max_tokens: most, stop } = this.read();
      return {
        ...(temperature !== undefined && { temperature: Number(temperature) }),
        ...(most !== undefined && { max_tokens: Number(most) }),
        ...(stop !== undefined && { stop: stop.split("\n").filter(Boolean) }),
        ...(tools.checked && { tools: TOOLS }),
      };
    },
    system: () => inputs[0][1].value.trim(),
  };
}
