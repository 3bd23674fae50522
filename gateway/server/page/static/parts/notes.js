// Notes on recent events, in the corner, and read aloud.
import { h } from "../dom.js";
import { adviceParts } from "./advice.js";

const SHOWN_MS = 8000;

/** @param {string} message @param {boolean} [bad] */
export function note(message, bad = false) {
  const dismiss = () => element.remove();
  const element = h(
    "div",
    { class: bad ? "note bad" : "note" },
    h("p", {}, adviceParts(message)),
    h("button", { type: "button", class: "quiet", "aria-label": "Dismiss", click: dismiss }, "✕"),
  );
  document.getElementById("notes").append(element);
  if (!bad) setTimeout(dismiss, SHOWN_MS);
}

/**
 * Runs the action of a button, and shows its error.
 * @returns {Promise<boolean>} whether it went well
 */
export async function attempt(work) {
  try {
    await work();
    return true;
  } catch (error) {
    if (error.name !== "AbortError") note(error.message, true);
    return false;
  }
}
