// A button that copies a text.
import { h, text } from "../dom.js";

/**
 * @param {() => string} read
 * @param {string} subject  the thing that is copied, for screen readers
 */
export function copyButton(read, subject) {
  const word = h("span", {}, "Copy");
  const button = h(
    "button",
    { type: "button", class: "quiet", "aria-label": `Copy ${subject}` },
    word,
  );
  button.addEventListener("click", async () => {
    text(word, (await copy(read())) ? "Copied" : "Press Ctrl+C");
  });
  button.addEventListener("blur", () => text(word, "Copy"));
  return button;
}

/**
 * Browsers have a clipboard for pages of this machine and of https; for others there is the older
 * way.
 */
async function copy(words) {
  try {
    await navigator.clipboard.writeText(words);
    return true;
  } catch {
    const field = h("textarea", { class: "hidden", value: words, "aria-hidden": "true" });
    const focused = document.activeElement;
    (focused?.closest("dialog") ?? document.body).append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return isCopied;
  }
}
