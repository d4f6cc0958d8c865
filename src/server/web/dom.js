// dom.js - making elements. Text always becomes text nodes, never markup.

export const $ = (id) => document.getElementById(id);

/** el("p", {class: "note", onclick: f}, "text", node): attributes that are null or false are left out. */
export function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes ?? {})) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Writes text only where it changed, so that nothing is laid out again for nothing. */
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A button that copies what text() gives and says so. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", class: "quiet" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without https the clipboard interface is missing; a selection still copies.
    const area = el("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    before?.focus();
    return done;
  }
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** A figure as a person reads it: 0.45, 12.3, 1234, 45.6K; a dash where there is none. */
export function figure(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return compact.format(value);
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(size >= 10 ? 1 : 2);
}

export function milliseconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  return value >= 1000 ? `${figure(value / 1000)} s` : `${figure(value)} ms`;
}

export function bytes(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${figure(unit ? Number(value.toPrecision(3)) : value)} ${units[unit]}`;
}
