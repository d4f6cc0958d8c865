// net.js - talking to the server: the API key, errors worth reading, server-sent events.

const KEY = "hadal.key"; // for this tab only: a key does not belong into lasting storage
let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // Storage may be forbidden; the key then lives as long as the page.
}

export function setKey(value) {
  key = value.trim();
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // As above.
  }
}

export class ServerError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.keyed = Boolean(key); // a key was sent: with status 401, a wrong one
  }
}

async function refusal(response) {
  let message = "";
  try {
    const body = await response.json();
    message = body?.error?.message ?? body?.message ?? "";
  } catch {
    // Not JSON: a proxy's page, say. The status has to do.
  }
  const wait = Number(response.headers.get("Retry-After"));
  message ||= `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  return new ServerError(message, response.status, wait > 0 ? wait : 0);
}

/** A response with a good status; everything else is thrown as a ServerError. name: of the request. */
export async function request(path, { body, signal, name } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  if (name) headers["X-Request-Id"] = name;
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", 0, 0);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Lets the browser draw and listen. A timer would do, but hidden tabs starve timers. */
const waiting = [];
const channel = new MessageChannel();
channel.port1.onmessage = () => waiting.shift()();
function breathe() {
  return new Promise((resolve) => {
    waiting.push(resolve);
    channel.port2.postMessage(null);
  });
}

/** The data of each server-sent event. Comments (keep-alives) are passed over. */
export async function* events(response) {
  let breathed = performance.now();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      if (performance.now() - breathed > 10) {
        await breathe();
        breathed = performance.now();
      }
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection to the server broke.", 0, 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}
