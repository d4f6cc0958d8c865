// chat.js - the conversation: what is asked, how the answer streams in, what can be done with it.

import { $, el } from "./dom.js";
import { attach, attached, startFiles, withFiles } from "./files.js";
import { drawList, startList } from "./list.js";
import { events, request, ServerError } from "./net.js";
import { followRequest, newRequestId } from "./own.js";
import { requestSettings, toggle, toggled } from "./settings.js";
import { loadChat, newChat, remember, remembered, saveChat } from "./store.js";
import { run, runs, TOOLS } from "./tools.js";
import { AnswerView, errorView, questionView } from "./messages.js";

const MOST_ROUNDS = 8; // of tool calls before the page stops answering them

let chat = newChat();
let running = null; // AbortController of the answer that is being written
let editing = false;
let wantsKey = () => {}; // the server refused for want of a key, or would not have this one
let chosen = () => {}; // a conversation was chosen

const prompt = () => $("prompt");
const messages = () => $("messages");

// ---- one answer ----

/** An answer as it goes back to the server: calls that nobody answered are left out. */
function pastAnswer({ role, content, reasoning, calls = [] }, answered) {
  const message = { role, content };
  if (reasoning) message.reasoning_content = reasoning;
  const sent = calls.filter((call) => answered.has(call.id));
  if (sent.length) {
    message.tool_calls = sent.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return content || sent.length ? [message] : [];
}

function requestBody(mine) {
  const { system, ...parameters } = requestSettings();
  const answered = new Set(mine.messages.map((message) => message.role === "tool" && message.id));
  const sent = mine.messages.flatMap((message) => {
    const { role, content, id, files } = message;
    if (role === "tool") return [{ role, tool_call_id: id, content }];
    return role === "user" ? [{ role, content: withFiles(content, files) }] : pastAnswer(message, answered);
  });
  if (system) sent.unshift({ role: "system", content: system });
  const body = { ...parameters, messages: sent, stream: true, stream_options: { include_usage: true } };
  if (toggled("tools")) body.tools = TOOLS;
  return body;
}

function take(delta, message, now) {
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought || delta.content || delta.tool_calls) message.firstAt ??= now;
  if (thought) {
    message.thoughtFrom ??= now;
    message.reasoning += thought;
  }
  if ((delta.content || delta.tool_calls) && message.thoughtFrom) message.thoughtTo ??= now;
  if (delta.content) message.content += delta.content;
  for (const piece of delta.tool_calls ?? []) {
    const call = (message.calls[piece.index ?? 0] ??= { id: "", name: "", arguments: "" });
    call.id ||= piece.id ?? "";
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
}

/** Streams the answer to body into message; view draws it as it grows. */
async function stream(body, message, view, signal) {
  const name = newRequestId();
  const over = new AbortController();
  followRequest(name, AbortSignal.any([signal, over.signal]), (place) => view.queued(place));
  try {
    await read(await request("v1/chat/completions", { body, signal, name }), message, view);
  } finally {
    over.abort();
  }
}

async function read(response, message, view) {
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The answer failed.", 0, 0);
    if (chunk.usage) message.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (choice?.delta) take(choice.delta, message, performance.now());
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    view.changed();
  }
  if (!message.finish) throw new ServerError("The connection ended before the answer did.", 0, 0);
}

/** What is kept of an answer: durations instead of moments. */
function settle(message, startedAt, endedAt) {
  const { firstAt, thoughtFrom, thoughtTo } = message;
  if (firstAt) {
    message.ttft = firstAt - startedAt;
    message.took = endedAt - firstAt;
  }
  if (thoughtFrom) message.thought = (thoughtTo ?? endedAt) - thoughtFrom;
  message.calls = message.calls.filter((call) => call?.name);
  delete message.firstAt;
  delete message.thoughtFrom;
  delete message.thoughtTo;
}

/** One request and its answer; true when its calls were answered and the model should go on. */
async function round(mine, signal) {
  const message = { role: "assistant", content: "", reasoning: "", calls: [] };
  const view = new AnswerView(message);
  show(mine, view.root);
  const startedAt = performance.now();
  try {
    await stream(requestBody(mine), message, view, signal);
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else throw error;
  } finally {
    settle(message, startedAt, performance.now());
    view.finish();
    if (message.content || message.reasoning || message.calls.length) mine.messages.push(message);
    else view.root.remove();
    if (!mine.deleted) saveChat(mine);
  }
  if (message.finish !== "tool_calls" || !message.calls.length) return false;
  if (!message.calls.every((call) => runs(call.name))) return false;
  for (const call of message.calls) {
    const content = run(call.name, call.arguments);
    mine.messages.push({ role: "tool", id: call.id, content });
    view.result(call, content);
  }
  return true;
}

/** Answers the last message of the conversation. */
async function answer() {
  const mine = chat;
  running = new AbortController();
  const { signal } = running;
  showRunning("Answering");
  drawActions();
  let outcome = "Answer finished";
  try {
    for (let n = 0; n < MOST_ROUNDS && (await round(mine, signal)); n++);
    if (signal.aborted) outcome = "Stopped";
  } catch (error) {
    outcome = `Error: ${error.message}`;
    if (error.status === 401) wantsKey(error);
    show(mine, errorView(error, regenerate));
  } finally {
    running = null;
    showRunning(outcome);
    if (mine === chat) drawActions();
    drawList();
  }
}

export function stop() {
  running?.abort();
}

// ---- what a person does ----

function ask(text, files = []) {
  if (running || (!text.trim() && !files.length)) return;
  if (editing) {
    chat.messages.length = lastQuestion();
    editing = false;
    draw();
  }
  chat.title ||= (text.trim() || files[0].name).replace(/\s+/g, " ").slice(0, 60);
  const question = { role: "user", content: text };
  if (files.length) question.files = files;
  chat.messages.push(question);
  saveChat(chat);
  drawList();
  document.body.classList.remove("fresh");
  show(chat, questionView(question));
  toEnd(true);
  answer();
}

const lastQuestion = () => chat.messages.findLastIndex((message) => message.role === "user");

function regenerate() {
  const at = lastQuestion();
  if (running || at < 0) return;
  chat.messages.length = at + 1;
  draw();
  answer();
}

function editLast() {
  const at = lastQuestion();
  if (running || at < 0) return;
  editing = true;
  prompt().value = chat.messages[at].content;
  attach(chat.messages[at].files ?? []);
  drawEditing();
  prompt().focus();
}

export function cancelEdit() {
  if (!editing) return false;
  editing = false;
  prompt().value = "";
  attach([]);
  drawEditing();
  prompt().focus();
  return true;
}

function open(id) {
  stop();
  cancelEdit();
  chat = (id && loadChat(id)) || newChat();
  remember(chat.id);
  draw();
  drawList(chat.id);
  toEnd(true);
  prompt().focus({ preventScroll: true });
}

// ---- drawing ----

function show(mine, node) {
  if (mine !== chat) return; // the reader went to another conversation
  messages().append(node);
  toEnd();
}

/** The scroller stays at the end as long as the reader has not left it. */
let following = true;
function toEnd(always) {
  const box = $("scroller");
  if (always) following = true;
  if (following) box.scrollTop = box.scrollHeight;
  $("to-end").hidden = following;
}

function draw() {
  messages().replaceChildren();
  document.body.classList.toggle("fresh", !chat.messages.length);
  let view = null;
  for (const message of chat.messages) {
    if (message.role === "user") messages().append(questionView(message));
    else if (message.role === "tool") view?.result(view.message.calls.find((c) => c.id === message.id), message.content);
    else {
      view = new AnswerView(message);
      view.finish();
      messages().append(view.root);
    }
  }
  drawActions();
  drawEditing();
}

/** Edit belongs to the last question, Regenerate to the last answer. */
function drawActions() {
  for (const node of messages().querySelectorAll(".only-last")) node.remove();
  if (running) return;
  const last = (kind) => [...messages().querySelectorAll(`${kind} .actions`)].at(-1);
  const button = (label, act) => el("button", { type: "button", class: "quiet only-last", onclick: act }, label);
  last(".question")?.append(button("Edit", editLast));
  last(".answer")?.append(button("Regenerate", regenerate));
}

function drawEditing() {
  $("editing").hidden = !editing;
  const nodes = [...messages().children];
  const from = nodes.findLastIndex((node) => node.classList.contains("question"));
  nodes.forEach((node, at) => node.classList.toggle("faded", editing && at >= from));
}

function showRunning(text) {
  document.body.classList.toggle("running", Boolean(running));
  messages().setAttribute("aria-busy", String(Boolean(running)));
  const send = $("send");
  send.setAttribute("aria-label", running ? "Stop" : "Send");
  send.title = running ? "Stop (Esc)" : "Send (Enter)";
  $("status").textContent = text;
}

// ---- the box to write in ----

function send() {
  if (running) return stop();
  const text = prompt().value;
  const files = attached();
  if (!text.trim() && !files.length) return prompt().focus();
  prompt().value = "";
  attach([]);
  ask(text, files);
}

function key(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) send();
  } else if (event.key === "ArrowUp" && !prompt().value && !attached().length && !editing) {
    event.preventDefault();
    editLast();
  }
}

export function startChat(onWantsKey, onChosen) {
  wantsKey = onWantsKey;
  chosen = onChosen;
  $("compose").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt().addEventListener("keydown", key);
  $("cancel-edit").addEventListener("click", cancelEdit);
  $("new").addEventListener("click", () => {
    chosen();
    open();
  });
  const box = $("scroller");
  box.addEventListener("scroll", () => {
    following = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    $("to-end").hidden = following;
  });
  $("to-end").addEventListener("click", () => toEnd(true));
  document.addEventListener("hadal-grown", () => toEnd());
  for (const example of document.querySelectorAll(".example")) {
    example.addEventListener("click", () => {
      if ("tools" in example.dataset) toggle("tools", true);
      ask(example.textContent);
    });
  }
  startFiles();
  startList({
    open(id) {
      chosen();
      open(id);
    },
    renamed(id, title) {
      if (id === chat.id) chat.title = title;
    },
    deleted(id) {
      if (id !== chat.id) return;
      chat.deleted = true; // its answer may still be coming in
      open();
    },
  });
  open(remembered());
  // A link may fill the box; it never sends.
  const asked = new URLSearchParams(location.search).get("q");
  if (asked) {
    open();
    prompt().value = asked.slice(0, 20000);
  }
}
