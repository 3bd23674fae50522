// The page: which view the address asks for, and the live state that it shows.
import { attribute, fill, h, syncChildren, text } from "./dom.js";
import { plural } from "./format.js";
import { Live } from "./live.js";
import { adviceParts } from "./parts/advice.js";
import { person, signOut, takePlace } from "./parts/sign_in.js";
import { add } from "./views/add.js";
import { chat } from "./views/chat.js";
import { history } from "./views/history.js";
import { keys } from "./views/keys.js";
import { missing } from "./views/missing.js";
import { model } from "./views/model.js";
import { overview } from "./views/overview.js";
import { transcripts } from "./views/transcripts.js";
import { usage } from "./views/usage.js";

const PAGES = [
  ["Overview", "#/"],
  ["Chat", "#/chat"],
  ["History", "#/history"],
  ["Usage", "#/usage"],
  ["Keys", "#/keys"],
];
const VIEWS = { "": overview, add, chat, history, keys, models: model, transcripts, usage };

const live = new Live();
const main = document.getElementById("main");
let view = null;

function route() {
  const [page, ...pathParts] = location.hash.replace(/^#\/?/, "").split("/").map(decodePart);
  view?.close?.();
  view = Object.hasOwn(VIEWS, page) ? VIEWS[page]({ live }, ...pathParts) : missing(page, PAGES);
  document.title = view.title === "Overview" ? "fitserve" : `${view.title} – fitserve`;
  fill(main, view.element);
  view.update?.(live.state);
  for (const link of document.querySelectorAll("#nav a"))
    attribute(link, "aria-current", link.hash === (page ? `#/${page}` : "#/") ? "page" : null);
  if (document.activeElement !== document.body) main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

/** A part of an address; as it stands where it is broken. */
function decodePart(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function show() {
  const link = document.getElementById("link");
  const { gateway } = live.state;
  const problems = gateway?.problems ?? [];
  attribute(link, "data-tone", !live.connected ? "bad" : problems.length ? "warn" : "good");
  text(
    link,
    !live.connected
      ? gateway
        ? "Connection lost; trying again"
        : "Connecting"
      : problems.length
        ? plural(problems.length, "problem")
        : "Live",
  );
  syncChildren(
    document.getElementById("problems"),
    problems,
    (problem) => problem,
    (problem) => ({ element: h("li", {}, adviceParts(problem)), update() {} }),
  );
  showRecorder(gateway?.recorded ?? null);
  showPerson();
  if (live.connected) view?.update?.(live.state);
}

/** Says on every view whose requests are recorded. owners: null where the recorder is off. */
function showRecorder(owners) {
  const words = owners?.length ? `Recording ${owners.join(", ")}` : "Transcripts";
  syncChildren(
    document.getElementById("recorder"),
    owners === null ? [] : [words],
    (word) => word,
    (word) => ({
      element: h("a", { href: "#/transcripts", class: owners.length ? "problem" : "small" }, word),
      update() {},
    }),
  );
}

function showPerson() {
  const now = person();
  syncChildren(
    document.getElementById("person"),
    now === null ? [] : [now],
    ({ name }) => name,
    ({ name, canSignOut }) => ({
      element: canSignOut
        ? h("button", { type: "button", class: "quiet", click: signOut }, `Sign out ${name}`)
        : h("span", { class: "muted small" }, name),
      update() {},
    }),
  );
}

fill(document.getElementById("nav"), ...PAGES.map(([word, to]) => h("a", { href: to }, word)));
window.addEventListener("hashchange", route);
live.addEventListener("change", show);
const place = takePlace();
if (place && !location.hash) window.history.replaceState(null, "", place);
route();
live.follow();
// Times go on where nothing else changes.
setInterval(() => live.connected && !document.hidden && view?.update?.(live.state), 1000);
