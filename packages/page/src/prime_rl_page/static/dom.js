// Elements and formats. Text of the run reaches the page only as text nodes.

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  if (tag === "table") nameCells(node);
  return node;
}

// On a phone each row is a block whose cells have the names of their columns: see style.css.
function nameCells(table) {
  const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.replace(/ [↑↓]$/, ""));
  const roles = { thead: "rowgroup", tbody: "rowgroup", tr: "row", th: "columnheader", td: "cell" };
  table.setAttribute("role", "table");
  for (const [tag, role] of Object.entries(roles)) for (const node of table.querySelectorAll(tag)) node.setAttribute("role", role);
  for (const row of table.querySelectorAll("tbody tr")) [...row.children].forEach((cell, i) => names[i] && cell.setAttribute("data-column", names[i]));
}

// Control characters and marks that change the direction of text are shown by their names.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;

export function controlName(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
}

export function visibleText(text) {
  if (!CONTROL.test(text)) return [text];
  const parts = [];
  let plain = "";
  for (const character of text) {
    if (CONTROL.test(character)) {
      if (plain) parts.push(plain);
      plain = "";
      parts.push(element("span", { class: "control" }, controlName(character)));
    } else plain += character;
  }
  if (plain) parts.push(plain);
  return parts;
}

export function visibleString(text) {
  return [...String(text)].map((one) => (CONTROL.test(one) ? controlName(one) : one)).join("");
}

export function formatNumber(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(0, digits - 1));
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US").replaceAll(",", "\u202f");
  return String(Number(value.toPrecision(digits)));
}

// Labels of the ticks of an axis, with as many further digits as it takes to tell them apart.
export function distinctLabels(values, format) {
  for (let further = 0; further < 13; further += 1) {
    const labels = values.map((value) => format(value, further));
    if (new Set(labels).size === labels.length) return labels;
  }
  return values.map((value) => format(value, 0));
}

export function formatPercent(value) {
  if (value === null || value === undefined) return "–";
  return `${(100 * value).toFixed(value !== 0 && Math.abs(value) < 0.1 ? 1 : 0)} %`;
}

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function formatBytes(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) [bytes, unit] = [bytes / 1000, unit + 1];
  return `${bytes.toFixed(unit > 2 ? 1 : 0)} ${units[unit]}`;
}

export function formatClock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function replaceChildren(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

// A choice among a few values; `choose` gets the chosen one.
export function segments(options, current, choose, label) {
  const buttons = options.map(([value, text, why]) =>
    element("button", { type: "button", "aria-pressed": String(value === current), disabled: Boolean(why), title: why || null,
      onclick: () => choose(value) }, text));
  return element("div", { class: "segments", role: "group", "aria-label": label }, buttons);
}

let tipNode = null;

export function showTip(text, x, y) {
  if (tipNode === null) {
    tipNode = element("div", { class: "tip", role: "tooltip" });
    document.body.append(tipNode);
  }
  tipNode.textContent = text;
  tipNode.hidden = false;
  const box = tipNode.getBoundingClientRect();
  tipNode.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tipNode.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18}px`;
}

let statusNode = null;

// For screen readers.
export function announce(text) {
  if (statusNode === null) {
    statusNode = element("div", { class: "unseen", role: "status" });
    document.body.append(statusNode);
  }
  statusNode.textContent = text;
}

export function hideTip() {
  if (tipNode !== null) tipNode.hidden = true;
}
