// messages.js - how one question, one answer and one failure look.
//
// An answer that grows is drawn at most once a frame, and only what is new of it.

import { copyButton, el, figure, milliseconds, put } from "./dom.js";
import { filesView } from "./files.js";
import { Markdown } from "./markdown.js";

export function questionView({ content, files = [] }) {
  const body = content && el("div", { class: "bubble", dir: "auto" }, content);
  const actions = el("div", { class: "actions" }, copyButton(() => content));
  return el("article", { class: "question", "aria-label": "You" }, ...filesView(files), body || null, actions);
}

export function errorView(error, retry) {
  const later = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const button = el("button", { type: "button", class: "quiet" }, "Try again");
  button.addEventListener("click", retry);
  return el("div", { class: "error", role: "alert" }, el("p", null, error.message + later), button);
}

/** Long JSON indented; short, or not yet whole, as it is. */
function pretty(text) {
  try {
    return text.length > 70 ? JSON.stringify(JSON.parse(text), null, 2) : text;
  } catch {
    return text;
  }
}

class CallView {
  constructor() {
    this.name = el("b");
    this.input = el("pre");
    this.root = el("div", { class: "call" }, el("div", null, this.name, " ", this.input));
  }

  draw(call, done) {
    put(this.name, call.name);
    put(this.input, done ? pretty(call.arguments) : call.arguments);
  }

  result(content) {
    const arrow = el("span", { class: "muted" }, "answered in this page ");
    this.root.append(el("div", null, arrow, el("pre", null, pretty(content))));
  }
}

/** The reasoning, folded; while it grows its last words run along the summary. */
class ThoughtView {
  constructor() {
    this.label = el("span", { class: "thought-label" }, "Thinking");
    this.preview = el("span", { class: "preview", "aria-hidden": "true" });
    this.text = document.createTextNode("");
    this.root = el(
      "details",
      { class: "thought", hidden: true },
      el("summary", null, this.label, this.preview),
      el("div", { class: "thought-text", dir: "auto" }, this.text),
    );
  }

  draw(text, time, live) {
    this.root.hidden = !text;
    if (text.length > this.text.length) this.text.appendData(text.slice(this.text.length));
    put(this.preview, live ? text.slice(-160).replace(/\s+/g, " ") : "");
    const seconds = time === undefined ? "" : ` ${(time / 1000).toFixed(1)} s`;
    put(this.label, live ? `Thinking${seconds}` : `Thought${seconds && ` for${seconds}`}`);
  }
}

/** The figures under an answer: those the server counted, and what the page clocked. */
function figures({ usage, ttft, took, finish }) {
  const out = [];
  const tokens = usage?.completion_tokens;
  if (tokens) {
    const speed = took > 0 && tokens > 1 ? `, ${figure(((tokens - 1) * 1000) / took)}/s` : "";
    out.push(`${tokens} tokens${speed}`);
  }
  if (ttft) out.push(`first after ${milliseconds(ttft)}`);
  if (usage?.prompt_tokens) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    out.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
  }
  const { accepted_prediction_tokens: yes, rejected_prediction_tokens: no, draft_steps: steps } =
    usage?.completion_tokens_details ?? {};
  if (yes || no) {
    const length = steps ? `, ${figure(1 + yes / steps)} tokens a step` : "";
    out.push(`drafts ${yes ?? 0} of ${(yes ?? 0) + (no ?? 0)}${length}`);
  }
  if (finish === "length") out.push("ended at the token limit");
  if (finish === "stopped") out.push("stopped");
  return out.join(" · ");
}

export class AnswerView {
  constructor(message) {
    this.message = message;
    this.thought = new ThoughtView();
    this.body = el("div", { class: "body" });
    this.markdown = new Markdown(this.body);
    this.written = 0;
    this.callBox = el("div", { class: "calls" });
    this.calls = [];
    this.figures = el("span", { class: "figures" });
    this.actions = el("div", { class: "actions" });
    this.place = el("span", { class: "muted small", role: "status" });
    this.wait = el("div", { class: "wait" }, el("i", { role: "img", "aria-label": "Waiting for the first token" }), this.place);
    this.root = el(
      "article",
      { class: "answer live", "aria-label": "Answer" },
      this.wait,
      this.thought.root,
      this.body,
      this.callBox,
      el("div", { class: "foot" }, this.figures, this.actions),
    );
  }

  /** Before the first token: the request's place in the queue, 0: it has begun. */
  queued(place) {
    put(this.place, place ? `Place ${place} in the queue` : "");
  }

  /** The message grew: draw it in the next frame. */
  changed() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw(true);
      document.dispatchEvent(new Event("hadal-grown"));
    });
  }

  draw(live) {
    const { content, reasoning, thought, thoughtFrom, thoughtTo, calls, firstAt } = this.message;
    const now = thoughtTo ?? performance.now();
    const time = thought ?? (thoughtFrom === undefined ? undefined : now - thoughtFrom);
    this.wait.hidden = !live || Boolean(firstAt);
    this.thought.draw(reasoning ?? "", time, live && !thoughtTo);
    if (content.length > this.written) this.markdown.write(content.slice(this.written));
    this.written = content.length;
    for (const [at, call] of (calls ?? []).entries()) {
      if (!call) continue;
      if (!this.calls[at]) {
        this.calls[at] = new CallView();
        this.callBox.append(this.calls[at].root);
      }
      this.calls[at].draw(call, !live);
    }
  }

  /** The answer is whole, or as whole as it will be. */
  finish() {
    cancelAnimationFrame(this.frame);
    this.root.classList.remove("live");
    this.draw(false);
    this.markdown.end();
    this.figures.textContent = figures(this.message);
    if (this.message.content) this.actions.append(copyButton(() => this.message.content));
    document.dispatchEvent(new Event("hadal-grown"));
  }

  result(call, content) {
    this.calls[this.message.calls.indexOf(call)]?.result(content);
  }
}
