// tex.js - a formula in LaTeX to MathML Core.
//
// A formula that is not understood in full gives null, so that its source can be shown instead.
// Text only ever becomes text nodes, and elements only those named here.

import {
  ACCENTS, CHARACTERS, DELIMITERS, ENVIRONMENTS, FONTS, FUNCTIONS, inFont, LIMITS, LONG_ARROWS, NEGATED, OLD_FONTS,
  SPACES, SYMBOLS,
} from "./symbols.js"; // prettier-ignore

const MATHML = "http://www.w3.org/1998/Math/MathML";
const LONGEST = 4000; // characters of a formula
const DEEPEST = 40; // groups inside each other
const THIN = 3 / 18; // em
const TOKEN = /\\(?:[A-Za-z]+|[^])|[^]/uy;
const BIG = [["big", 1.2], ["Big", 1.8], ["bigg", 2.4], ["Bigg", 3]]; // prettier-ignore
const SIZES = new Map(BIG.flatMap(([name, em]) => ["", "l", "r", "m"].map((side) => [`\\${name}${side}`, em])));
const STYLES = { "\\displaystyle": [true, 0], "\\textstyle": [false, 0], "\\scriptstyle": [false, 1], "\\scriptscriptstyle": [false, 2] };
const FRACTIONS = { frac: [], dfrac: [true], tfrac: [false], cfrac: [true], binom: [null, "(", ")"], dbinom: [true, "(", ")"], tbinom: [false, "(", ")"] };
const INFIX = { "\\over": {}, "\\atop": { bare: true }, "\\choose": { bare: true, open: "(", close: ")" } };
const CLASSES = { mathord: "ord", mathbin: "bin", mathrel: "rel", mathopen: "open", mathclose: "close", mathpunct: "punct", mathinner: "ord" };
const BRACKETS = { bra: ["⟨", "|"], ket: ["|", "⟩"], braket: ["⟨", "⟩"], abs: ["|", "|"], norm: ["‖", "‖"], set: ["{", "}"] };
const TEXTS = { text: "", mbox: "", hbox: "", textrm: "", textnormal: "", textup: "", textbf: "bold", textit: "slanted", emph: "slanted", texttt: "typed", textsf: "" };
const BOXES = { overline: "overline", underline: "underline", boxed: "boxed", fbox: "boxed", cancel: "cancel", bcancel: "cancel", xcancel: "cancel" };
const PHANTOMS = { phantom: {}, hphantom: { height: 0, depth: 0 }, vphantom: { width: 0 } };

class Malformed extends Error {}

function make(name, attributes, ...children) {
  const node = document.createElementNS(MATHML, name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value != null) node.setAttribute(key, String(value));
  }
  node.append(...children);
  return node;
}

const em = (width) => `${Number(width.toFixed(4))}em`;
const space = (width) => make("mspace", { width: em(width) });

// An atom is {node, kind, mo?, limits?, named?}: kind is its class in TeX, which decides the space
// around it; mo the operator in its heart; limits: scripts stand below and above; named: a function.
const atom = (node, kind = "ord", more = {}) => ({ node, kind, ...more });

function operator(text, kind, attributes, more) {
  const mo = make("mo", attributes, text);
  return atom(mo, kind, { mo, ...more });
}

const fence = (text, form, attributes) => make("mo", { form, fence: "true", stretchy: "true", ...attributes }, text);
const noSpace = (mo) => (mo.setAttribute("lspace", "0"), mo.setAttribute("rspace", "0"));

/** A class of TeX stands alone if what is beside it asks for no operand. */
const OPENERS = new Set([undefined, "bin", "rel", "op", "open", "punct"]);
const CLOSERS = new Set([undefined, "rel", "close", "punct"]);
const SPACED = new Set(["bin", "rel", "punct"]);

/** The nodes of a row, with the spaces that TeX would set and MathML would not. */
function spaced(atoms, { tight, after } = {}) {
  const solid = atoms.filter(({ kind }) => kind !== "space");
  const kinds = new Map(solid.map((one, n) => {
    const before = n ? solid[n - 1] : undefined;
    const left = before ? (before.alone ? "ord" : before.kind) : after;
    if (one.kind === "bin") one.alone = OPENERS.has(left) || CLOSERS.has(solid[n + 1]?.kind);
    return [one, { left, right: solid[n + 1]?.kind }];
  })); // prettier-ignore
  return atoms.flatMap((one, n) => {
    const { node, kind, mo, named, alone } = one;
    if (kind === "space") return [node];
    const { left, right } = kinds.get(one);
    const joint = kind === "bin" || kind === "rel";
    if (mo && kind === "ord" && SPACED.has(one.inner?.kind)) noSpace(mo);
    if (mo && joint && (alone || tight || solid.length === 1)) noSpace(mo);
    else if (mo && joint && n === 0) mo.setAttribute("form", "infix");
    if (mo && kind === "punct" && tight) noSpace(mo);
    if (!mo && joint && !tight && !alone) return [space(5 / 18), node, space(5 / 18)];
    if (!named) return [node];
    const out = [node];
    if (left === "ord" || left === "close") out.unshift(space(THIN));
    if (right === "ord" || right === "op") out.push(space(THIN));
    return out;
  });
}

function row(atoms, options) {
  const nodes = spaced(atoms, options);
  return nodes.length === 1 ? nodes[0] : make("mrow", null, ...nodes);
}

class Parser {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.depth = 0;
    this.font = "";
    this.tight = false; // inside a script
  }

  // ---- tokens ----

  peek() {
    while (/\s/.test(this.text[this.at] ?? "")) this.at++;
    TOKEN.lastIndex = this.at;
    return TOKEN.exec(this.text)?.[0] ?? "";
  }

  take() {
    const token = this.peek();
    this.at += token.length;
    return token;
  }

  takes(token) {
    if (this.peek() !== token) return false;
    this.at += token.length;
    return true;
  }

  expect(token) {
    if (!this.takes(token)) throw new Malformed(`${token} is missing`);
  }

  /** The source between braces that match; in brackets where they are optional. */
  raw(open = "{", close = "}") {
    this.expect(open);
    const from = this.at;
    for (let depth = 1; this.at < this.text.length; this.at++) {
      const c = this.text[this.at];
      if (c === "\\") this.at++;
      else if (c === close && depth === 1) return this.text.slice(from, this.at++);
      else if (c === "{") depth++;
      else if (c === "}") depth--;
    }
    throw new Malformed("a group does not end");
  }

  within(read) {
    if (++this.depth > DEEPEST) throw new Malformed("too deep");
    const { font, tight } = this;
    const out = read();
    this.font = font;
    this.tight = tight;
    this.depth--;
    return out;
  }

  // ---- rows ----

  /** Atoms up to a token for which stop holds; it is left. */
  atoms(stop) {
    return this.within(() => {
      let list = [];
      for (let token = this.peek(); token && !stop(token); token = this.peek()) {
        if (Object.hasOwn(INFIX, token)) {
          this.take();
          list = [this.fraction(row(list), row(this.atoms(stop)), INFIX[token])];
        } else if (Object.hasOwn(STYLES, token)) {
          this.take();
          const [displaystyle, scriptlevel] = STYLES[token];
          list.push(atom(make("mstyle", { displaystyle, scriptlevel }, ...spaced(this.atoms(stop)))));
        } else if (OLD_FONTS.has(token.slice(1))) {
          this.take();
          this.font = OLD_FONTS.get(token.slice(1));
        } else {
          list.push(this.scripted());
        }
      }
      return list;
    });
  }

  /** {…}: the only atom of a group keeps its heart, so that an operator stays one. */
  group() {
    this.expect("{");
    const list = this.atoms((token) => token === "}");
    this.expect("}");
    if (list.length === 1) return { ...list[0], kind: list[0].kind === "space" ? "space" : "ord", inner: list[0] };
    return atom(row(list, { tight: this.tight }));
  }

  /** One argument: a group, a command with its own, or a single character. */
  argument() {
    const token = this.peek();
    if (token === "{") return this.group();
    if (/^[0-9]$/.test(token)) return atom(make("mn", null, this.take()));
    return this.within(() => this.atom(true));
  }

  script() {
    return this.within(() => {
      this.tight = true;
      return row([this.argument()], { tight: true });
    });
  }

  /** […], where it is there. */
  optional() {
    if (this.peek() !== "[") return null;
    this.take();
    const list = this.atoms((token) => token === "]");
    this.expect("]");
    return row(list);
  }

  scripted() {
    const first = this.peek();
    const bare = first === "^" || first === "_" || first === "'";
    const base = bare ? atom(make("mrow")) : this.atom();
    let { limits } = base;
    let forced = false;
    let primes = "";
    let sub = null;
    let sup = null;
    for (;;) {
      if (this.takes("'") || this.takes("’")) primes += "′";
      else if (this.takes("\\limits")) forced = limits = true;
      else if (this.takes("\\nolimits")) limits = false;
      else if (!sub && this.takes("_")) sub = this.script();
      else if (!sup && this.takes("^")) sup = this.script();
      else break;
    }
    if (/^[\^_]$/.test(this.peek())) throw new Malformed("two scripts in one place");
    if (primes) {
      const mark = make("mo", null, primes === "′′" ? "″" : primes === "′′′" ? "‴" : primes);
      sup = sup ? make("mrow", null, mark, sup) : mark;
    }
    if (!sub && !sup) return base;
    if (forced && base.mo) base.mo.setAttribute("movablelimits", "false");
    const [under, over, both] = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    const parts = [base.node, sub, sup].filter(Boolean);
    return { ...base, node: make(sub && sup ? both : sub ? under : over, null, ...parts) };
  }

  // ---- atoms ----

  atom(single) {
    const token = this.take();
    if (token === "{") {
      this.at--;
      return this.group();
    }
    if (/^[0-9]$/.test(token) || (token === "." && /[0-9]/.test(this.text[this.at] ?? ""))) return this.number(token, single);
    if (token.startsWith("\\")) return this.command(token);
    if (token === "~") return atom(space(0.25), "space");
    if (token === "" || /[}&^_#$]/.test(token)) throw new Malformed(`unexpected ${token || "end"}`);
    if (CHARACTERS.has(token)) return this.symbol(...CHARACTERS.get(token));
    if (/\p{M}/u.test(token)) throw new Malformed("a mark without a letter");
    if (this.font && /[A-Za-z]/.test(token) && !single) return this.word(token);
    if (/\p{N}/u.test(token)) return atom(make("mn", null, token));
    return /\p{L}/u.test(token) ? this.letter(token) : operator(token, "ord", { lspace: 0, rspace: 0 });
  }

  number(token, single) {
    let digits = token;
    while (!single && /^(?:[0-9]|\.(?=[0-9]))/.test(this.text.slice(this.at, this.at + 2))) digits += this.text[this.at++];
    return atom(make("mn", null, Array.from(digits, (c) => inFont(c, this.font)).join("")));
  }

  letter(c, upright) {
    const shown = inFont(c, this.font);
    const plain = this.font === "rm" || (upright && shown === c) || (this.font && shown === c && /[A-Za-z]/.test(c));
    return atom(make("mi", { mathvariant: plain ? "normal" : null }, shown));
  }

  /** Letters side by side in a chosen font are one word. */
  word(first) {
    let word = first;
    while (/[A-Za-z]/.test(this.text[this.at] ?? "")) word += this.text[this.at++];
    if (word.length === 1) return this.letter(word);
    return atom(make("mi", null, Array.from(word, (c) => inFont(c, this.font)).join("")));
  }

  symbol(text, kind) {
    switch (kind) {
      case "letter":
        return this.letter(text);
      case "upright":
        return this.letter(text, true);
      case "sum":
        return operator(text, "op", null, { limits: true });
      case "integral":
        return operator(text, "op");
      case "open":
        return operator(text, kind, { form: "prefix", stretchy: "false" });
      case "close":
        return operator(text, kind, /[!?]/.test(text) ? null : { form: "postfix", stretchy: "false" });
      case "ord":
        return operator(text, kind, { lspace: 0, rspace: 0, stretchy: /[|‖/\\]/.test(text) ? "false" : null });
      default:
        return operator(text, kind, /[∣∥↑↓↕⇑⇓⇕→←↔⇒⇐⇔⟶⟵⟷⟹⟸⟺↦⟼⇌⇋⇀⇁↼↽↪↩]/.test(text) ? { stretchy: "false" } : null);
    }
  }

  command(token) {
    const name = token.slice(1);
    if (SPACES.has(name)) return atom(space(SPACES.get(name)), "space");
    if (/^\s$/.test(name)) return atom(space(SPACES.get(" ")), "space");
    if (SYMBOLS.has(name)) return this.symbol(...SYMBOLS.get(name));
    if (FUNCTIONS.has(name)) return atom(make("mi", null, name), "op", { named: true });
    if (LIMITS.has(name)) return this.limit(LIMITS.get(name));
    if (ACCENTS.has(name)) return this.accent(...ACCENTS.get(name));
    if (LONG_ARROWS.has(name)) return this.longArrow(LONG_ARROWS.get(name));
    if (FONTS.has(name)) return this.inFont(FONTS.get(name));
    if (SIZES.has(token)) return this.sized(token);
    for (const [names, read] of COMMANDS) {
      if (Object.hasOwn(names, name)) return read(this, names[name], name);
    }
    throw new Malformed(`unknown ${token}`);
  }

  limit(text) {
    const mo = make("mo", { movablelimits: "true", lspace: 0, rspace: 0 }, text.replace(" ", "\u2009"));
    return atom(mo, "op", { mo, limits: true, named: true });
  }

  inFont(font) {
    return this.within(() => {
      this.font = font;
      const one = this.argument();
      return { ...one, kind: "ord" };
    });
  }

  accent(character, stretches, below) {
    const { node } = this.argument();
    const mark = make("mo", { stretchy: String(Boolean(stretches)) }, character);
    const made = below ? make("munder", { accentunder: "true" }, node, mark) : make("mover", { accent: "true" }, node, mark);
    return /[⏞⏟⎴⎵⏜⏝]/.test(character) ? atom(made, "op", { limits: true }) : atom(made);
  }

  longArrow(character) {
    const label = (node) => make("mrow", null, space(0.4), node, space(0.4));
    const below = this.optional();
    const above = this.script();
    const arrow = make("mo", { stretchy: "true", lspace: 0, rspace: 0 }, character);
    if (!below) return atom(make("mover", null, arrow, label(above)), "rel");
    return atom(make("munderover", null, arrow, label(below), label(above)), "rel");
  }

  delimiter() {
    const token = this.take();
    if (!DELIMITERS.has(token)) throw new Malformed(`${token || "nothing"} is no delimiter`);
    return DELIMITERS.get(token);
  }

  sized(token) {
    const size = em(SIZES.get(token));
    const text = this.delimiter();
    const kind = token.endsWith("l") ? "open" : token.endsWith("r") ? "close" : token.endsWith("m") ? "rel" : "ord";
    const form = kind === "close" ? "postfix" : "prefix";
    return atom(fence(text, form, { minsize: size, maxsize: size, lspace: 0, rspace: 0 }), kind);
  }

  fenced() {
    return this.within(() => {
      const parts = [];
      const side = (form) => {
        const text = this.delimiter();
        if (text) parts.push(fence(text, form, form === "infix" ? { lspace: em(THIN), rspace: em(THIN) } : null));
      };
      side("prefix");
      for (;;) {
        parts.push(...spaced(this.atoms((token) => token === "\\right" || token === "\\middle"), { tight: this.tight }));
        if (!this.takes("\\middle")) break;
        side("infix");
      }
      this.expect("\\right");
      side("postfix");
      return atom(make("mrow", null, ...parts));
    });
  }

  fraction(above, below, { bare, display, open, close } = {}) {
    let node = make("mfrac", { linethickness: bare ? 0 : null }, above, below);
    if (typeof display === "boolean") node = make("mstyle", { displaystyle: display, scriptlevel: 0 }, node);
    if (!open) return atom(node);
    return atom(make("mrow", null, fence(open, "prefix"), node, fence(close, "postfix")));
  }

  negated() {
    const one = this.argument();
    if (!one.mo || one.mo.childElementCount) throw new Malformed("nothing to negate");
    const text = one.mo.textContent;
    one.mo.textContent = NEGATED.get(text) ?? `${text}\u0338`;
    return one.inner ? { ...one, kind: one.inner.kind } : one;
  }

  /** \text{…}: words, and formulas between dollars. */
  words(style) {
    const source = this.raw();
    const nodes = [];
    const say = (text) => text && nodes.push(make("mtext", { class: style || null }, text.replace(/\s+/g, "\u00a0")));
    let from = 0;
    let said = "";
    const part = /\\([&%$#_{} ])|\$((?:\\[^]|[^\\$])+)\$|\\([a-z]+)(?=\{)|[\\$]|[{}~]/g;
    for (let m; (m = part.exec(source)); ) {
      said += source.slice(from, m.index);
      from = part.lastIndex;
      const [whole, escaped, formula, command] = m;
      if (escaped) said += escaped;
      else if (whole === "~") said += " ";
      else if (whole === "\\" || whole === "$") throw new Malformed("not for text");
      else if (formula || command) {
        say(said);
        said = "";
        const inner = new Parser(formula ?? source.slice(m.index));
        inner.depth = this.depth + 1;
        if (formula) nodes.push(...spaced(inner.whole()));
        else if (Object.hasOwn(TEXTS, command)) nodes.push((inner.take(), inner.words(TEXTS[command] || style).node));
        else throw new Malformed(`unknown \\${command}`);
        if (command) from = part.lastIndex = m.index + inner.at;
      }
    }
    say(said + source.slice(from));
    return atom(nodes.length === 1 ? nodes[0] : make("mrow", null, ...nodes));
  }

  // ---- tables ----

  cell(continues) {
    const list = this.atoms((token) => token === "&" || token === "\\\\" || token === "\\cr" || token === "\\end");
    return spaced(list, { after: continues ? "ord" : undefined });
  }

  /** Rows up to \end or the end of the text; align: the columns' alignments, in turn. */
  table(align, rules = []) {
    const rows = [];
    for (let more = true; more; ) {
      const line = this.takes("\\hline") ? "ruled" : null;
      const cells = [];
      do {
        const column = cells.length;
        const side = align[column % align.length];
        const content = this.cell(align === "rl" && column % 2 === 1);
        const classes = [side === "c" ? "" : side, rules[column] ? "bar" : ""].filter(Boolean).join(" ");
        cells.push(make("mtd", { class: classes || null }, ...content));
      } while (this.takes("&"));
      more = this.takes("\\\\") || this.takes("\\cr");
      if (more && this.text[this.at] === "[") this.raw("[", "]");
      const empty = cells.length === 1 && !cells[0].hasChildNodes();
      if (more || !empty || !rows.length) rows.push(make("mtr", { class: line }, ...cells));
      else if (line) rows.at(-1).setAttribute("class", `${rows.at(-1).getAttribute("class") ?? ""} ended`.trim());
    }
    return rows;
  }

  environment() {
    return this.within(() => {
      const full = this.raw();
      const name = full.replace(/\*$/, "");
      if (!ENVIRONMENTS.has(name)) throw new Malformed(`unknown environment ${full}`);
      const { open, close, columns, display, small, spec } = ENVIRONMENTS.get(name);
      this.font = "";
      this.tight = false;
      let sides = columns;
      let rules = [];
      const given = spec ? this.raw() : open !== undefined && this.peek() === "[" ? this.raw("[", "]") : "";
      if (name === "array" || (given && !spec)) {
        const wanted = given.replace(/@\{[^}]*\}|\s/g, "");
        if (/[^lcr|]/.test(wanted)) throw new Malformed("unknown columns");
        sides = wanted.replaceAll("|", "") || "c";
        rules = [...wanted.matchAll(/[lcr]/g)].map(({ index }) => wanted[index + 1] === "|");
      }
      const rows = this.table(sides, rules);
      this.expect("\\end");
      if (this.raw() !== full) throw new Malformed(`${full} does not end`);
      const attributes = { class: columns === "rl" ? "aligned" : null, displaystyle: display, scriptlevel: small ? 1 : null };
      const grid = make("mtable", attributes, ...rows);
      if (!open && !close) return atom(grid);
      const fences = [open && fence(open, "prefix"), close && fence(close, "postfix")];
      return atom(make("mrow", null, ...[fences[0], grid, fences[1]].filter(Boolean)));
    });
  }

  /** All of the text. Lines without an environment are lines all the same. */
  whole() {
    const from = this.at;
    const list = this.atoms((token) => token === "&" || token === "\\\\");
    if (!this.peek()) return list;
    this.at = from;
    const rows = this.table(/(?<!\\)&/.test(this.text) ? "rl" : "c");
    if (this.peek()) throw new Malformed(`unexpected ${this.peek()}`);
    return [atom(make("mtable", { displaystyle: "true", class: "aligned" }, ...rows))];
  }
}

const stacked = (p, name) => {
  const mark = p.script();
  const one = p.argument();
  const heart = one.inner ?? one;
  return atom(make(name, null, one.node, mark), heart.kind, { mo: heart.mo });
};

/** [{command: its data}, (parser, data, command) → atom] */
const COMMANDS = [
  [FRACTIONS, (p, [display, open, close]) => {
    const [above, below] = [p.argument().node, p.argument().node];
    return p.fraction(above, below, { display, open, close, bare: Boolean(open) });
  }],
  [TEXTS, (p, style) => p.words(style)],
  [BOXES, (p, kind) => atom(make("mrow", { class: kind }, p.argument().node))],
  [PHANTOMS, (p, size) => {
    const hidden = make("mphantom", null, p.argument().node);
    return atom(Object.keys(size).length ? make("mpadded", size, hidden) : hidden);
  }],
  [BRACKETS, (p, [open, close]) => atom(make("mrow", null, fence(open, "prefix"), p.argument().node, fence(close, "postfix")))],
  [CLASSES, (p, kind) => {
    const one = p.argument();
    return { ...one, kind, mo: one.inner?.mo };
  }],
  [{ sqrt: 0 }, (p) => {
    const index = p.optional();
    const { node } = p.argument();
    return atom(index ? make("mroot", null, node, index) : make("msqrt", null, node));
  }],
  [{ left: 0 }, (p) => p.fenced()],
  [{ begin: 0 }, (p) => p.environment()],
  [{ not: 0 }, (p) => p.negated()],
  [{ overset: "mover", stackrel: "mover", underset: "munder" }, (p, name) => stacked(p, name)],
  [{ operatorname: 0, mathop: 0 }, (p, _, name) => {
    const below = p.text[p.at] === "*" && Boolean(++p.at);
    const { node } = name === "mathop" ? p.argument() : p.inFont("rm");
    const text = node.localName === "mrow" && ![...node.children].some((n) => n.children.length)
      ? Array.from(node.children, (n) => (n.localName === "mspace" ? "\u2009" : n.textContent)).join("") : node.textContent;
    if (below) return p.limit(text);
    return name === "mathop" ? atom(node, "op", { limits: true, named: true }) : atom(make("mi", null, text), "op", { named: true });
  }],
  [{ substack: 0 }, (p) => {
    const inner = new Parser(p.raw());
    inner.depth = p.depth + 1;
    inner.tight = true;
    const rows = inner.table("c");
    if (inner.peek()) throw new Malformed("unexpected end of lines");
    return atom(make("mtable", { class: "stacked" }, ...rows));
  }],
  [{ pmod: "(", mod: "", bmod: null }, (p, open) => {
    if (open === null) return operator("mod", "bin", { lspace: "0.2222em", rspace: "0.2222em" });
    const { node } = p.argument();
    const inside = [make("mi", null, "mod"), space(1 / 3), node];
    if (open) inside.unshift(make("mo", { form: "prefix", stretchy: "false" }, "(")) && inside.push(make("mo", { form: "postfix", stretchy: "false" }, ")"));
    return atom(make("mrow", null, space(1), ...inside));
  }],
  [{ tag: 0 }, (p) => {
    const starred = p.takes("*");
    const { node } = p.words("");
    const mark = (text) => make("mtext", null, text);
    return atom(starred ? make("mrow", null, space(2), node) : make("mrow", null, space(2), mark("("), node, mark(")")), "space");
  }],
  [{ label: 0, color: 0 }, (p) => (p.raw(), atom(make("mrow"), "space"))],
  [{ nonumber: 0, notag: 0, allowbreak: 0, relax: 0 }, () => atom(make("mrow"), "space")],
  [{ textcolor: 0 }, (p) => (p.raw(), p.argument())],
  [{ hspace: 0, mspace: 0 }, (p) => {
    p.takes("*");
    const [, n, unit] = /^\s*(-?\d*\.?\d+)\s*(em|ex|mu|pt|cm|mm|px)\s*$/.exec(p.raw()) ?? [];
    if (!unit) throw new Malformed("no width");
    return atom(space(Math.max(-5, Math.min(20, Number(n) * { em: 1, ex: 0.43, mu: 1 / 18, pt: 0.1, cm: 2.8, mm: 0.28, px: 0.06 }[unit]))), "space");
  }],
]; // prettier-ignore

/** A <math> element; null: not understood, so the source should be shown. */
export function mathml(text, display) {
  if (text.length > LONGEST || !text.trim()) return null;
  try {
    const list = new Parser(text).whole();
    return make("math", { display: display ? "block" : null }, ...spaced(list));
  } catch (error) {
    if (error instanceof Malformed) return null;
    throw error;
  }
}
