// An address without a view, with links to the likely ones.
import { h } from "../dom.js";

/**
 * @param {string} words  the thing that is not there
 * @param {[string, string][]} links  words and addresses
 */
export function missingNote(words, links) {
  return h(
    "div",
    { class: "card empty" },
    h("p", {}, words),
    h(
      "ul",
      { class: "row" },
      links.map(([word, to]) => h("li", {}, h("a", { class: "button", href: to }, word))),
    ),
  );
}

/** @param {string} page @param {[string, string][]} pages */
export function missing(page, pages) {
  return {
    title: "No such page",
    element: h(
      "div",
      { class: "stack" },
      h("h1", {}, "No such page"),
      missingNote(`This gateway has no page ${page}.`, pages),
    ),
  };
}
