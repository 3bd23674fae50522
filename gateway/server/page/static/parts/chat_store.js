// Conversations that this browser keeps: one for each model, and one for the page of all.

const PREFIX = "fitserve.chat/";

/** @param {string} place @returns {{messages: any[], options: Record<string, any>}} */
export function readChat(place) {
  try {
    const storedChat = JSON.parse(localStorage.getItem(PREFIX + place) ?? "{}");
    return {
      messages: Array.isArray(storedChat.messages) ? storedChat.messages : [],
      options: storedChat.options ?? {},
    };
  } catch {
    return { messages: [], options: {} };
  }
}

/**
 * Pictures are left out where they find no room.
 * @returns {boolean} whether there was room for the texts
 */
export function keepChat(place, { messages, options }) {
  if (!messages.length && !Object.keys(options).length) {
    localStorage.removeItem(PREFIX + place);
    return true;
  }
  for (const rows of [messages, messages.map(({ images, ...message }) => message)]) {
    try {
      localStorage.setItem(PREFIX + place, JSON.stringify({ messages: rows, options }));
      return true;
    } catch (error) {
      console.debug("the conversation was not kept:", error.message);
    }
  }
  return false;
}
