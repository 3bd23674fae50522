// A chat to try a model: the answer as it comes, what it thinks, and tools that it calls.
import { events } from "../api.js";
import { attribute, fill, h, text } from "../dom.js";
import { latency, number } from "../format.js";
import { TOOLS, runTool } from "../parts/chat_tools.js";
import { messageView } from "../parts/message.js";
import { waitWords } from "../parts/start.js";

// A model that calls tools again and again comes to an end.
const MOST_ROUNDS = 4;

/** @param {{live: import("../live.js").Live}} context @param {string} [fixed]  the model; else one is chosen */
export function chat({ live }, fixed = "") {
  /** @type {any[]} */
  const messages = [];
  let running = null;
  /** The answer that has not begun, and when it was asked for. */
  let pending = null;
  const log = h("div", { class: "messages", role: "log", "aria-label": "Conversation", "aria-live": "off", tabindex: "0" });
  const hint = h("p", { class: "empty" }, "Ask something. Nothing is kept when you leave this page.");
  const model = h("select", { id: "chat-model" });
  const system = h("textarea", { id: "chat-system", rows: 2 });
  const offered = h("input", { type: "checkbox", id: "chat-tools" });
  const ask = h("textarea", { id: "chat-ask", rows: 2, placeholder: "Message", "aria-label": "Message", required: true });
  const send = h("button", { class: "primary" }, "Send");
  const stop = h("button", { type: "button", hidden: true, click: () => running?.abort() }, "Stop");
  const clear = h("button", { type: "button", class: "quiet", click: () => ((messages.length = 0), fill(log, hint)) }, "Clear");
  const status = h("p", { class: "hidden", role: "status" });
  fill(log, hint);

  ask.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send.form.requestSubmit();
    }
  });

  async function submit(event) {
    event.preventDefault();
    const said = ask.value.trim();
    if (!said || running) return;
    ask.value = "";
    hint.remove();
    push({ role: "user", content: said });
    running = new AbortController();
    attribute(send, "hidden", true);
    attribute(stop, "hidden", false);
    try {
      for (let round = 0; round < MOST_ROUNDS && (await answer()); round += 1);
    } finally {
      running = null;
      attribute(send, "hidden", false);
      attribute(stop, "hidden", true);
    }
  }

  /** One answer of the model; whether it called tools, so that it has to be asked again. */
  async function answer() {
    const shown = messageView("assistant");
    append(shown.element);
    const began = performance.now();
    pending = { shown, since: live.now() };
    tellWait();
    const made = { role: "assistant", content: "", reasoning: "", tool_calls: [] };
    let first = null;
    let last = began;
    let usage = null;
    try {
      for await (const data of events("POST", "/v1/chat/completions", body(), { signal: running.signal })) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage ?? usage;
        const delta = chunk.choices?.[0]?.delta;
        if (!delta) continue;
        if (take(made, delta)) {
          last = performance.now();
          if (first === null) endWait();
          first ??= last;
          shown.update(made);
          follow();
        }
      }
    } catch (error) {
      shown.update(made, running?.signal.aborted ? "Stopped." : error.message);
    }
    endWait();
    shown.figures([first === null ? null : `first token ${latency((first - began) / 1000)}`, usage && `${number(usage.completion_tokens)} tokens`, usage && last > first ? `${number((usage.completion_tokens - 1) / ((last - first) / 1000), 1)} tokens/s` : null]);
    text(status, made.content || "The answer has ended.");
    messages.push({ role: "assistant", content: made.content || null, ...(made.tool_calls.length && { tool_calls: made.tool_calls }) });
    for (const tool of made.tool_calls) push({ role: "tool", tool_call_id: tool.id, content: runTool(tool) });
    follow();
    return made.tool_calls.length > 0 && !running?.signal.aborted;
  }

  /** The reason why no word has come yet, in the place of the answer. */
  function tellWait() {
    const asked = live.model(fixed || model.value);
    if (pending && asked) pending.shown.wait(waitWords(asked, live.now(), pending.since));
  }

  function endWait() {
    pending?.shown.wait("");
    pending = null;
  }

  function body() {
    const first = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    return { model: fixed || model.value, messages: [...first, ...messages], stream: true, stream_options: { include_usage: true }, ...(offered.checked && { tools: TOOLS }) };
  }

  function push(message) {
    messages.push(message);
    const shown = messageView(message.role);
    shown.update(message);
    append(shown.element);
  }

  function append(element) {
    log.append(element);
    follow();
  }

  const follow = () => (log.scrollTop = log.scrollHeight);

  return {
    title: "Chat",
    element: h(
      "section",
      { class: "card chat", "aria-label": "Chat" },
      fixed ? null : h("div", { class: "row between whole" }, h("h1", {}, "Chat"), h("div", { class: "row whole" }, h("label", { for: "chat-model" }, "Model"), model)),
      h("details", {}, h("summary", {}, "Options"), h("div", { class: "stack tight" }, h("div", { class: "field" }, h("label", { for: "chat-system" }, "System prompt"), system), h("label", { class: "check", for: "chat-tools" }, offered, "Offer two tools: the time of this browser, and a calculator"))),
      log,
      status,
      h("form", { class: "ask", submit }, ask, h("div", { class: "row end" }, clear, stop, send)),
    ),
    update({ models }) {
      tellWait();
      if (fixed || !models) return;
      const names = models.filter((one) => !one.deleting).map((one) => one.name);
      if (names.join("\n") === [...model.options].map((one) => one.value).join("\n")) return;
      const chosen = model.value;
      fill(model, names.map((name) => h("option", { value: name }, name)));
      model.value = names.includes(chosen) ? chosen : (models.find((one) => one.state === "ready")?.name ?? names[0] ?? "");
    },
    close: () => running?.abort(),
  };
}

/** Adds what a piece of the answer brings; whether it brought anything. */
function take(made, delta) {
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  made.reasoning += thought;
  made.content += delta.content ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const tool = (made.tool_calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    tool.id ||= piece.id ?? "";
    tool.function.name += piece.function?.name ?? "";
    tool.function.arguments += piece.function?.arguments ?? "";
  }
  return Boolean(thought || delta.content || delta.tool_calls?.length);
}
