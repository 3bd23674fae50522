// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** 1610612736 -> "1.5 GiB" */
export function bytes(count) {
  if (count === null || count === undefined) return "unknown";
  let size = count;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  const isWhole = size >= 100 || unit === 0;
  return `${isWhole ? Math.round(size) : size.toFixed(1).replace(/\.0$/, "")} ${UNITS[unit]}`;
}

/** Seconds in at most two units: "3 h 20 min". */
export function duration(seconds) {
  const totalS = Math.max(0, Math.round(seconds));
  if (totalS < 60) return `${totalS} s`;
  if (totalS < 3600)
    return totalS < 600 && totalS % 60
      ? `${Math.floor(totalS / 60)} min ${totalS % 60} s`
      : `${Math.floor(totalS / 60)} min`;
  const hours = Math.floor(totalS / 3600);
  if (totalS < 86400) return `${hours} h ${Math.floor((totalS % 3600) / 60)} min`;
  return `${Math.floor(totalS / 86400)} d ${Math.floor((totalS % 86400) / 3600)} h`;
}

/** Seconds of a latency: "85 ms", "1.24 s". */
export function latency(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1
    ? `${Math.round(seconds * 1000)} ms`
    : `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
}

/** A rate or a count: 12345 -> "12,345", 0.25 -> "0.25". */
export function number(value, digits = value !== 0 && Math.abs(value) < 10 ? 2 : 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** Tokens of a context: 131072 -> "128k". */
export function tokens(count) {
  if (count === null || count === undefined) return "–";
  return count >= 1024 && count % 1024 === 0 ? `${count / 1024}k` : number(count);
}

/** Unix seconds -> date and time of this browser. */
export function moment(at) {
  return at === null || at === undefined
    ? "–"
    : new Date(at * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
}

/** Whether `words` add nothing to the texts next to them. */
export function addsNothing(words, ...neighbours) {
  const plain = (text) => (text ?? "").toLowerCase().replace(/[.\s]+$/, "");
  return neighbours.some((neighbour) => plain(neighbour).includes(plain(words)));
}

/** Unix seconds -> time of day, with seconds where there is room. */
export function clock(at, exact = false) {
  return new Date(at * 1000).toLocaleTimeString([], {
    hour: "2-digit",
    minute: "2-digit",
    ...(exact && { second: "2-digit" }),
  });
}

export function plural(count, singular, form = `${singular}s`) {
  return `${number(count)} ${count === 1 ? singular : form}`;
}
