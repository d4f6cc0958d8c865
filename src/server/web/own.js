// own.js - which of the engine's requests are this browser's, and where they stand in the queue.

import { request } from "./net.js";

const MOST = 64; // ids that are remembered
const FIRST_LOOK = 100; // milliseconds; most requests have begun by then
const BETWEEN = 400;

let own = new Set(); // the engine's ids
const tabs = "BroadcastChannel" in window ? new BroadcastChannel("hadal.own") : null;

function remember(ids) {
  own = new Set([...own, ...ids].slice(-MOST));
}
tabs?.addEventListener("message", ({ data }) => Array.isArray(data) && remember(data));

export const isOwn = (id) => own.has(id);

/** What a request is called when it is sent, so that it can be asked for. */
export function newRequestId() {
  return `page-${Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(36)).join("")}`;
}

/** Calls say(place) as the request moves up, say(0) when it has begun. Ends with the signal, or when
 * it is known and runs; a server that does not tell is not asked again. */
export async function followRequest(name, signal, say) {
  let pause = FIRST_LOOK;
  while (!signal.aborted) {
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = BETWEEN;
    if (signal.aborted) return;
    try {
      const { requests } = await (await request(`engine/requests?request_id=${name}`, { signal })).json();
      if (!requests.length) continue;
      const ids = requests.map(({ id }) => id);
      if (!ids.every(isOwn)) tabs?.postMessage(ids);
      remember(ids);
      const begun = requests.some(({ phase }) => phase !== "waiting");
      say(begun ? 0 : 1 + Math.min(...requests.map(({ ahead }) => ahead)));
      if (begun) return;
    } catch {
      return;
    }
  }
}
