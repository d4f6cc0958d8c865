// ranks.js - what the ranks do: computing, exchanging, waiting for each other; bytes and time of
// each kind of exchange.

import { $, bytes, el, figure, put } from "./dom.js";
import { Bars } from "./plots.js";

const KINDS = ["all_reduce", "reduce_scatter", "all_gather", "dispatch", "combine", "broadcast"];
const NAMES = { all_reduce: "All-reduce", reduce_scatter: "Reduce-scatter", all_gather: "All-gather", dispatch: "Dispatch", combine: "Combine", broadcast: "Commands" };
const STATES = { standby: "waits for a place in the layout", lost: "lost" };

const seconds = (value) => `${figure(value)} s`;
const percent = (value) => `${Math.round(100 * value)} %`;

function rowOf({ rank, group, state, recent = {} }, groups) {
  const { compute = 0, exchange = 0, wait = 0 } = recent;
  const place = groups > 1 && group !== undefined ? `, group ${group}` : "";
  const note = STATES[state] ?? `${percent(compute)} computing, ${percent(exchange)} exchanging, ${percent(wait)} waiting`;
  const parts = STATES[state] ? [0, 0, 0] : [compute, exchange, wait];
  return { name: `Rank ${rank}${place}`, note, segments: [["used", parts[0]], ["cached", parts[1]], ["waits", parts[2]]] };
}

/** Sums over all ranks. */
function totalsOf(ranks, kind) {
  const total = { calls: 0, bytes: 0, seconds: 0, wait_seconds: 0 };
  for (const { exchanges = {} } of ranks) {
    for (const key of Object.keys(total)) total[key] += exchanges[kind]?.[key] ?? 0;
  }
  return total;
}

export class Ranks {
  constructor(root) {
    this.root = root;
    this.bars = new Bars(root);
    this.rows = el("tbody");
    const titles = ["Exchange", "Calls", "Received", "Time", "Waiting"];
    const head = el("tr", null, ...titles.map((title) => el("th", { scope: "col" }, title)));
    root.append(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Exchanges between ranks" }, el("table", null, el("thead", null, head), this.rows)));
    root.append(el("p", { class: "muted small" }, "Of all ranks, since each began. A rank with nothing to do waits for a command."));
  }

  draw({ epoch, active, imbalance, ranks = [] }) {
    const groups = new Set(ranks.map((rank) => rank.group).filter((group) => group !== undefined)).size;
    const uneven = imbalance === undefined ? "" : `, imbalance ${figure(imbalance)}`;
    put($("ranks-said"), `${active} of ${ranks.length} work, epoch ${epoch}${uneven}`);
    this.bars.draw(ranks.map((rank) => rowOf(rank, groups)), "Of the last seconds. Imbalance: the most computing time of a rank over the mean.");
    const used = KINDS.map((kind) => [kind, totalsOf(ranks, kind)]).filter(([, total]) => total.calls > 0);
    while (this.rows.children.length > used.length) this.rows.lastChild.remove();
    while (this.rows.children.length < used.length) this.rows.append(el("tr", null, ...Array.from({ length: 5 }, () => el("td"))));
    used.forEach(([kind, total], n) => {
      const cells = [NAMES[kind], figure(total.calls), bytes(total.bytes), seconds(total.seconds), seconds(total.wait_seconds)];
      cells.forEach((cell, column) => put(this.rows.children[n].children[column], cell));
    });
  }
}
