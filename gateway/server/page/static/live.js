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
  #clockOffsetS = 0;
  #stop = null;

  /** A page that nobody sees costs the gateway nothing. */
  follow() {
    const toggle = () => (document.hidden ? this.#stopReading() : this.#startReading());
    document.addEventListener("visibilitychange", toggle);
    toggle();
  }

  /** The time of the gateway's clock, in Unix seconds. */
  now() {
    return Date.now() / 1000 + this.#clockOffsetS;
  }

  model(name) {
    return this.state.models?.find((model) => model.name === name) ?? null;
  }

  #stopReading() {
    this.#stop?.abort();
    this.#stop = null;
  }

  #startReading() {
    if (this.#stop) return;
    this.#stop = new AbortController();
    this.#read(this.#stop.signal);
  }

  async #read(signal) {
    let pauseS = 1;
    while (!signal.aborted) {
      const controller = new AbortController();
      const abort = () => controller.abort();
      signal.addEventListener("abort", abort);
      let silence = setTimeout(abort, DEAD_MS);
      try {
        let isFirst = true;
        const options = { signal: controller.signal };
        for await (const data of events("GET", "/admin/live", undefined, options)) {
          clearTimeout(silence);
          silence = setTimeout(abort, DEAD_MS);
          this.#merge(JSON.parse(data), isFirst);
          isFirst = false;
          pauseS = 1;
        }
      } catch (error) {
        if (!signal.aborted) console.debug("the live stream ended:", error.message);
      }
      clearTimeout(silence);
      signal.removeEventListener("abort", abort);
      if (signal.aborted) return;
      this.#publish(false);
      await new Promise((resume) => setTimeout(resume, pauseS * 1000));
      pauseS = Math.min(pauseS * 2, MAX_REST_S);
    }
  }

  #merge(parts, isFirst) {
    const additions = parts.points ?? [];
    // The clock of the gateway may have been set back.
    const formerPoints = isFirst
      ? []
      : this.state.points.filter((point) => !additions.length || point.at < additions[0].at);
    const points = [...formerPoints, ...additions].slice(-MAX_POINTS);
    this.state = { ...this.state, ...parts, points };
    this.#clockOffsetS = parts.at - Date.now() / 1000;
    this.#publish(true);
  }

  #publish(connected) {
    this.connected = connected;
    this.dispatchEvent(new Event("change"));
  }
}
