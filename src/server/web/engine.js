// engine.js - the live view: what the engine tells four times a second, drawn as it comes.
//
// Every field may be missing: what is not told is shown as a dash, never as a zero.

import { $, bytes, el, figure, milliseconds, put } from "./dom.js";
import { Heatmap } from "./heatmap.js";
import { Lanes } from "./lanes.js";
import { events, request } from "./net.js";
import { Bars, Tile } from "./plots.js";
import { Ranks } from "./ranks.js";

const POOLS = ["Entries", "Window"]; // hd_kv_group
const RECENT = 240; // messages, about a minute

let parts = null;
let connection = null; // AbortController of the stream
let shown = false;
let paused = false;
let recent = []; // [prompt tokens, cached tokens] of the last minute
let lastAt; // time of the last sample, as the server counts

function state(kind, text) {
  $("live").dataset.kind = kind;
  put($("live"), text);
}

function build() {
  parts = {
    tokens: new Tile("Output", "tokens/s", figure),
    prompt: new Tile("Prompt", "tokens/s", figure),
    ttft: new Tile("First token", "p50", milliseconds, "p95"),
    itl: new Tile("Between tokens", "p50", milliseconds, "p95"),
    lanes: new Lanes($("lanes")),
    pools: new Bars($("pools")),
    prefix: new Bars($("prefix")),
    drafts: new Bars($("drafts")),
    ranks: new Ranks($("ranks")),
    heat: new Heatmap($("experts")),
  };
  const { tokens, prompt, ttft, itl } = parts;
  $("tiles").append(tokens.root, prompt.root, ttft.root, itl.root);
}

// ---- parts of a message ----

const at = (list, index) => (Array.isArray(list) ? list[index] : undefined);
const share = (part, whole) => (whole > 0 ? part / whole : undefined);
const percent = (value) => (value === undefined ? "–" : `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`);

/** Experts in the model's files or in other ranks: how many can be staged, and how often that was enough. */
function expertRow(experts, tokens) {
  const verbs = { file: "read", host: "copied", peer: "copied" };
  return experts && {
    name: `Experts, ${figure(experts.slots)} of ${figure(experts.elsewhere)} fit into ${bytes(experts.slot_bytes)}`,
    note: [
      `${percent(share(experts.staged, experts.used))} were in memory`,
      experts.sent > 0 && `${percent(share(experts.sent, experts.used))} computed by the host`,
      experts.predicted > 0 && `${percent(share(experts.right, experts.predicted))} of the others predicted`,
      `${bytes(experts.fetch_bytes)} ${verbs[experts.source]}`,
      tokens > 0 && `${bytes(Math.round(experts.fetch_bytes / tokens))} a token`,
    ].filter(Boolean).join(", "),
    segments: [["cached", experts.slots / experts.elsewhere]],
  };
}

function drawPools(stats) {
  const rows = POOLS.map((name, pool) => {
    const all = at(stats.pages, pool);
    const free = at(stats.pages_free, pool) ?? 0;
    const cached = at(stats.pages_cached, pool) ?? 0;
    const used = all - free - cached;
    return all > 0 && {
      name: `${name}, ${figure(all)} pages`,
      note: `${figure(used)} in use, ${figure(cached)} cached, ${figure(free)} free`,
      segments: [["used", used / all], ["cached", cached / all]],
    };
  });
  const hosts = ["entries", "windows"].map((name, group) => {
    const all = at(stats.host_pages, group);
    const free = at(stats.host_free, group) ?? 0;
    return all > 0 && {
      name: `Host memory, ${figure(all)} pages of ${name}`,
      note: `${figure(all - free)} cached, ${figure(free)} free`,
      segments: [["cached", (all - free) / all]],
    };
  });
  rows.push(...hosts, expertRow(stats.experts_elsewhere, stats.output_tokens));
  const size = stats.page_tokens ? ` A page holds ${stats.page_tokens} tokens.` : "";
  parts.pools.draw(rows.filter(Boolean), `In use: held by requests. Cached: kept for later ones.${size}`);
}

function drawPrefix({ prompt_tokens: all, cached_tokens: cached }) {
  if (all === undefined) return parts.prefix.draw([], "Not told by this server.");
  const [allBefore, cachedBefore] = recent[0] ?? [all, cached];
  const row = (name, hit, of) => ({
    name,
    note: of > 0 ? `${percent(hit / of)} of ${figure(of)} prompt tokens` : "no prompts",
    segments: [["cached", share(hit, of) ?? 0]],
  });
  const rows = [row("Last minute", cached - cachedBefore, all - allBefore), row("Since the start", cached, all)];
  parts.prefix.draw(rows, "Prompt tokens that were not computed because a prefix was cached.");
}

function drawDrafts({ drafted_at: drafted = [], accepted_at: accepted = [] }) {
  const rows = drafted.map((n, place) => {
    const rate = share(accepted[place] ?? 0, n);
    return n > 0 && {
      name: `Draft ${place + 1}`,
      note: `${percent(rate)} of ${figure(n)}`,
      segments: [["used", rate]],
    };
  });
  const sum = accepted.reduce((total, n) => total + n, 0);
  const mean = share(sum, drafted[0]);
  const said = mean === undefined ? "No drafts yet." : `Accept length ${figure(1 + mean)} tokens a step, the chosen one included.`;
  parts.drafts.draw(rows.filter(Boolean), said);
}

const FACTS = [
  ["Running", (s) => (s.max_running ? `${figure(s.running)} of ${s.max_running}` : figure(s.running))],
  ["Waiting", (s) => figure(s.waiting)],
  ["Finished", (s) => figure(s.finished)],
  ["Retracted", (s) => figure(s.retracted)],
  ["Steps", (s) => figure(s.steps)],
  ["Rows per step", (s) => figure(share(s.rows, s.steps))],
  ["Time per step", (s) => milliseconds(share(s.step_ns / 1e6, s.steps))],
  ["Host's share", (s) => percent(share(s.host_ns, s.step_ns))],
  ["Weights", (s) => bytes(s.weight_bytes)],
  ["Version of the weights", (s) => s.weight_version ?? "–"],
  ["KV memory", (s) => bytes(s.kv_bytes)],
  ["Activations", (s) => bytes(s.activation_bytes)],
  ["Context", (s) => (s.max_context ? `${s.max_context} tokens` : "–")],
];

function drawFacts(stats) {
  const box = $("facts");
  if (!box.childElementCount) {
    for (const [name] of FACTS) box.append(el("div", null, el("dt", null, name), el("dd", null, "–")));
  }
  FACTS.forEach(([, value], n) => put(box.children[n].lastChild, value(stats)));
}

/** Attention groups, of which there may be several, come behind the facts. */
function drawGroups(groups) {
  const box = $("facts");
  while (box.childElementCount > FACTS.length + groups.length) box.lastChild.remove();
  groups.forEach((g, n) => {
    const at = FACTS.length + n;
    if (!box.children[at]) box.append(el("div", null, el("dt", null, `Group ${n}`), el("dd", null, "–")));
    const said = `${figure(g.running)} run, ${figure(g.waiting)} wait, ${percent(share(g.pages - g.pages_free, g.pages))} of the pages`;
    put(box.children[at].lastChild, said);
  });
}

/** One moment of the charts, from a message or from the server's history. */
function addSample({ t, rates = {}, ttft_ms: ttft = {}, itl_ms: itl = {}, stats = {} }) {
  lastAt = t;
  parts.tokens.addRate(rates.tokens_s);
  parts.prompt.addRate(rates.prompt_tokens_s);
  parts.ttft.add(ttft.p50, ttft.p95);
  parts.itl.add(itl.p50, itl.p95);
  if (stats.prompt_tokens !== undefined) recent.push([stats.prompt_tokens, stats.cached_tokens]);
  if (recent.length > RECENT) recent.shift();
}

/** The charts begin a minute ago, whenever the view was opened. */
async function takeHistory(signal) {
  const past = await (await request("engine/history", { signal })).json();
  for (const tile of [parts.tokens, parts.prompt, parts.ttft, parts.itl]) tile.clear();
  recent = [];
  const column = (name, n) => past[name]?.[n] ?? undefined;
  for (const [n, t] of (past.t ?? []).entries()) {
    addSample({
      t,
      rates: { tokens_s: column("tokens_s", n), prompt_tokens_s: column("prompt_tokens_s", n) },
      ttft_ms: { p50: column("ttft_p50_ms", n), p95: column("ttft_p95_ms", n) },
      itl_ms: { p50: column("itl_p50_ms", n), p95: column("itl_p95_ms", n) },
      stats: { prompt_tokens: column("prompt_tokens", n), cached_tokens: column("cached_tokens", n) },
    });
  }
}

/** Messages may come faster than frames: loads are summed up, of the rest the last one counts. */
let latest = null;
function take(message) {
  if (message.experts) parts.heat.add(message.experts);
  if (!(message.t <= lastAt)) addSample(message);
  if (!latest) requestAnimationFrame(drawLatest);
  latest = { ...latest, ...message };
}

function drawLatest() {
  if (connection) draw(latest);
  latest = null;
}

function draw(message) {
  const { stats = {}, requests, experts, groups, ranks } = message;
  for (const tile of [parts.tokens, parts.prompt, parts.ttft, parts.itl]) tile.draw();
  put($("rest"), requests?.length === 0 ? "Nothing runs or waits." : "");
  parts.lanes.draw(Array.isArray(requests) ? requests : []);
  drawPools(stats);
  drawPrefix(stats);
  drawDrafts(stats);
  drawFacts(stats);
  drawGroups(Array.isArray(groups) ? groups : []);
  $("panel-ranks").hidden = !ranks;
  if (ranks) parts.ranks.draw(ranks);
  if (experts) parts.heat.draw();
  if (stats.draining) state("warn", "Draining: finishing what runs");
  else if (stats.paused) state("warn", "The engine is paused");
  else state("live", "Live");
}

// ---- the stream ----

const pauseBetween = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()));
  });

async function follow(signal) {
  for (let wait = 1000; !signal.aborted; wait = Math.min(2 * wait, 15000)) {
    try {
      const response = await request("engine/live", { signal });
      await takeHistory(signal);
      for await (const data of events(response)) {
        if (signal.aborted) return;
        take(JSON.parse(data));
        wait = 500;
      }
      state("warn", "The stream ended; connecting again");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) {
        state("warn", error.keyed ? "The server does not accept the API key" : "The server wants an API key");
        return; // a new key begins anew
      }
      state("warn", error.message);
    }
    await pauseBetween(wait, signal);
  }
}

function update() {
  const wanted = shown && !paused;
  if (wanted === Boolean(connection)) return;
  connection?.abort();
  connection = null;
  if (!wanted) return;
  connection = new AbortController();
  state("warn", "Connecting");
  follow(connection.signal);
}

export function showEngine(show) {
  shown = show;
  if (shown && !parts) {
    build();
    drawFacts({});
    $("pause").addEventListener("click", () => {
      paused = !paused;
      $("pause").setAttribute("aria-pressed", String(paused));
      put($("pause"), paused ? "Resume view" : "Pause view");
      update();
      if (paused) state("warn", "View paused; the engine is not");
    });
    document.addEventListener("hadal-theme", () => parts.heat.draw());
  }
  update();
}
