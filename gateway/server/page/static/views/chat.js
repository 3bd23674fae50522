// A chat with a model: streamed answers, thoughts, tool calls and images. This browser keeps it.
import { events } from "../api.js";
import { attribute, fill, h, text } from "../dom.js";
import { latency, number } from "../format.js";
import { imageChooser } from "../parts/chat_images.js";
import { chatOptions } from "../parts/chat_options.js";
import { keepChat, readChat } from "../parts/chat_store.js";
import { runTool } from "../parts/chat_tools.js";
import { messageView } from "../parts/message.js";
import { note } from "../parts/notes.js";
import { waitWords } from "../parts/start.js";

// A model that calls tools again and again comes to an end.
const MAX_ROUNDS = 4;
const STARTING_STATES = new Set(["starting", "verifying"]);

/**
 * @param {{live: import("../live.js").Live}} context
 * @param {string} [fixed]  the model; else one is chosen
 */
export function chat({ live }, fixed = "") {
  const storedChat = readChat(fixed);
  /** @type {any[]} */
  const messages = storedChat.messages;
  let answering = null;
  /** The answer that has not begun, and when it was asked for. */
  let pending = null;
  /** The place of the message that is rewritten; null: none. */
  let edited = null;
  /** The text before an edit, which comes back after it. */
  let draft = { content: "", images: [] };
  let wasSaved = true;
  const log = h("div", {
    class: "messages",
    role: "log",
    "aria-label": "Conversation",
    "aria-live": "off",
    tabindex: "0",
  });
  const hint = h(
    "p",
    { class: "empty" },
    "Ask something. This browser keeps the conversation until you clear it.",
  );
  const model = h("select", { id: "chat-model" });
  const options = chatOptions(storedChat.options, () => saveChat());
  const images = imageChooser();
  const ask = h("textarea", {
    id: "chat-ask",
    rows: 2,
    placeholder: "Message",
    "aria-label": "Message",
    required: true,
    paste: images.paste,
  });
  const send = h("button", { class: "primary" }, "Send");
  const abort = () => answering?.abort();
  const stop = h("button", { type: "button", hidden: true, click: abort }, "Stop");
  const clear = h(
    "button",
    { type: "button", class: "quiet", click: () => (answering?.abort(), truncate(0), edit(null)) },
    "Clear",
  );
  const editing = h(
    "p",
    { class: "row muted small", hidden: true },
    "The messages after this one are replaced.",
    h("button", { type: "button", class: "quiet", click: () => edit(null) }, "Cancel"),
  );
  const status = h("p", { class: "hidden", role: "status" });

  ask.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send.form.requestSubmit();
    }
  });

  async function submit(event) {
    event.preventDefault();
    const prompt = ask.value.trim();
    if (!prompt || answering) return;
    if (edited !== null) truncate(edited);
    const sent = images.removeAll();
    edit(null);
    addMessage({ role: "user", content: prompt, ...(sent.length && { images: sent }) });
    saveChat();
    await answers();
  }

  async function answers() {
    answering = new AbortController();
    attribute(send, "hidden", true);
    attribute(stop, "hidden", false);
    try {
      for (let round = 0; round < MAX_ROUNDS && (await answer()); round += 1);
    } finally {
      answering = null;
      attribute(send, "hidden", false);
      attribute(stop, "hidden", true);
    }
  }

  /** One answer of the model. Returns whether it called tools, so that their results follow. */
  async function answer() {
    const { signal } = answering;
    const question = requestBody();
    const reply = { role: "assistant", content: "", reasoning: "", tool_calls: [] };
    const view = addMessage(reply, false);
    const clock = { began: performance.now(), first: null, last: 0, usage: null, end: null };
    pending = { view, since: live.now() };
    showWait();
    try {
      await waitForStart(question.model, signal);
      for await (const data of events("POST", "/v1/chat/completions", question, { signal })) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        clock.usage = chunk.usage ?? clock.usage;
        clock.end = chunk.choices?.[0]?.finish_reason ?? clock.end;
        if (!appendDelta(reply, chunk.choices?.[0]?.delta ?? {})) continue;
        clock.last = performance.now();
        clock.first ??= clock.last;
        endWait();
        const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
        view.update(reply, false);
        if (isAtEnd) follow();
      }
    } catch (error) {
      reply.trouble = signal.aborted ? "Stopped." : error.message;
      // A cut-off call has incomplete arguments.
      reply.tool_calls = [];
    }
    endWait();
    // Some engines count their calls from 1.
    reply.tool_calls = reply.tool_calls.filter(Boolean);
    reply.figures = figures(clock);
    view.update(reply);
    text(status, reply.content || "The answer has ended.");
    for (const tool of reply.tool_calls)
      addMessage({ role: "tool", tool_call_id: tool.id, content: runTool(tool) });
    saveChat();
    return reply.tool_calls.length > 0 && !signal.aborted;
  }

  /** Waits while the model starts: the gateway would refuse, or end a long wait. */
  async function waitForStart(name, signal) {
    const isStarting = () => STARTING_STATES.has(live.model(name)?.state);
    await new Promise((resolve) => {
      const check = () => {
        if (isStarting() && !signal.aborted) return;
        live.removeEventListener("change", check);
        signal.removeEventListener("abort", check);
        resolve();
      };
      live.addEventListener("change", check);
      signal.addEventListener("abort", check);
      check();
    });
    signal.throwIfAborted();
  }

  /** The reason why no word has come yet, in the place of the answer. */
  function showWait() {
    const chosenModel = live.model(fixed || model.value);
    if (pending && chosenModel)
      pending.view.wait(waitWords(chosenModel, live.now(), pending.since));
  }

  function endWait() {
    pending?.view.wait("");
    pending = null;
  }

  function requestBody() {
    const system = options.system() ? [{ role: "system", content: options.system() }] : [];
    return {
      model: fixed || model.value,
      messages: [...system, ...messages.map(request).filter(Boolean)],
      stream: true,
      stream_options: { include_usage: true },
      ...options.fields(),
    };
  }

  function saveChat() {
    const isSaved = keepChat(fixed, { messages, options: options.read() });
    if (wasSaved && !isSaved)
      note(
        "This browser has no room for this conversation: it will be lost with this page." +
          " Clear other chats.",
        true,
      );
    wasSaved = isSaved;
  }

  function addMessage(message, complete = true) {
    messages.push(message);
    const view = show(message, complete);
    follow();
    return view;
  }

  function show(message, complete = true) {
    hint.remove();
    const place = () => messages.indexOf(message);
    const actions = {
      user: { edit: () => edit(place()) },
      assistant: { repeat: () => repeat(place()) },
    }[message.role];
    const view = messageView(message.role, actions);
    view.update(message, complete);
    log.append(view.element);
    return view;
  }

  /** Removes the messages from a place on. */
  function truncate(place) {
    messages.length = place;
    while (log.childNodes.length > place) log.lastChild.remove();
    if (!place) fill(log, hint);
    saveChat();
  }

  /** Rewrites a message of the user, in place of it and all after it; null: none. */
  function edit(place) {
    if (answering && place !== null) return;
    if (place !== null && edited === null)
      draft = { content: ask.value, images: images.removeAll() };
    const origin = place === null ? draft : messages[place];
    if (place === null) draft = { content: "", images: [] };
    edited = place;
    ask.value = origin.content;
    images.set(origin.images ?? []);
    attribute(editing, "hidden", place === null);
    if (place !== null) ask.focus();
  }

  /** Asks once more for an answer, and drops the later messages. */
  function repeat(place) {
    if (answering) return;
    if (edited !== null) edit(null);
    truncate(messages.slice(0, place).findLastIndex((message) => message.role === "user") + 1);
    if (messages.length) answers();
  }

  const follow = () => (log.scrollTop = log.scrollHeight);

  const permit = () =>
    images.permit(live.model(fixed || model.value)?.inputs.includes("image") ?? false);
  model.addEventListener("change", permit);

  fill(log, hint);
  messages.forEach((message) => show(message));
  // The end is known once it is on the page.
  requestAnimationFrame(follow);

  return {
    title: "Chat",
    element: h(
      "section",
      { class: "card chat", "aria-label": "Chat" },
      fixed
        ? null
        : h(
            "div",
            { class: "row between whole" },
            h("h1", {}, "Chat"),
            h("div", { class: "row whole" }, h("label", { for: "chat-model" }, "Model"), model),
          ),
      options.element,
      log,
      status,
      h(
        "form",
        { class: "ask", submit },
        editing,
        ask,
        h(
          "div",
          { class: "row between" },
          images.element,
          h("div", { class: "row end" }, clear, stop, send),
        ),
      ),
    ),
    update({ models }) {
      showWait();
      permit();
      if (fixed || !models) return;
      const names = models.filter((model) => !model.deleting).map((model) => model.name);
      if (names.join("\n") === [...model.options].map((option) => option.value).join("\n")) return;
      const chosenName = model.value;
      fill(
        model,
        names.map((name) => h("option", { value: name }, name)),
      );
      model.value = names.includes(chosenName)
        ? chosenName
        : (models.find((model) => model.state === "ready")?.name ?? names[0] ?? "");
    },
    close: () => answering?.abort(),
  };
}

/** A message as the model gets it; null: it has nothing to say. */
function request({ role, content, images, tool_calls: calls, tool_call_id: id }) {
  if (role === "tool") return { role, tool_call_id: id, content };
  if (role === "assistant")
    return content || calls?.length
      ? { role, content: content || null, ...(calls?.length && { tool_calls: calls }) }
      : null;
  if (!images?.length) return { role, content };
  return {
    role,
    content: [
      ...images.map(({ url }) => ({ type: "image_url", image_url: { url } })),
      { type: "text", text: content },
    ],
  };
}

function figures({ began, first, last, usage, end }) {
  return [
    first !== null && `first token ${latency((first - began) / 1000)}`,
    usage && `${number(usage.completion_tokens)} tokens`,
    usage &&
      last > first &&
      `${number((usage.completion_tokens - 1) / ((last - first) / 1000), 1)} tokens/s`,
    end === "length" && "cut off: the most tokens were reached",
  ]
    .filter(Boolean)
    .join(" · ");
}

/** Adds a piece of the answer. Returns whether the piece had text. */
function appendDelta(reply, delta) {
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  reply.reasoning += thought;
  reply.content += delta.content ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const tool = (reply.tool_calls[piece.index] ??= {
      id: "",
      type: "function",
      function: { name: "", arguments: "" },
    });
    tool.id ||= piece.id ?? "";
    tool.function.name += piece.function?.name ?? "";
    tool.function.arguments += piece.function?.arguments ?? "";
  }
  return Boolean(thought || delta.content || delta.tool_calls?.length);
}
