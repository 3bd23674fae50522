// The key of a person's page: an identity is exchanged for it, or it is asked for.
import { askKey } from "./key_dialog.js";

const PERSON_ITEM = "fitserve.person";
const PLACE_ITEM = "fitserve.place";
// A key that is refused sooner than this is not replaced by another of the same person.
const MIN_LIFE_MS = 5000;

let pending = null;
let issuedAt = -MIN_LIFE_MS;

/**
 * A key for this tab; asks for it where nobody is signed in.
 * @param {string} problem  the error of the last one @returns {Promise<string>}
 */
export function obtainKey(problem) {
  pending ??= obtain(problem).finally(() => (pending = null));
  return pending;
}

async function obtain(problem) {
  const ways = await readJson("GET", "/auth/ways");
  if ((ways?.proxy || ways?.login) && performance.now() - issuedAt > MIN_LIFE_MS) {
    const token = await readJson("POST", "/auth/token");
    if (token) {
      issuedAt = performance.now();
      const { name, can_sign_out: canSignOut } = token;
      sessionStorage.setItem(PERSON_ITEM, JSON.stringify({ name, canSignOut }));
      return token.key;
    }
  }
  sessionStorage.removeItem(PERSON_ITEM);
  return askKey(problem, ways?.login ? signIn : null);
}

/** The answer; null: it was refused, or there was none. */
async function readJson(method, path) {
  try {
    const answer = await fetch(path, { method, cache: "no-store", redirect: "error" });
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

/** Leads to the provider, which leads back. */
function signIn() {
  sessionStorage.setItem(PLACE_ITEM, location.hash);
  location.assign("/auth/login");
}

/** The view that was open before the login; "": none. */
export function takePlace() {
  const place = sessionStorage.getItem(PLACE_ITEM) ?? "";
  sessionStorage.removeItem(PLACE_ITEM);
  return place;
}

/** The person of this tab; null: it has a key that was typed, or none. */
export function person() {
  return JSON.parse(sessionStorage.getItem(PERSON_ITEM) ?? "null");
}

/** Ends the session here, and at the provider where it can be. */
export async function signOut() {
  const answer = await readJson("POST", "/auth/logout");
  sessionStorage.clear();
  location.assign(answer?.url ?? "/");
  if (!answer?.url) location.reload();
}
