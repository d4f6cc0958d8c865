// heatmap.js - how evenly the experts of each layer are used.
//
// One pixel is one expert; the style sheet enlarges it. Color says load over the layer's mean.

import { el, figure, put } from "./dom.js";

const WINDOW = 10; // messages that are added up, about ten seconds
const SCALE = [0, 1, 3]; // load over mean where the three colors of the theme stand

const sum = (list) => list.reduce((total, n) => total + n, 0);

function rgb(text) {
  const hex = text.trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

export class Heatmap {
  constructor(root) {
    this.history = [];
    this.canvas = el("canvas", { role: "img", "aria-label": "No expert has been used yet", width: 1, height: 1 });
    this.balance = el("div", { class: "balance", "aria-hidden": "true" });
    this.last = el("span");
    this.pointed = el("p", { class: "muted small" }, "Point at a cell to read it.");
    this.summary = el("p", null, "No routed expert has worked since this view was opened.");
    this.rows = el("tbody");
    const head = ["Layer", "Balancedness", "Busiest expert", "its share"].map((name) => el("th", { scope: "col" }, name));
    this.table = el(
      "details",
      null,
      el("summary", null, "As a table"),
      el("div", { class: "scroll", tabindex: 0 }, el("table", null, el("thead", null, el("tr", null, ...head)), this.rows)),
    );
    this.table.addEventListener("toggle", () => this.drawTable());
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    const legend = el("p", { class: "legend muted small" }, "idle", el("i"), "3 × the mean");
    this.figure = el(
      "div",
      { class: "heat", hidden: true },
      el("p", { class: "muted small ends" }, el("span", null, "expert 0"), this.last),
      el("span", { class: "muted small" }, "balance"),
      this.canvas,
      this.balance,
    );
    root.append(this.summary, this.figure, el("div", { class: "ends" }, this.pointed, legend), this.table);
  }

  /** {n_experts, layers: [[load since the last message]]} */
  add({ n_experts: n, layers }) {
    if (!(n > 0) || !Array.isArray(layers) || !layers.every(Array.isArray)) return;
    if (n !== this.n || layers.length !== this.history[0]?.length) this.history = [];
    this.n = n;
    this.history.push(layers);
    if (this.history.length > WINDOW) this.history.shift();
  }

  /** Mean over max: 1 when all experts of the layer had the same. */
  balancedness(row) {
    const most = Math.max(...row);
    return most > 0 ? sum(row) / row.length / most : undefined;
  }

  draw() {
    if (!this.history.length) return;
    this.load = this.history[0].map((_, layer) =>
      Array.from({ length: this.n }, (_, expert) => sum(this.history.map((one) => one[layer][expert] ?? 0))),
    );
    this.figure.hidden = false;
    this.paint();
    const balance = this.load.map((row) => this.balancedness(row));
    this.drawBalance(balance);
    const known = balance.filter((value) => value !== undefined);
    const said = known.length
      ? `Balancedness (mean load over greatest load) ${figure(sum(known) / known.length)} on average; ` +
        `least in layer ${balance.indexOf(Math.min(...known))}: ${figure(Math.min(...known))}.`
      : "No routed expert worked in the last ten seconds.";
    put(this.summary, said);
    this.canvas.setAttribute("aria-label", `${this.load.length} layers by ${this.n} experts. ${said}`);
    put(this.last, `expert ${this.n - 1}`);
    this.drawTable();
  }

  paint() {
    const { canvas, load, n } = this;
    const style = getComputedStyle(document.documentElement);
    const colors = ["--heat-0", "--heat-1", "--heat-2"].map((name) => rgb(style.getPropertyValue(name)));
    canvas.width = n;
    canvas.height = load.length;
    canvas.style.height = `${Math.max(120, Math.min(20 * load.length, 420))}px`;
    const context = canvas.getContext("2d");
    const image = context.createImageData(n, load.length);
    load.forEach((row, layer) => {
      const mean = sum(row) / n || 1;
      row.forEach((value, expert) => {
        const over = Math.min(value / mean, SCALE[2]);
        const upper = over > SCALE[1] ? 2 : 1;
        const part = (over - SCALE[upper - 1]) / (SCALE[upper] - SCALE[upper - 1]);
        for (let c = 0; c < 3; c++) {
          const [a, b] = [colors[upper - 1][c], colors[upper][c]];
          image.data[4 * (layer * n + expert) + c] = a + (b - a) * part;
        }
        image.data[4 * (layer * n + expert) + 3] = 255;
      });
    });
    context.putImageData(image, 0, 0);
  }

  drawBalance(balance) {
    const { children } = this.balance;
    while (children.length > balance.length) children[0].remove();
    while (children.length < balance.length) this.balance.append(el("i"));
    balance.forEach((value, layer) => (children[layer].style.width = `${100 * (value ?? 0)}%`));
  }

  drawTable() {
    if (!this.table.open || !this.load) return;
    const rows = this.load.map((row, layer) => {
      const total = sum(row);
      const busiest = row.indexOf(Math.max(...row));
      const cells = total
        ? [layer, figure(this.balancedness(row)), busiest, `${((100 * row[busiest]) / total).toFixed(1)} %`]
        : [layer, "–", "–", "–"];
      return el("tr", null, ...cells.map((cell) => el("td", null, String(cell))));
    });
    this.rows.replaceChildren(...rows);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const expert = Math.floor(((event.clientX - box.left) / box.width) * this.n);
    const layer = Math.floor(((event.clientY - box.top) / box.height) * this.load.length);
    const value = this.load[layer]?.[expert];
    if (value === undefined) return;
    const mean = sum(this.load[layer]) / this.n;
    const over = mean ? `, ${figure(value / mean)} × the mean` : "";
    put(this.pointed, `Layer ${layer}, expert ${expert}: ${figure(value)} rows${over}.`);
  }
}
