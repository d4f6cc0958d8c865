// plots.js - a figure with its last minute as a line, and bars with words beside them.

import { el, put, svg } from "./dom.js";

const SAMPLES = 240; // four a second: a minute
const SMOOTH = 4; // samples of a rate that are averaged: a second
const HEIGHT = 40;

/** A title, a large figure, perhaps a second one, and their course. */
export class Tile {
  constructor(title, unit, format, second) {
    this.recent = [];
    this.format = format;
    this.value = el("span", { class: "value" }, "–");
    this.low = el("span", null, "last minute");
    this.second = second;
    this.lines = (second ? ["second", "first"] : ["first"]).map((kind) => ({
      kind,
      samples: [],
      line: svg("polyline", { class: kind }),
    }));
    this.area = svg("polygon", { class: "area" });
    this.most = el("span");
    const picture = svg(
      "svg",
      { viewBox: `0 0 ${SAMPLES} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area,
      ...this.lines.map(({ line }) => line),
    );
    this.root = el(
      "section",
      { class: "panel tile" },
      el("h2", null, title),
      el("p", null, this.value, " ", el("span", { class: "muted" }, unit)),
      picture,
      el("p", { class: "muted small ends" }, this.low, this.most),
    );
  }

  /** Forgets its course. */
  clear() {
    this.recent = [];
    for (const line of this.lines) line.samples = [];
  }

  /** A rate jumps from sample to sample, as steps end before or after one. */
  addRate(rate) {
    this.recent.push(rate ?? NaN);
    if (this.recent.length > SMOOTH) this.recent.shift();
    this.add(this.recent.reduce((sum, one) => sum + one, 0) / this.recent.length);
  }

  /** One more sample, drawn with the next draw(). */
  add(first, second) {
    for (const line of this.lines) {
      line.samples.push(Number((line.kind === "first" ? first : second) ?? NaN));
      if (line.samples.length > SAMPLES) line.samples.shift();
    }
  }

  draw() {
    const [second, first] = this.second ? this.lines : [null, this.lines[0]];
    put(this.value, this.format(first.samples.at(-1)));
    if (second) put(this.low, `${this.second} ${this.format(second.samples.at(-1))}`);
    const most = this.lines.flatMap(({ samples }) => samples).reduce((all, one) => (one > all ? one : all), 0);
    for (const { samples, line, kind } of this.lines) {
      const points = this.points(samples, most);
      line.setAttribute("points", points.join(" "));
      if (kind !== "first" || !points.length) continue;
      const left = points[0].split(",")[0];
      this.area.setAttribute("points", `${left},${HEIGHT} ${points.join(" ")} ${SAMPLES},${HEIGHT}`);
    }
    put(this.most, most ? `up to ${this.format(most)}` : "");
  }

  points(samples, most) {
    const from = SAMPLES - samples.length + 1;
    const y = (sample) => (most ? HEIGHT - 1 - (sample / most) * (HEIGHT - 4) : HEIGHT - 1).toFixed(1);
    return samples.flatMap((sample, n) => (Number.isFinite(sample) ? [`${from + n},${y(sample)}`] : []));
  }
}

/** Rows of {name, note, segments: [[kind, share], ...]}, and a line of explanation. */
export class Bars {
  constructor(root) {
    this.rows = [];
    this.box = el("div", { class: "bars" });
    this.said = el("p", { class: "muted small" });
    root.append(this.box, this.said);
  }

  draw(rows, said) {
    while (this.rows.length > rows.length) this.rows.pop().root.remove();
    while (this.rows.length < rows.length) this.addRow();
    rows.forEach(({ name, note, segments }, n) => {
      const row = this.rows[n];
      put(row.name, name);
      put(row.note, note);
      while (row.bar.children.length < segments.length) row.bar.append(el("i"));
      segments.forEach(([kind, share], place) => {
        const segment = row.bar.children[place];
        segment.className = kind;
        segment.style.width = `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(2)}%`;
      });
    });
    put(this.said, said);
  }

  addRow() {
    const row = { name: el("span"), note: el("span", { class: "muted" }), bar: el("div", { class: "meter" }) };
    row.root = el("div", { class: "bar-row" }, el("p", { class: "ends" }, row.name, row.note), row.bar);
    this.rows.push(row);
    this.box.append(row.root);
  }
}
