// Make elements. Text from a run only ever becomes text: there is no way to pass HTML.

const PLAIN = new Set(["class", "id", "for", "type", "value", "name", "placeholder", "role", "tabindex", "colspan",
  "scope", "title", "href", "download", "min", "max", "step", "spellcheck", "autocomplete", "disabled", "hidden",
  "selected", "checked", "open", "lang", "viewBox", "d", "x", "y", "width", "height", "rx", "points", "preserveAspectRatio",
  "x1", "x2", "y1", "y2", "cx", "cy", "r"]);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "href" && !value.startsWith("#")) throw new Error(`not a link of the dashboard: ${value}`);
    else if (PLAIN.has(name) || name.startsWith("aria-") || name.startsWith("data-")) element.setAttribute(name, value === true ? "" : String(value));
    else throw new Error(`not an attribute: ${name}`);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

// Return an element with attributes and children. Strings become text, and `on...` a listener.
export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

// The same for SVG.
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// A table that may be wider than its place, with a name for screen readers. The keyboard can reach
// it, and arrow keys then move it.
export const scrolling = (name, ...children) => h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": name }, children);

export function replace(element, ...children) {
  const fragment = document.createDocumentFragment();
  add(fragment, children);
  element.replaceChildren(fragment);
}

// Call a function once, after no further call came for a while. `cancel` forgets a call that waits.
export function settled(ms, action) {
  let timer = 0;
  const call = (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), ms);
  };
  return Object.assign(call, { cancel: () => clearTimeout(timer) });
}
