// Elements made by hand. Text goes in as text and never as markup: much of it is out of other people's prompts.

/** Return an element. `attributes`: "class", "aria-..." and so on; null leaves one out. Children: nodes or strings. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Return an SVG element. */
export function shape(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Set text or an attribute only where it differs: what is not touched is not laid out again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** Return a table. `columns`: {name, isNumber, isText}; `rows`: lists of strings or nodes. */
export function table(caption, columns, rows) {
  const kind = ({ isNumber, isText }) => (isNumber ? "n" : isText ? "text mono" : null);
  const head = columns.map((column) => element("th", { scope: "col", class: column.isNumber ? "n" : null }, column.name));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, i) => element("td", { class: kind(columns[i]) }, cell))));
  return element("table", {}, element("caption", { class: "hidden-text" }, caption),
    element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

/** Keep the table inside a closed <details> unmade, and an open one up to date unless it is being read. */
export function tableWhenOpen(panel, make) {
  const details = panel.querySelector("details");
  const place = details.querySelector(".scroll");
  place.tabIndex = 0;
  place.setAttribute("role", "region");
  place.setAttribute("aria-label", "Table");
  const fill = () => {
    if (!details.open || place.contains(document.activeElement) || place.matches(":hover")) return;
    const { scrollTop, scrollLeft } = place;
    place.replaceChildren(make());
    Object.assign(place, { scrollTop, scrollLeft });
  };
  details.addEventListener("toggle", fill);
  return fill;
}

/** Call back with the width of an element, now and whenever its size changes. */
export function onResize(node, callback) {
  let last = "";
  new ResizeObserver(() => {
    const size = `${node.clientWidth} ${node.clientHeight}`;
    if (!node.clientWidth || size === last) return;
    last = size;
    callback(node.clientWidth);
  }).observe(node);
}

/** Facts as a list: [[name, value], ...] */
export const facts = (pairs) =>
  element("dl", { class: "facts" }, ...pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
