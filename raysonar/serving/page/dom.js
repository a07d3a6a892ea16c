// Building elements. Whatever a server or a model said is inserted as text, never as HTML.

/** The page's element of this id. */
export const find = (id) => document.getElementById(id);

/** A new HTML element; children are nodes or texts. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** A new SVG element. */
export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

/** A table's row: the first cell is its header. */
export function row(...cells) {
  const [first, ...others] = cells.map(String);
  return element("tr", {}, element("th", { scope: "row" }, first), ...others.map((cell) => element("td", {}, cell)));
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
