// What just happened, in the corner, and read aloud.
import { h } from "../dom.js";

const SHOWN_MS = 8000;

/** @param {string} message @param {boolean} [bad] */
export function note(message, bad = false) {
  const gone = () => element.remove();
  const element = h(
    "div",
    { class: bad ? "note bad" : "note" },
    h("p", {}, message),
    h("button", { type: "button", class: "quiet", "aria-label": "Dismiss", click: gone }, "✕"),
  );
  document.getElementById("notes").append(element);
  if (!bad) setTimeout(gone, SHOWN_MS);
}

/** Runs what a button does; what goes wrong is said. @returns {Promise<boolean>} whether it went well */
export async function attempt(work) {
  try {
    await work();
    return true;
  } catch (error) {
    if (error.name !== "AbortError") note(error.message, true);
    return false;
  }
}
