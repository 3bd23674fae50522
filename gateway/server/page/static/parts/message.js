// One message of a chat: text as it is, thoughts folded away, calls of tools with their arguments.
import { attribute, fill, h, text } from "../dom.js";

const WHO = { user: "You", assistant: "Model", tool: "Tool" };

/** @param {string} role */
export function messageView(role) {
  const thoughts = h("pre", { class: "said muted" });
  const thinking = h("details", { hidden: true }, h("summary", {}, "Thoughts"), thoughts);
  const content = h("pre", { class: "said" });
  const tools = h("div");
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const figures = h("p", { class: "muted small" });
  const waiting = h("p", { class: "muted waiting" });
  return {
    element: h("article", { class: `message ${role}` }, h("p", { class: "by" }, WHO[role] ?? role), waiting, thinking, content, tools, problem, figures),
    update(message, trouble = "") {
      text(thoughts, message.reasoning?.trim() ?? "");
      attribute(thinking, "hidden", !message.reasoning);
      text(content, message.content?.trim() ?? "");
      attribute(content, "hidden", !message.content);
      fill(tools, (message.tool_calls ?? []).map((tool) => h("p", { class: "call mono" }, h("span", { class: "tag" }, "calls"), ` ${tool.function.name}(${tool.function.arguments})`)));
      text(problem, trouble);
      attribute(problem, "hidden", !trouble);
    },
    wait: (words) => text(waiting, words),
    figures: (said) => text(figures, said.filter(Boolean).join(" · ")),
  };
}
