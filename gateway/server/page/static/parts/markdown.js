// Markdown as elements. The parser gives tokens; only elements that stand here are made of them,
// and markup in the text stays text.
import { fill, h } from "../dom.js";
import { codeBlock } from "./code_block.js";

// Longer texts without a blank line are shown as they are: the parser's time grows with the square
// of their length.
const MOST_INLINE = 5000;
const SCHEMES = ["http:", "https:", "mailto:"];
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

let loading = null;

function parser() {
  loading ??= import("../vendor/marked.js").then(({ Lexer }) => {
    class BoundedLexer extends Lexer {
      inlineTokens(source, tokens = []) {
        if (source.length <= MOST_INLINE) return super.inlineTokens(source, tokens);
        tokens.push({ type: "text", raw: source, text: source });
        return tokens;
      }
    }
    return (source) => new BoundedLexer({ gfm: true }).lex(source);
  });
  return loading;
}

/**
 * A text that grows: blocks that are complete are parsed once.
 * @returns {{element: any, update: (text: string) => void}}
 */
export function markdownView() {
  const element = h("div", { class: "said markdown" });
  let lex = null;
  let latest = "";
  let scheduled = false;
  /** The complete blocks: their source, and how many elements they have. */
  let drawnText = { source: "", count: 0 };

  function render() {
    scheduled = false;
    const source = latest.replace(/\r\n?/g, "\n");
    if (!source.startsWith(drawnText.source)) {
      drawnText = { source: "", count: 0 };
      fill(element);
    }
    while (element.childNodes.length > drawnText.count) element.lastChild.remove();
    const newText = source.slice(drawnText.source.length);
    let tokens = null;
    try {
      tokens = lex(newText);
    } catch {
      // The text is nested too deeply.
      element.append(h("p", { class: "plain" }, newText));
      return;
    }
    // A last block may go on, and the space after it too.
    const open = tokens.findLastIndex((token) => token.type !== "space");
    let { source: complete, count } = drawnText;
    tokens.forEach((token, place) => {
      element.append(...blocks([token]));
      if (place < open) {
        complete += token.raw;
        count = element.childNodes.length;
      }
    });
    drawnText = { source: complete, count };
  }

  return {
    element,
    update(text) {
      if (text === latest) return;
      latest = text;
      if (lex === null) {
        fill(element, h("p", { class: "plain" }, text));
        parser().then(
          (module) => {
            if (lex === null) fill(element);
            lex = module;
            render();
          },
          () => {},
        );
      } else if (!scheduled) {
        scheduled = true;
        requestAnimationFrame(render);
      }
    },
  };
}

const blocks = (tokens) =>
  (tokens ?? []).flatMap((token) =>
    Object.hasOwn(BLOCKS, token.type) ? BLOCKS[token.type](token) : inline([token]),
  );
const inline = (tokens) =>
  (tokens ?? []).flatMap((token) =>
    Object.hasOwn(INLINE, token.type) ? INLINE[token.type](token) : [token.raw ?? ""],
  );

const BLOCKS = {
  space: () => [],
  def: () => [],
  // The headings of an answer are not headings of the page.
  heading: (token) => [
    h("p", { class: `heading level-${Math.min(token.depth, 4)}` }, inline(token.tokens)),
  ],
  paragraph: (token) => [h("p", {}, inline(token.tokens))],
  text: (token) => (token.tokens ? inline(token.tokens) : [decodeEntities(token.text)]),
  code: (token) => [codeBlock((token.lang ?? "").split(/\s/)[0], token.text)],
  blockquote: (token) => [h("blockquote", {}, blocks(token.tokens))],
  hr: () => [h("hr")],
  html: (token) => [h("p", { class: "plain" }, token.raw.trim())],
  list: (token) => [
    h(
      token.ordered ? "ol" : "ul",
      { start: token.ordered && token.start !== 1 ? token.start : null },
      token.items.map((item) => h("li", {}, blocks(item.tokens))),
    ),
  ],
  table: (token) => [markdownTable(token)],
};

const INLINE = {
  text: (token) => (token.tokens ? inline(token.tokens) : [decodeEntities(token.text)]),
  escape: (token) => [token.text],
  strong: (token) => [h("strong", {}, inline(token.tokens))],
  em: (token) => [h("em", {}, inline(token.tokens))],
  del: (token) => [h("del", {}, inline(token.tokens))],
  codespan: (token) => [h("code", {}, token.text)],
  br: () => [h("br")],
  checkbox: (token) => [token.checked ? "☑ " : "☐ "],
  link: (token) => link(token.href, inline(token.tokens).flatMap(withoutLinks)),
  // A picture of another host is not fetched.
  image: (token) => link(token.href, [token.text || "picture"]),
};

/** A link where its address is harmless; else its words. */
function link(href, words) {
  let url;
  try {
    url = new URL(decodeEntities(href));
  } catch {
    return words;
  }
  return SCHEMES.includes(url.protocol)
    ? [
        h(
          "a",
          {
            href: url.href,
            target: "_blank",
            rel: "noopener noreferrer nofollow",
            title: url.href,
          },
          words,
        ),
      ]
    : words;
}

/** No link is inside of another: the words of an inner one stay. */
function withoutLinks(word) {
  if (!(word instanceof Element)) return [word];
  for (const inner of word.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
  return word.localName === "a" ? [...word.childNodes] : [word];
}

function markdownTable(token) {
  const head = token.header.map((cell) => cell.text);
  const cell = (column, place) =>
    h("td", { role: "cell", "data-head": head[place] }, inline(column.tokens));
  const title = (column) =>
    column.text
      ? h("th", { scope: "col", role: "columnheader" }, inline(column.tokens))
      : h("td", { role: "cell" });
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" },
    h(
      "table",
      { role: "table" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, token.header.map(title))),
      h(
        "tbody",
        { role: "rowgroup" },
        token.rows.map((row) => h("tr", { role: "row" }, row.map(cell))),
      ),
    ),
  );
}

/** "&amp;" -> "&": the parser leaves entities as they are. */
function decodeEntities(words) {
  return words.replace(
    /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,6}));/g,
    (whole, decimal, hex, name) => {
      if (name) return ENTITIES[name] ?? whole;
      const code = decimal ? Number(decimal) : parseInt(hex, 16);
      return code && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
    },
  );
}
