// lanes.js - requests on their way through queue, prefill and decode, as cards that move.

import { el, figure, put } from "./dom.js";
import { isOwn } from "./own.js";

const LANES = [["waiting", "Queue", 1, 1], ["prefill", "Prefill", 1, 1], ["decode", "Decode", 2, 4]]; // columns; cards if narrow
const NARROW = 540; // pixels; then the lanes lie below each other

const still = matchMedia("(prefers-reduced-motion: reduce)");

class Card {
  constructor(name, id) {
    this.note = el("span", { class: "muted" });
    this.mark = el("span", { class: "yours", hidden: true }, "you");
    this.cached = el("i", { class: "cached" });
    this.done = el("i", { class: "used" });
    this.root = el(
      "li",
      { class: "card", title: `request ${id}` },
      el("p", { class: "ends" }, el("span", null, el("b", null, name), " ", this.mark), this.note),
      el("div", { class: "meter" }, this.cached, this.done),
    );
    this.tokens = [];
  }

  /** longest: tokens of the longest answer that runs; its bar is full. */
  draw(request, longest) {
    const { phase, prompt_tokens: prompt = 0, cached_tokens: cached = 0 } = request;
    this.mark.hidden = !isOwn(request.id);
    this.root.classList.toggle("own", !this.mark.hidden);
    const { done_tokens: done = 0, output_tokens: output = 0 } = request;
    const width = (part, whole) => `${whole ? Math.min(100, (100 * part) / whole).toFixed(1) : 0}%`;
    const decodes = phase === "decode";
    this.cached.style.width = width(decodes ? 0 : cached, prompt);
    this.done.style.width = decodes ? width(output, longest) : width(Math.max(0, done - cached), prompt);
    if (phase === "decode") put(this.note, `${output}${this.speed(output)}`);
    else if (phase === "prefill") put(this.note, `${Math.min(done, prompt)} of ${prompt}`);
    else put(this.note, `${prompt} to do`);
  }

  speed(output) {
    const now = performance.now() / 1000;
    this.tokens.push([now, output]);
    if (this.tokens.length > 8) this.tokens.shift();
    const [from, before] = this.tokens[0];
    const speed = (output - before) / (now - from);
    return Number.isFinite(speed) && speed > 0 ? ` at ${figure(speed)}/s` : output === 1 ? " token" : " tokens";
  }
}

/** The first ones, but those of this browser in any case. */
function inSight(requests, most) {
  const own = requests.slice(most).filter(({ id }) => isOwn(id)).slice(0, most);
  return [...requests.slice(0, most - own.length), ...own];
}

export class Lanes {
  constructor(root) {
    this.root = root;
    this.cards = new Map();
    this.count = 0;
    this.lanes = new Map();
    for (const [phase, title, columns, most] of LANES) {
      const lane = { columns, most, slots: [], count: el("span", { class: "count" }, "0"), list: el("ul", { "aria-label": title }) };
      lane.more = el("p", { class: "muted small" });
      root.append(el("div", { class: "lane" }, el("h3", null, title, " ", lane.count), lane.list, lane.more));
      this.lanes.set(phase, lane);
    }
  }

  draw(requests) {
    const before = still.matches ? null : this.places();
    const longest = requests.reduce((most, { output_tokens: n }) => Math.max(most, n ?? 0), 0);
    const narrow = this.root.clientWidth < NARROW;
    const seen = new Set();
    for (const [phase, lane] of this.lanes) {
      const mine = requests.filter((request) => request.phase === phase);
      put(lane.count, String(mine.length));
      const most = narrow ? lane.most : 5 * lane.columns;
      put(lane.more, mine.length > most ? `and ${mine.length - most} more` : "");
      const cards = inSight(mine, most).map((request) => {
        const card = this.card(request);
        seen.add(card);
        card.draw(request, longest);
        return card;
      });
      this.arrange(lane, cards, narrow ? 1 : lane.columns, most);
    }
    for (const [name, card] of this.cards) {
      if (seen.has(card)) continue;
      card.root.remove();
      this.cards.delete(name);
    }
    if (before) this.move(before);
  }

  /** Who waits moves up; who decodes keeps the place, and a newcomer takes a free one. */
  arrange(lane, cards, columns, most) {
    const keep = lane.columns > 1 ? lane.slots.slice(0, most) : [];
    const stays = keep.map((card) => (cards.includes(card) ? card : null));
    for (const card of cards) {
      if (stays.includes(card)) continue;
      const free = stays.indexOf(null);
      if (free < 0) stays.push(card);
      else stays[free] = card;
    }
    lane.slots = stays;
    stays.forEach((card, slot) => {
      if (!card) return;
      card.root.style.gridArea = `${Math.floor(slot / columns) + 1} / ${(slot % columns) + 1}`;
      if (card.root.parentNode !== lane.list) lane.list.append(card.root);
    });
  }

  /** Cards are numbered as they come into sight: the engine's ids are long. */
  card({ id, answer }) {
    const name = `${id}, answer ${answer}`;
    let card = this.cards.get(name);
    if (!card) this.cards.set(name, (card = new Card(`#${++this.count}`, name)));
    return card;
  }

  places() {
    return new Map(Array.from(this.cards.values(), (card) => [card, card.root.getBoundingClientRect()]));
  }

  /** Cards glide from where they were; new ones fade in. */
  move(before) {
    for (const card of this.cards.values()) {
      const was = before.get(card);
      if (!was) {
        card.root.animate([{ opacity: 0 }, { opacity: 1 }], { duration: 200 });
        continue;
      }
      const is = card.root.getBoundingClientRect();
      const x = was.left - is.left;
      const y = was.top - is.top;
      if (Math.abs(x) + Math.abs(y) < 1) continue;
      card.root.animate([{ transform: `translate(${x}px, ${y}px)` }, { transform: "none" }], {
        duration: 230,
        easing: "cubic-bezier(.3, .8, .4, 1)",
      });
    }
  }
}
