// Calls to the gateway that this page comes from. A key that is needed is asked for once, and kept
// only in this tab.
import { obtainKey } from "./parts/sign_in.js";

const KEY_ITEM = "fitserve.key";
// Seconds before a reading is repeated whose connection was lost.
const RESTS_S = [0.3, 1, 2];

/**
 * An answer that is not a success, in the gateway's own words; status 0: no answer, or half of one.
 */
export class ApiError extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    /** The field of the request that is wrong; null: none is named. */
    this.param = param;
  }
}

/** Whether this tab has a key. */
export const hasKey = () => sessionStorage.getItem(KEY_ITEM) !== null;

export const useKey = (key) => sessionStorage.setItem(KEY_ITEM, key);

/**
 * The value of the answer.
 * @param {string} method
 * @param {string} path
 * @param {unknown} [body]
 * @param {{signal?: AbortSignal}} [options]
 * @returns {Promise<any>}
 */
export async function call(method, path, body, options = {}) {
  const answer = await request(method, path, body, options);
  return answer.status === 204 ? null : answer.json();
}

/**
 * The answer in pieces of text, as they come.
 * @returns {AsyncGenerator<string>}
 */
export async function* pieces(method, path, body, options = {}) {
  const answer = await request(method, path, body, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done: isEnd, value } = await explainLoss(reader.read());
      if (isEnd) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * The data of server-sent events.
 * @returns {AsyncGenerator<string>}
 */
export async function* events(method, path, body, options = {}) {
  let unfinishedLine = "";
  for await (const piece of pieces(method, path, body, options)) {
    const blocks = (unfinishedLine + piece).split(/\r?\n\r?\n/);
    unfinishedLine = blocks.pop() ?? "";
    for (const event of blocks) {
      const data = event
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

async function request(method, path, body, { signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY_ITEM);
    const headers = {
      ...(key && { authorization: `Bearer ${key}` }),
      ...(body !== undefined && { "content-type": "application/json" }),
    };
    const send = () =>
      explainLoss(
        fetch(path, {
          method,
          headers,
          signal,
          body: body === undefined ? undefined : JSON.stringify(body),
          cache: "no-store",
          redirect: "error",
        }),
      );
    const answer = await (method === "GET" ? repeatRead(send) : send());
    if (answer.ok) return answer;
    const error = await refusal(answer);
    if (answer.status !== 401) throw error;
    // Another call may have asked meanwhile.
    if (sessionStorage.getItem(KEY_ITEM) === key)
      useKey(await obtainKey(key === null ? "" : error.message));
  }
}

/** Replaces the browser's words for a lost connection. */
async function explainLoss(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(
      0,
      "The connection to the gateway was lost: it ended, or the network changed. Try again.",
    );
  }
}

/** A reading has no effect, so it is sent again when its connection was lost. */
async function repeatRead(send) {
  for (const pauseS of RESTS_S) {
    try {
      return await send();
    } catch (error) {
      if (error.status !== 0) throw error;
      await new Promise((resume) => setTimeout(resume, pauseS * 1000));
    }
  }
  return send();
}

async function refusal(answer) {
  try {
    const { error } = await answer.json();
    return new ApiError(answer.status, error.message, error.param);
  } catch {
    return new ApiError(answer.status, `The gateway answered with ${answer.status}.`);
  }
}
