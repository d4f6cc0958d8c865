// markdown.js - Markdown to DOM nodes while it streams in.
//
// Text is applied line by line and a finished line is never touched again. The line that is
// still being written is drawn provisionally: before more of it is drawn, what it added is taken
// back. So a frame costs the length of one line, however long the answer is. Markup of a model
// can only become the elements named here; HTML stays text, images are never loaded.

import { colorLine, languageOf } from "./code.js";
import { copyButton, el } from "./dom.js";
import { mathml } from "./tex.js";

const LONG = 1000; // characters after which a line is settled piece by piece
const MOST_SOURCE = 4000; // characters of a formula over several lines
const DEEP = 6; // emphasis inside emphasis; quotes and lists inside each other
const PLAIN = /^[^\\`*_~[\]!:|$]*$/;
const UNDECIDED = /^[\s>]*(?:[-*_+#=~`|:\s]*|```[^`]*|~~~.*|\$|\\)$/; // a marker, perhaps
const NUMBER = /^[\s>]*\d{0,9}[.)]?\s*$/; // of a list, perhaps
const RULE = /^ *([-*_])( *\1){2,} *$/;

// A formula ends on its line. A dollar opens one only before what is no blank, and closes one only
// behind what is no blank and before what is no word, save the ends of "n-th" and of plurals.
const FORMULA = [
  String.raw`\\\((?<round>.{1,2000}?)\\\)`,
  String.raw`\\\[(?<square>.{1,2000}?)\\\]`,
  String.raw`\$\$(?<double>[^$]{1,2000})\$\$`,
  String.raw`(?<![\w$\\])\$(?=[^\s$])(?<single>(?:\\.|[^$\\${"`"}]){1,600}?)(?<!\s)\$(?!\$)(?:(?!\w)|(?=(?:th|st|nd|rd|s)\b))`,
].join("|");
const PROSE = /^[)\],.;:!?]|^(?=[^\\^_={}]*$).*[\s|][A-Za-z]{2,}/; // what may stand between two prices
const FINISHED = new RegExp(`${FORMULA}|(\`+).*?\\5`, "g");
const UNFINISHED = /\\[([]|(?<![\w$\\])\$\$?(?!\s|\d[\d.,]*(?:[\s).,;:!?]|$))/;

// In this order: formula, escape, code, strong, em with * and with _, struck, link or image, bare address.
const INLINE = new RegExp(
  [
    FORMULA,
    String.raw`\\(?<escaped>[\\${"`"}*_{}[\]()#+\-.!~|<>$])`,
    "(?<ticks>`{1,3})(?!`)(?<code>.{1,600}?)(?<!`)\\k<ticks>(?!`)",
    String.raw`(?<stars>\*\*|__)(?=\S)(?<strong>.{1,600}?\S|\S)\k<stars>`,
    String.raw`(?<![\w*])\*(?=[^\s*])(?<em>.{1,600}?[^\s*]|[^\s*])\*(?!\*)`,
    String.raw`(?<!\w)_(?=[^\s_])(?<em2>.{1,600}?[^\s_]|[^\s_])_(?!\w)`,
    String.raw`~~(?=\S)(?<struck>.{1,600}?)~~`,
    String.raw`!?\[(?<label>[^[\]]{0,300})\]\(<?(?<address>[^\s()<>]{1,1000}(?:\([^\s()<>]{0,200}\))?)>?(?: "[^"]{0,200}")?\)`,
    String.raw`(?<bare>https?://[^\s<>"'${"`"}]{1,1000}[^\s<>"'${"`"}.,;:!?)\]*_])`,
  ].join("|"),
  "g",
);

function link(address, content) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // Relative or broken: shown as text.
  }
  if (url?.protocol !== "https:" && url?.protocol !== "http:") return null;
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, content);
}

function match(text, at) {
  INLINE.lastIndex = at;
  return INLINE.exec(text);
}

/** Appends the inline markup of one line. */
function inline(text, into, depth = 0) {
  let from = 0;
  const nested = (name, inner) => {
    const node = el(name);
    inline(inner, node, depth + 1);
    into.append(node);
  };
  for (let m, at = 0; depth < DEEP && (m = match(text, at)); at = Math.max(from, m.index + 1)) {
    const { round, square, double, single, escaped, code, strong, em, em2, struck, label, address, bare } = m.groups;
    if (single && PROSE.test(single)) continue;
    if (m.index > from) into.append(text.slice(from, m.index));
    const whole = m[0];
    from = m.index + whole.length;
    const formula = round ?? square ?? double ?? single;
    if (formula) into.append(mathml(formula, Boolean(square ?? double)) ?? whole);
    else if (escaped) into.append(escaped);
    else if (code) into.append(el("code", null, code.replace(/^ (.*\S.*) $/, "$1")));
    else if (strong) nested("strong", strong);
    else if (em || em2) nested("em", em || em2);
    else if (struck) nested("del", struck);
    else into.append(link(address ?? bare, (bare ?? label) || address) ?? whole);
  }
  if (from < text.length) into.append(text.slice(from));
}

/** The text with each formula and each piece of code blotted out. */
const mask = (text) => text.replace(FINISHED, (whole) => "x".repeat(whole.length));

const odd = (text, marker) => (text.split(marker).length - 1) % 2 === 1;

/** [text with what it leaves open closed, source of a formula without an end], so that markers do not flash. */
function closed(text) {
  const at = mask(text).search(UNFINISHED);
  const source = at < 0 ? "" : text.slice(at);
  let shown = at < 0 ? text.replace(/(?:\*{1,2}|`+)$/, "") : text.slice(0, at);
  if (odd(shown, "`")) shown += "`";
  else if (odd(shown, "**")) shown = shown.trimEnd() + "**";
  return [shown, source];
}

/** Where a line that is too long is cut: at a blank, and in no formula, code or strong text. */
function cutOf(line) {
  const masked = mask(line.slice(0, LONG));
  const open = masked.search(UNFINISHED);
  let at = masked.lastIndexOf(" ", open < 0 ? LONG : open);
  for (let tries = 0; at > LONG / 2 && tries < 32; tries++, at = masked.lastIndexOf(" ", at - 1)) {
    const piece = masked.slice(0, at);
    if (!odd(piece, "`") && !odd(piece, "**")) return at;
  }
  const last = line.lastIndexOf(" ", LONG);
  return last > LONG / 2 ? last : LONG;
}

/** A row's cells. A bar in a formula divides nothing. */
function cells(line) {
  const bars = line.trim().replace(FINISHED, (whole, ...groups) =>
    PROSE.test(groups.at(-1).single ?? "") ? whole : whole.replaceAll("|", "\u0000"),
  );
  const parts = bars.replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return parts.map((cell) => cell.replaceAll("\u0000", "|").trim());
}

/** Of a table's second line: l, c or r for each column, as its colons say. */
const alignments = (line) => cells(line).map((cell) => (/^:-*:$/.test(cell) ? "c" : /:$/.test(cell) ? "r" : /^:/.test(cell) ? "l" : null));

export class Markdown {
  constructor(root) {
    this.root = root;
    this.rest = ""; // the line that is being written
    this.added = []; // nodes of its provisional drawing
    this.before = null; // the state before it
    this.tail = null; // its text node, where more plain text may simply be appended
    this.state = { boxes: [], open: null, kind: "", head: null, blank: true, joined: false };
  }

  /** More text. */
  write(text) {
    if (this.tail && !text.includes("\n") && PLAIN.test(text)) {
      this.rest += text;
      this.tail.appendData(text);
      if (this.rest.length > LONG) this.draw();
      return;
    }
    this.rest += text;
    this.draw();
  }

  /** There is no more text. */
  end() {
    this.takeBack();
    if (this.rest) this.line(this.shorten(this.rest));
    this.rest = "";
  }

  draw() {
    this.takeBack();
    const lines = this.rest.split("\n");
    this.rest = lines.pop();
    for (const line of lines) this.line(this.shorten(line.replace(/\r$/, "")));
    this.rest = this.shorten(this.rest);
    if (this.rest && !(UNDECIDED.test(this.rest) && !this.state.joined)) this.drawProvisionally();
  }

  /** Settles what is too long of a line; gives the rest. */
  shorten(line) {
    while (line.length > LONG) {
      const cut = this.state.kind === "code" || this.state.kind === "math" ? LONG : cutOf(line);
      this.line(line.slice(0, cut), false);
      this.state.joined = true;
      line = line.slice(cut);
    }
    return line;
  }

  drawProvisionally() {
    this.before = { ...this.state, boxes: [...this.state.boxes] };
    this.provisional = true;
    this.line(this.rest, false);
    this.provisional = false;
    const last = this.added.at(-1);
    const text = last?.nodeType === Node.TEXT_NODE ? last : last?.lastChild;
    const { kind, colors } = this.state;
    const plain = kind === "code" ? !colors : PLAIN.test(this.rest) && !NUMBER.test(this.rest);
    if (plain && text?.nodeType === Node.TEXT_NODE && this.rest.endsWith(text.data)) {
      this.tail = text;
    }
  }

  takeBack() {
    for (const node of this.added) node.remove();
    this.added = [];
    this.tail = null;
    if (this.before) this.state = this.before;
    this.before = null;
  }

  /** Appends to a node and remembers what has to go when the line is drawn again. */
  append(into, ...nodes) {
    for (const node of nodes) {
      into.append(node);
      if (this.provisional) this.added.push(node);
    }
  }

  /** One line; not ended: a first piece of a long one, or what there is of the last one. */
  line(text, ended = true) {
    const s = this.state;
    const joined = s.joined;
    s.joined = false;
    if (s.kind === "code") return this.codeLine(text, joined, ended);
    if (s.kind === "math") return this.mathLine(text, joined, ended);
    if (joined && s.open) return this.inlineInto(s.open, text);
    const inside = /^\s*$/.test(text) ? "" : this.enter(text.replaceAll("\t", "    "));
    s.blank = inside.trim() === "";
    if (s.blank) this.shut();
    else this.block(inside, ended);
  }

  /** The open paragraph or table takes no more lines. */
  shut() {
    this.state.open = null;
    this.state.kind = "";
    this.state.head = null;
  }

  /** Opens and closes quotes and list items; what remains is the text of the innermost. */
  enter(text) {
    const s = this.state;
    let rest = text;
    let depth = 0;
    for (; depth < s.boxes.length; depth++) {
      const box = s.boxes[depth];
      const indent = rest.match(/^ */)[0].length;
      if (box.quote) {
        if (indent > 3 || rest[indent] !== ">") break;
        rest = rest.slice(indent + 1).replace(/^ /, "");
      } else {
        if (indent < box.indent) break;
        rest = rest.slice(box.indent);
      }
    }
    const lazy = depth < s.boxes.length && s.kind === "p" && !s.blank && !this.starts(rest);
    if (!lazy && depth < s.boxes.length) this.close(depth);
    for (let m; !lazy && s.boxes.length < DEEP; ) {
      if ((m = /^ {0,3}> ?/.exec(rest))) this.openBox(el("blockquote"), { quote: true });
      else if ((m = this.listItem(rest))) this.openItem(m);
      else break;
      rest = rest.slice(m[0].length);
    }
    return rest;
  }

  starts(text) {
    return /^ {0,3}(?:>|#{1,6} |```|~~~)/.test(text) || this.listItem(text) || RULE.test(text);
  }

  listItem(text) {
    if (RULE.test(text)) return null;
    return /^( {0,3})([-*+]|\d{1,9}[.)])(?: {1,4}(?=\S)| +$)/.exec(text);
  }

  close(depth) {
    this.state.boxes.length = depth;
    this.shut();
  }

  get inner() {
    return this.state.boxes.at(-1)?.node ?? this.root;
  }

  openBox(node, box) {
    const into = this.inner;
    this.close(this.state.boxes.length);
    this.append(into, node);
    this.state.boxes.push({ node, ...box });
  }

  openItem(match) {
    const [whole, , marker] = match;
    const name = /\d/.test(marker) ? "ol" : "ul";
    let list = this.inner.lastElementChild;
    if (list?.localName !== name || list.dataset.marker !== marker.at(-1)) {
      const start = name === "ol" && parseInt(marker, 10) !== 1 ? parseInt(marker, 10) : null;
      list = el(name, { "data-marker": marker.at(-1), start });
      this.append(this.inner, list);
    }
    const item = el("li");
    this.close(this.state.boxes.length);
    this.append(list, item);
    this.state.boxes.push({ node: item, indent: whole.length });
  }

  block(text, ended) {
    const s = this.state;
    const fence = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/.exec(text);
    if (fence) return this.openCode(fence);
    const formula = /^\s*(\$\$(?!\$)|\\\[)(.*)$/.exec(text);
    if (formula && this.formula(formula[1], formula[2], ended)) return;
    const heading = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/.exec(text);
    if (heading) {
      // The page's own headings are the first two levels.
      const node = el(`h${Math.min(heading[1].length + 2, 6)}`);
      this.append(this.inner, node);
      this.inlineInto(node, heading[2]);
      return this.shut();
    }
    if (RULE.test(text)) {
      this.append(this.inner, el("hr"));
      return this.shut();
    }
    if (s.kind === "table" && text.includes("|")) return this.row(s.open, "td", text);
    if (s.head && !this.provisional && /^[\s|:-]*-[\s|:-]*$/.test(text) && text.includes("|")) {
      return this.openTable(alignments(text));
    }
    this.paragraph(text);
  }

  paragraph(text) {
    const s = this.state;
    const fresh = s.kind !== "p" || !s.open;
    if (fresh) {
      const node = el("p", { dir: "auto" });
      this.append(this.inner, node);
      s.open = node;
      s.kind = "p";
    } else {
      this.append(s.open, document.createTextNode("\n"));
    }
    s.head = fresh && text.includes("|") ? text : null;
    this.inlineInto(s.open, text);
  }

  inlineInto(node, text) {
    const part = document.createDocumentFragment();
    const [shown, source] = this.provisional ? closed(text) : [text, ""];
    inline(shown, part);
    if (source) part.append(source);
    part.normalize(); // one text node instead of many
    // What is taken back again is one node: taking back many from a long paragraph is slow.
    if (this.provisional) this.append(node, el("span", null, part));
    else this.append(node, ...part.childNodes);
  }

  openTable(sides) {
    const s = this.state;
    s.sides = sides;
    const body = el("tbody");
    const head = el("thead");
    this.row(head, "th", s.head);
    s.open.replaceWith(el("div", { class: "scroll", tabindex: 0 }, el("table", null, head, body)));
    s.open = body;
    s.kind = "table";
    s.head = null;
  }

  row(into, name, text) {
    const row = el("tr");
    for (const [column, cell] of cells(text).entries()) {
      const node = el(name, { class: this.state.sides[column] });
      inline(cell, node);
      row.append(node);
    }
    this.append(into, row);
  }

  openCode(fence) {
    const s = this.state;
    const code = el("code");
    const language = fence[2].trim().split(/\s/)[0].slice(0, 30);
    const head = el("div", { class: "code-head" }, el("span", null, language || "text"));
    head.append(copyButton(() => code.textContent));
    this.append(this.inner, el("div", { class: "code" }, head, el("pre", { tabindex: 0 }, code)));
    s.open = code;
    s.kind = "code";
    s.head = null;
    s.fence = fence[1];
    s.colors = languageOf(language);
    s.mode = null;
  }

  codeLine(text, joined, ended) {
    const s = this.state;
    const mark = text.trim();
    const { length } = mark;
    if (ended && !joined && length >= s.fence.length && mark === s.fence[0].repeat(length)) {
      return this.shut();
    }
    const indent = s.boxes.reduce((sum, box) => sum + (box.indent ?? 0), 0);
    const body = joined ? text : text.slice(Math.min(indent, text.match(/^ */)[0].length));
    const end = ended ? "\n" : "";
    if (!s.colors) return this.append(s.open, document.createTextNode(body + end));
    const [nodes, mode] = colorLine(s.colors, body, s.mode);
    s.mode = mode;
    this.append(s.open, ...nodes, document.createTextNode(end));
  }

  // ---- formulas that stand alone ----

  /** After $$ or \[ at the beginning of a line; false: more follows its end, so it is one of a paragraph. */
  formula(opening, text, ended) {
    const closing = opening === "$$" ? "$$" : "\\]";
    const at = text.indexOf(closing);
    if (at >= 0 && /[^\s.,;]/.test(text.slice(at + 2))) return false;
    const s = this.state;
    const box = el("div", { class: "math", tabindex: 0 });
    this.append(this.inner, box);
    s.open = box;
    s.kind = "math";
    s.head = null;
    s.closing = closing;
    s.source = "";
    if (at < 0) {
      this.append(box, document.createTextNode(opening));
      this.mathLine(text, true, ended);
    } else {
      box.append(mathml(text.slice(0, at), true) ?? opening + text);
      this.shut();
    }
    return true;
  }

  /** Source until the end is there; then the formula, if it can be drawn. */
  mathLine(text, joined, ended) {
    const s = this.state;
    const quoted = s.boxes.some((box) => box.quote);
    const line = quoted && !joined ? text.replace(/^\s*(?:> ?)+/, "") : text;
    const at = line.indexOf(s.closing);
    const end = ended ? "\n" : "";
    if (at < 0 && ((!line.trim() && s.source.trim()) || s.source.length > MOST_SOURCE)) return this.giveUp(line);
    if (at < 0) {
      s.source += line + end;
      return this.append(s.open, document.createTextNode(line + end));
    }
    const drawn = this.provisional ? null : mathml(s.source + line.slice(0, at), true);
    if (drawn) s.open.replaceChildren(drawn);
    else this.append(s.open, document.createTextNode(line.slice(0, at + 2)));
    this.shut();
    const rest = line.slice(at + 2);
    if (/[^\s.,;]/.test(rest)) this.paragraph(rest.trimStart());
  }

  /** A formula does not go over an empty line: what came stays source. */
  giveUp(line) {
    this.shut();
    this.state.blank = !line.trim();
    if (line.trim()) this.paragraph(line);
  }
}
