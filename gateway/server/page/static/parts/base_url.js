// The address that apps need, to copy.
import { h } from "../dom.js";
import { copyButton } from "./copy.js";

/** The base URL of OpenAI's API at this gateway. */
export const baseUrl = () => `${location.origin}/v1`;

/** The base URL with its name, on one line. */
export function baseUrlLine() {
  return h(
    "div",
    { class: "row muted small" },
    h("span", {}, "Base URL of apps: ", h("code", {}, baseUrl())),
    copyButton(baseUrl, "the base URL"),
  );
}
