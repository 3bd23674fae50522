// Elements without markup: all text becomes text nodes, so nothing that is shown can be anything
// else.

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * An element. Of its properties functions are listeners, `true` is an attribute without value, and
 * nothing is set for null, undefined and false.
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Child | Child[])} children
 * @returns {any}
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "value") element.value = value;
    else attribute(element, name, value);
  }
  element.append(...present(children));
  return element;
}

/** An element of SVG. */
export function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) attribute(element, name, value);
  element.append(...present(children));
  return element;
}

/** Sets or removes an attribute. An equal value is left alone. */
export function attribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value === true ? "" : value))
    element.setAttribute(name, value === true ? "" : String(value));
}

/** Sets the text of an element, where it is another one. */
export function text(element, value) {
  const content = value === null || value === undefined ? "" : String(value);
  if (element.textContent !== content) element.textContent = content;
}

/** @param {Element} element @param {...(Child | Child[])} children */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
  return element;
}

/**
 * Brings the children of `parent` to one per item, in order. Elements of items that stay are kept,
 * with their focus.
 * @template T
 * @param {Element} parent
 * @param {T[]} items
 * @param {(item: T) => string} key
 * @param {(item: T) => any} make  gives an object with `element` and `update(item)`
 */
export function syncChildren(parent, items, key, make) {
  const parts = parent.parts ?? (parent.parts = new Map());
  const names = new Set(items.map(key));
  for (const [name, part] of parts) {
    if (!names.has(name)) {
      part.element.remove();
      parts.delete(name);
    }
  }
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let entry = parts.get(name);
    if (!entry) parts.set(name, (entry = make(item)));
    entry.update(item);
    if (entry.element === place) place = place.nextElementSibling;
    else parent.insertBefore(entry.element, place);
  }
}

/** @returns {(Node | string)[]} */
function present(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child)));
}
