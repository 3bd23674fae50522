// Code as text, with a button that copies it.
import { h } from "../dom.js";
import { copyButton } from "./copy.js";

/** @param {string} label @param {string} code */
export function codeBlock(label, code) {
  const block = h(
    "pre",
    { class: "command", tabindex: "0", role: "region", "aria-label": label || "Code" },
    h("code", {}, code),
  );
  return h(
    "figure",
    { class: "code" },
    h(
      "figcaption",
      { class: "row between whole" },
      h("span", { class: "muted small" }, label),
      copyButton(() => code, label || "the code"),
    ),
    block,
  );
}
