// messages.js - how one question, one answer and one failure look.
//
// An answer that grows is drawn at most once a frame, and only what is new of it.

import { copyButton, el, figure, milliseconds, put } from "./dom.js";
import { Markdown } from "./markdown.js";

function actions(text) {
  return el("div", { class: "actions" }, copyButton(text));
}

export function questionView(text) {
  const body = el("div", { class: "bubble", dir: "auto" }, text);
  return el("article", { class: "question", "aria-label": "You" }, body, actions(() => text));
}

export function errorView(error, retry) {
  const later = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const button = el("button", { type: "button", class: "quiet" }, "Try again");
  button.addEventListener("click", retry);
  return el("div", { class: "error", role: "alert" }, el("p", null, error.message + later), button);
}

/** JSON indented, or the text as it is while it is no JSON yet. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

class CallView {
  constructor() {
    this.name = el("b");
    this.state = el("span", { class: "muted" }, "calling");
    this.input = el("pre", { tabindex: 0, "aria-label": "Arguments" });
    this.root = el("div", { class: "call" }, el("p", null, this.name, " ", this.state), this.input);
  }

  draw(call, done) {
    put(this.name, call.name);
    put(this.input, done ? pretty(call.arguments) : call.arguments);
    if (done && !this.output) put(this.state, "called");
  }

  result(content) {
    this.output = el("pre", { tabindex: 0, "aria-label": "Result" }, pretty(content));
    this.root.append(el("p", { class: "muted" }, "result"), this.output);
    put(this.state, "called in this page");
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
    out.push(`${tokens} tokens`);
    if (took > 0 && tokens > 1) out.push(`${figure(((tokens - 1) * 1000) / took)} tokens/s`);
  }
  if (ttft) out.push(`first token ${milliseconds(ttft)}`);
  if (usage?.prompt_tokens) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    out.push(`${usage.prompt_tokens} prompt tokens${cached ? `, ${cached} cached` : ""}`);
  }
  const { accepted_prediction_tokens: yes, rejected_prediction_tokens: no } =
    usage?.completion_tokens_details ?? {};
  if (yes || no) out.push(`${yes ?? 0} of ${(yes ?? 0) + (no ?? 0)} drafts accepted`);
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
    this.wait = el("div", { class: "wait", role: "img", "aria-label": "Waiting for the first token" });
    this.root = el(
      "article",
      { class: "answer live", "aria-label": "Answer" },
      this.wait,
      this.thought.root,
      this.body,
      this.callBox,
      el("div", { class: "foot" }, this.figures, actions(() => message.content)),
    );
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
    document.dispatchEvent(new Event("hadal-grown"));
  }

  result(call, content) {
    this.calls[this.message.calls.indexOf(call)]?.result(content);
  }
}
