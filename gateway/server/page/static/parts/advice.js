// Advice of the gateway for people in front of a page: a command becomes a link to its button.
import { fill, h } from "../dom.js";

// The word of a button on the page of a model, and the end of the address that has it.
const MODEL_PLACES = {
  rm: ["Delete", ""],
  start: ["Start", ""],
  stop: ["Stop", ""],
  retry: ["Try again now", ""],
  set: ["Edit", "/edit"],
  show: ["The page of", ""],
  logs: ["Log of", "/log"],
};
const VIEWS = {
  ps: ["Overview", "#/"],
  list: ["Overview", "#/"],
  keys: ["Keys", "#/keys"],
  events: ["History", "#/history"],
  usage: ["Usage", "#/usage"],
  add: ["Add a model", "#/add"],
  search: ["Add a model", "#/add"],
  fits: ["Add a model", "#/add"],
};
const COMMAND = new RegExp("`([^`]+)`");
// Names in texts that stand for any name.
const PLACEHOLDERS = ["NAME", "WORDS"];

/**
 * The text with links in the place of commands that the page has too.
 * @param {string} advice  commands stand between backquotes: `fitserve stop demo`
 * @returns {any[]} texts and elements
 */
export function adviceParts(advice) {
  return advice.split(COMMAND).flatMap((piece, place) => {
    if (place % 2 === 0) return piece;
    return piece
      .split("; ")
      .flatMap((command, number) => [number ? ", " : "", commandPart(command)]);
  });
}

/** Shows the advice in an element. Equal advice is left alone. */
export function showAdvice(element, advice) {
  if (element.advice === advice && element.textContent === element.adviceText) return;
  fill(element, ...adviceParts(advice));
  element.advice = advice;
  element.adviceText = element.textContent;
}

function commandPart(command) {
  const [program, verb, ...commandWords] = command.split(/\s+/);
  const name = commandWords.find((word) => !word.startsWith("-")) ?? "";
  if (program !== "fitserve") return h("code", {}, command);
  if (Object.hasOwn(VIEWS, verb)) {
    const [word, address] = VIEWS[verb];
    return h("a", { href: address, class: "inline" }, word);
  }
  if (!Object.hasOwn(MODEL_PLACES, verb) || !name || PLACEHOLDERS.includes(name))
    return h("code", {}, command);
  const [word, end] = MODEL_PLACES[verb];
  const wishes = commandWords
    .slice(commandWords.indexOf(name) + 1)
    .join(" ")
    .replaceAll("--", "");
  const address = `#/models/${encodeURIComponent(name)}${end}`;
  return h(
    "a",
    { href: address, class: "inline" },
    `${word} ${name}${wishes ? `: ${wishes}` : ""}`,
  );
}
