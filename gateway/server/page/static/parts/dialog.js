// Questions in front of the page. Escape and the button say no; the focus goes back to where it
// was.
import { fill, h } from "../dom.js";

/**
 * Shows a dialog until it is closed. `build(close)` gives its content.
 * @template T
 * @param {string} title
 * @param {(close: (value: T) => void) => any[]} build
 * @returns {Promise<T | null>} null: it was dismissed
 */
export function show(title, build) {
  return new Promise((resolve) => {
    let value = null;
    const heading = h("h2", { id: "dialog-title" }, title);
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" });
    const close = (answer) => {
      value = answer;
      dialog.close();
    };
    fill(dialog, heading, ...build(close));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(value);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/**
 * @param {string} title
 * @param {string} detail  the effect, in a sentence
 * @param {{action: string, danger?: boolean, more?: any[]}} options
 *   more: elements above the buttons
 * @returns {Promise<boolean>}
 */
export async function confirm(title, detail, { action, danger = false, more = [] }) {
  const answer = await show(title, (close) => [
    h("p", {}, detail),
    ...more,
    h(
      "div",
      { class: "row end" },
      h("button", { type: "button", click: () => close(false) }, "Cancel"),
      h(
        "button",
        { type: "button", class: danger ? "danger" : "primary", click: () => close(true) },
        action,
      ),
    ),
  ]);
  return answer === true;
}
