// Folders of the gateway's machine, to walk through: a model is chosen, a folder is searched.
import { call } from "../api.js";
import { attribute, fill, h } from "../dom.js";
import { showAdvice } from "./advice.js";

/**
 * @param {{choose: (path: string) => void, search: (path: string) => void}} options
 *   choose: takes a model; search: takes a folder to search
 */
export function folderBrowser({ choose, search }) {
  const status = h("p", { class: "muted small", role: "status" });
  const place = h("div", { class: "row" });
  const list = h("ul", { class: "folders" });
  const element = h(
    "section",
    { class: "stack", "aria-label": "Browse this machine", hidden: true },
    place,
    list,
    status,
  );
  let request = null;

  async function open(path, focuses = true) {
    request?.abort();
    const { signal } = (request = new AbortController());
    attribute(element, "aria-busy", "true");
    try {
      const query = path ? `?path=${encodeURIComponent(path)}` : "";
      const listing = await call("GET", `/admin/folders${query}`, undefined, { signal });
      showListing(listing, focuses);
    } catch (error) {
      if (!signal.aborted) showAdvice(status, error.message);
    }
    if (!signal.aborted) attribute(element, "aria-busy", null);
  }

  function showListing({ path, parent, folders, is_cut: isCut }, focuses) {
    const buttons = path
      ? [
          button("Up", () => open(parent), "Up, to the folder around it"),
          button("Search here", () => search(path), `Search in ${path}`),
        ]
      : [];
    const title = h("strong", { class: "found", tabindex: "-1" }, path || "Folders with models");
    fill(place, title, ...buttons);
    fill(list, ...folders.map(folderRow));
    const words = isCut ? "There are more folders." : "";
    showAdvice(status, folders.length ? words : emptyWords(path));
    if (focuses) title.focus();
  }

  function folderRow({ name, path, is_model: isModel }) {
    return h(
      "li",
      { class: "row" },
      button(name, () => open(path), `Open ${name}`),
      isModel ? button("Choose", () => choose(path), `Choose ${path}`) : null,
    );
  }

  return {
    element,
    toggle: () => {
      element.hidden = !element.hidden;
      if (!element.hidden) open("");
      return !element.hidden;
    },
    close: () => request?.abort(),
  };
}

function button(label, click, name) {
  return h("button", { type: "button", "aria-label": name, click }, label);
}

function emptyWords(path) {
  return path
    ? "No folder is in here."
    : "None of the folders in FITSERVE_MODEL_FOLDERS is on this machine.";
}
