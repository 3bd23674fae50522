// The state of the gateway as it changes: one stream for this page, from GET /admin/live.
import { events } from "./api.js";

const MAX_REST_S = 15;
// A stream is never silent for so long.
const DEAD_MS = 40_000;
const MAX_POINTS = 120;

/**
 * `state` is the newest; "change" is dispatched when it is another one, and when the connection
 * comes and goes.
 */
export class Live extends EventTarget {
  state = { gateway: null, machine: null, models: null, requests: null, points: [], at: 0 };
  connected = false;
  /** Names of models that this page added, until the state has them. */
  added = new Set();
  /** Seconds by which the gateway's clock is ahead of this browser's. */
  #ahead = 0;
  #stop = null;

  /** A page that nobody sees costs the gateway nothing. */
  follow() {
    const look = () => (document.hidden ? this.#end() : this.#begin());
    document.addEventListener("visibilitychange", look);
    look();
  }

  /** The time of the gateway's clock, in Unix seconds. */
  now() {
    return Date.now() / 1000 + this.#ahead;
  }

  model(name) {
    return this.state.models?.find((model) => model.name === name) ?? null;
  }

  #end() {
    this.#stop?.abort();
    this.#stop = null;
  }

  #begin() {
    if (this.#stop) return;
    this.#stop = new AbortController();
    this.#read(this.#stop.signal);
  }

  async #read(ended) {
    let pauseS = 1;
    while (!ended.aborted) {
      const controller = new AbortController();
      const end = () => controller.abort();
      ended.addEventListener("abort", end);
      let silence = setTimeout(end, DEAD_MS);
      try {
        let first = true;
        const { signal } = controller;
        for await (const data of events("GET", "/admin/live", undefined, { signal })) {
          clearTimeout(silence);
          silence = setTimeout(end, DEAD_MS);
          this.#take(JSON.parse(data), first);
          first = false;
          pauseS = 1;
        }
      } catch (error) {
        if (!ended.aborted) console.debug("the live stream ended:", error.message);
      }
      clearTimeout(silence);
      ended.removeEventListener("abort", end);
      if (ended.aborted) return;
      this.#tell(false);
      await new Promise((resume) => setTimeout(resume, pauseS * 1000));
      pauseS = Math.min(pauseS * 2, MAX_REST_S);
    }
  }

  #take(parts, first) {
    const additions = parts.points ?? [];
    // The clock of the gateway may have been set back.
    const earlier = first
      ? []
      : this.state.points.filter((point) => !additions.length || point.at < additions[0].at);
    const points = [...earlier, ...additions].slice(-MAX_POINTS);
    this.state = { ...this.state, ...parts, points };
    this.#ahead = parts.at - Date.now() / 1000;
    this.#tell(true);
  }

  #tell(connected) {
    this.connected = connected;
    this.dispatchEvent(new Event("change"));
  }
}
