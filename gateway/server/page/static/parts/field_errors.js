// An error at its field: the gateway names the field, and the form knows its place.
import { attribute, h } from "../dom.js";
import { showAdvice } from "./advice.js";

// A hint for programs, which a form needs not.
const HINT = /\s*GET \/admin\/openapi\.json describes .*$/;

/**
 * @param {() => Iterable<[string, any]>} fields  inputs by the name that the API has for them
 * @returns {{show: (error: any, focus?: boolean) => boolean, clear: () => void}}
 *   show: whether the error belongs to a field
 */
export function fieldErrors(fields) {
  let current = null;

  function clear() {
    if (!current) return;
    current.words.remove();
    attribute(current.input, "aria-invalid", null);
    attribute(current.input, "aria-describedby", current.before);
    current = null;
  }

  return {
    clear,
    show(error, focus = false) {
      clear();
      const match = [...fields()].find(
        ([name]) => error.param === name || error.param?.startsWith(`${name}.`),
      );
      if (!match) return false;
      const [, input] = match;
      const describedBy = input.getAttribute("aria-describedby");
      const id = `${input.id}-wrong`;
      const words = h("p", { class: "problem small", id, role: "alert" });
      current = { words, input, before: describedBy };
      showAdvice(words, sentence(error));
      (input.closest(".field") ?? input.parentElement).append(words);
      attribute(input, "aria-invalid", "true");
      attribute(input, "aria-describedby", [describedBy, id].filter(Boolean).join(" "));
      for (let fold = input.closest("details"); fold; fold = fold.parentElement.closest("details"))
        fold.open = true;
      if (focus) input.focus();
      return true;
    },
  };
}

/** "context: too large. GET …" -> "Too large." */
function sentence({ message, param }) {
  const words = message.replace(HINT, "");
  const remainder = words.startsWith(`${param}: `) ? words.slice(param.length + 2) : words;
  return remainder.charAt(0).toUpperCase() + remainder.slice(1);
}
