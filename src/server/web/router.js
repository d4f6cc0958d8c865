// router.js - the router's page: every server, its leases and connections, once in a second.

import { $, bytes, el, put } from "./dom.js";
import { request, setKey } from "./net.js";

/** "2 place, 1 prefill": what is not 0. */
const counts = (of) => Object.entries(of ?? {}).filter(([, n]) => n > 0).map(([name, n]) => `${n} ${name}`).join(", ") || "–";

const leases = (of) => Object.entries(of ?? {}).map(([side, states]) => [side, counts(states)]).filter(([, text]) => text !== "–").map(([side, text]) => `${side}: ${text}`).join("; ") || "–";

const cells = (s) => [
  s.server, s.role, s.gone ? "leaves" : s.up ? "up" : "down", s.running, s.waiting, counts(s.waiting_for),
  s.cached_share == null ? "–" : `${Math.round(s.cached_share * 100)} %`, leases(s.leases), s.requests, s.failures,
];

const linkCells = (s) => (s.links ?? []).map((l) => [
  s.server, l.peer, l.side === "send" ? "sends" : "receives", l.up ? "up" : "down", bytes(l.in), bytes(l.in_per_s), bytes(l.out), bytes(l.out_per_s),
]);

function fill(body, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((row, i) => {
    const tr = body.rows[i] ?? body.appendChild(el("tr", {}, ...row.map(() => el("td", {}))));
    row.forEach((value, k) => put(tr.cells[k], String(value)));
  });
}

async function look() {
  try {
    const { servers } = await (await request("../router/servers")).json();
    $("key-form").hidden = true;
    put($("state"), `${servers.filter((s) => s.up).length} of ${servers.length} up`);
    fill($("servers"), servers.map(cells));
    fill($("links"), servers.flatMap(linkCells));
  } catch (error) {
    $("key-form").hidden = error.status !== 401;
    put($("state"), error.message);
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  look();
});
for (;;) {
  if (!document.hidden) await look();
  await new Promise((done) => setTimeout(done, 1000));
}
