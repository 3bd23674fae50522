// One message of a chat: its text, folded thoughts, pictures, calls of tools, and its actions.
import { attribute, fill, h, text } from "../dom.js";
import { showAdvice } from "./advice.js";
import { imageView } from "./chat_images.js";
import { copyButton } from "./copy.js";
import { markdownView } from "./markdown.js";

const SPEAKERS = { user: "You", assistant: "Model", tool: "Tool" };

/**
 * @param {string} role
 * @param {{edit?: () => void, repeat?: () => void}} actions  of this message
 */
export function messageView(role, { edit, repeat } = {}) {
  let spokenText = "";
  const thoughts = h("pre", { class: "said muted" });
  const thinking = h("details", { hidden: true }, h("summary", {}, "Thoughts"), thoughts);
  const answer = role === "assistant" ? markdownView() : null;
  const content = answer?.element ?? h("pre", { class: "said" });
  const pictures = h("div", { class: "row pictures" });
  const tools = h("div");
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const waitNote = h("p", { class: "muted waiting" });
  const figures = h("span", { class: "muted small" });
  const buttons = [
    role !== "tool" && copyButton(() => spokenText, "this text"),
    edit && h("button", { type: "button", class: "quiet", click: edit }, "Edit"),
    repeat && h("button", { type: "button", class: "quiet", click: repeat }, "Again"),
  ];
  const actions = h("div", { class: "row actions", hidden: true }, figures, buttons);
  return {
    element: h(
      "article",
      { class: `message ${role}` },
      h("p", { class: "by" }, SPEAKERS[role] ?? role),
      pictures,
      waitNote,
      thinking,
      content,
      tools,
      problem,
      actions,
    ),
    /** `complete`: no more of it comes. */
    update(message, complete = true) {
      spokenText = message.content?.trim() ?? "";
      text(thoughts, message.reasoning?.trim() ?? "");
      attribute(thinking, "hidden", !message.reasoning);
      if (answer) answer.update(spokenText);
      else text(content, spokenText);
      attribute(content, "hidden", !spokenText);
      fill(pictures, (message.images ?? []).map(imageView));
      fill(
        tools,
        (message.tool_calls ?? []).map((tool) =>
          h(
            "p",
            { class: "call mono" },
            h("span", { class: "tag" }, "calls"),
            ` ${tool.function.name}(${tool.function.arguments})`,
          ),
        ),
      );
      showAdvice(problem, message.trouble ?? "");
      attribute(problem, "hidden", !message.trouble);
      text(figures, message.figures ?? "");
      attribute(actions, "hidden", !complete);
    },
    wait: (words) => text(waitNote, words),
  };
}
