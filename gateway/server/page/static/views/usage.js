// Who used what: requests and tokens by model and key, of the last 30 days.
import { call } from "../api.js";
import { fill, h } from "../dom.js";
import { number } from "../format.js";
import { attempt } from "../parts/notes.js";
import { table } from "../parts/plan.js";

export function usage() {
  const content = h("div", { class: "card" }, h("p", { class: "muted" }, "Reading …"));
  attempt(async () => {
    const { data, first, last } = await call("GET", "/admin/usage?by=model,key");
    const rows = data.map((one) => [one.model, one.key || "no key", ...[one.requests, one.prompt_tokens, one.cached_tokens, one.completion_tokens].map((count) => number(count, 0))]);
    fill(content, h("p", { class: "muted" }, `${first} to ${last}, days of UTC`), rows.length ? table("Usage", ["Model", "Key", "Requests", "Prompt tokens", "of these cached", "Tokens written"], rows) : h("p", { class: "empty" }, "No requests yet."));
  });
  return { title: "Usage", element: h("div", { class: "stack" }, h("h1", {}, "Usage"), content) };
}
