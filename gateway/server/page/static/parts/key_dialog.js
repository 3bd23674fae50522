// The key: asked for once, however many calls need it.
import { h } from "../dom.js";

/**
 * @param {string} problem  the error of the last one
 * @param {(() => void) | null} signIn  the way to a login; null: there is none
 * @returns {Promise<string>}
 */
export function askKey(problem, signIn) {
  return new Promise((resolve) => {
    const field = h("input", {
      id: "key",
      type: "password",
      autocomplete: "off",
      spellcheck: "false",
      required: true,
      "aria-describedby": "key-about",
    });
    const dialog = h(
      "dialog",
      { "aria-labelledby": "key-title", cancel: (event) => event.preventDefault() },
      h(
        "form",
        {
          submit: (event) => {
            event.preventDefault();
            dialog.close();
            dialog.remove();
            resolve(field.value.trim());
          },
        },
        h("h2", { id: "key-title" }, "This gateway needs a key"),
        problem && h("p", { class: "problem", role: "alert" }, problem),
        h("label", { for: "key" }, "Key"),
        field,
        h(
          "p",
          { id: "key-about", class: "muted" },
          "It stays in this tab, and is gone when the tab is closed.",
        ),
        h(
          "div",
          { class: "row end" },
          signIn && h("button", { type: "button", click: signIn }, "Sign in"),
          h("button", { class: "primary" }, "Continue"),
        ),
      ),
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}
