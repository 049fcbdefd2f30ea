// Elements from values. Text goes in as text nodes only: nothing that a model or a person wrote is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: attributes (`onclick: function` listens, `true` is a bare attribute, null and false are left out), then children. */
export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** The same in SVG. */
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Puts these children in the place of all that an element had. */
export function put(element, ...children) {
  element.replaceChildren(...nodes(children));
  return element;
}

/** Sets an element's text, unless it says so already: a live region then stays silent. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Tells screen readers of a change, in one polite live region. */
export const announce = (text) => say(document.getElementById("announcer"), text);

/** Text with `code` in it. */
export const prose = (text) => text.split("`").map((piece, i) => (i % 2 ? h("code", {}, piece) : piece));

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...nodes(children));
  return element;
}

const nodes = (children) =>
  children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
