// Elements and numbers. Text from the network becomes text nodes only.

export const byId = (id) => document.getElementById(id);

// An element with attributes and children; strings become text.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Changes nothing that is the same already: no layout, no selection lost.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Keeps one child of `parent` for each key, in this order. `make` makes one, `update` fills it.
export function keyed(parent, kept, items, keyOf, make, update) {
  const wanted = new Set(items.map(keyOf));
  for (const [key, child] of kept) {
    if (wanted.has(key)) continue;
    child.remove();
    kept.delete(key);
  }
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = kept.get(key);
    if (!child) kept.set(key, (child = make(item)));
    update(child, item);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const three = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const NONE = "–";

export const count = (value) => (value == null ? NONE : whole.format(value));

export const plural = (value, unit) => `${count(value)} ${unit}${value === 1 ? "" : "s"}`;

export const number = (value) =>
  value == null ? NONE : (Math.abs(value) < 1000 ? three : whole).format(value);

export const percent = (share) => (share == null ? NONE : `${number(100 * share)} %`);

// Milliseconds below ten seconds, else seconds and so on.
export function duration(ms) {
  if (ms == null) return NONE;
  if (ms < 10_000) return `${number(ms < 1000 ? ms : Math.round(ms))} ms`;
  if (ms < 120_000) return `${number(ms / 1000)} s`;
  return ms < 7_200_000 ? `${number(ms / 60_000)} min` : `${number(ms / 3_600_000)} h`;
}

// A time that is known as well as a histogram's buckets allow.
export const estimate = (ms) => (ms == null ? NONE : duration(Number(ms.toPrecision(2))));

// A name's beginning and end: names of one fleet begin alike and differ at the end.
const NAME_MAX = 32;
const NAME_HEAD = 11;
export function shortened(name) {
  const letters = [...name];
  if (letters.length <= NAME_MAX) return name;
  return `${letters.slice(0, NAME_HEAD).join("")}…${letters.slice(NAME_HEAD + 1 - NAME_MAX).join("")}`;
}

const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

export const timeOfDay = (unixMs) => clock.format(unixMs);
