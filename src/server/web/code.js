// code.js - colors for code: what is a comment, a string, a number, a keyword.
//
// A line is cut into tokens by one expression per language. What goes on over lines, comments and
// long strings, is the mode that a line leaves to the next. Text stays text in any case.

import { el } from "./dom.js";

const words = (text) => new Set(text.split(" "));
const C_WORDS = "auto break case const continue default do else enum extern for goto if inline return sizeof static struct switch typedef union volatile while";
const C_TYPES = "void char short int long float double signed unsigned bool size_t ssize_t int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t uintptr_t FILE";
const JS_WORDS = "async await break case catch class const continue debugger default delete do else export extends finally for from function get if import in instanceof let new of return set static super switch this throw try typeof var void while with yield";

// Pieces of the expressions. A string ends with its line where its language wants that.
const DOUBLE = String.raw`"(?:\\.|[^"\\])*"?`;
const SINGLE = String.raw`'(?:\\.|[^'\\])*'?`;
const SLASHES = "//.*";
const HASH = "#.*";
const CLOSED = `"(?:\\\\.|[^"\\\\])*"|'[^']*'`; // where an apostrophe may stand alone
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_']+|0[bB][01_]+|\d[\d_']*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)[a-zA-Z]*`;
const NAME = String.raw`[A-Za-z_$][\w$]*`;

/** over: [begin, end, kind] of what goes on over lines; strings, comments: one line's. */
const language = (keywords, types, { comments = SLASHES, strings = `${DOUBLE}|${SINGLE}`, over = [["/*", "*/", "comment"]], name = NAME, other = "", folds = false } = {}) => ({
  keywords: words(keywords), types: words(types), over, folds, comments, strings, name, other,
}); // prettier-ignore

const TICKS = ["`", "`", "string"];
const C = language(C_WORDS, C_TYPES, { other: String.raw`^\s*#\s*\w+` });
const JS = language(JS_WORDS, "true false null undefined NaN Infinity Array Object String Number Boolean Map Set Promise Error Math JSON", {
  over: [["/*", "*/", "comment"], TICKS],
}); // prettier-ignore
const SHELL = language(
  "if then else elif fi for in do done while until case esac function return local export readonly declare set unset shift exit trap source",
  "true false echo printf cd test read eval exec",
  { comments: String.raw`(?<![\w$\\{])#.*`, over: [], other: String.raw`\$(?:\{[^}]*\}|\w+|[@#?*!$-])|(?<=\s)--?[A-Za-z][\w-]*` },
); // prettier-ignore

const LANGUAGES = {
  c: C,
  cpp: language(
    `${C_WORDS} alignas alignof and class concept consteval constexpr co_await co_return co_yield decltype delete explicit export final friend mutable namespace new noexcept not operator or override private protected public requires static_assert template this throw try catch typename using virtual __global__ __device__ __host__ __shared__ __restrict__`,
    `${C_TYPES} string vector map set pair tuple optional unique_ptr shared_ptr std nullptr true false auto half float4 dim3`,
    { other: String.raw`^\s*#\s*\w+` },
  ),
  js: JS,
  ts: { ...JS, keywords: words(`${JS_WORDS} abstract as declare enum implements interface is keyof namespace private protected public readonly satisfies type`), types: words("string number boolean any unknown never void object true false null undefined Array Record Partial Promise Map Set") },
  java: language(
    "abstract assert break case catch class continue default do else enum extends final finally for if implements import instanceof interface native new package private protected public record return sealed static super switch synchronized this throw throws transient try var volatile while yield",
    "boolean byte char double float int long short void String Integer Long Double Boolean Object List Map Set true false null",
    { other: String.raw`@\w+` },
  ),
  csharp: language(
    "abstract as async await base break case catch class const continue default delegate do else enum event explicit extern finally fixed for foreach get if implicit in init interface internal is lock namespace new operator out override params private protected public readonly record ref return sealed set static struct switch this throw try using var virtual when where while yield",
    "bool byte char decimal double dynamic float int long object sbyte short string uint ulong ushort void true false null List Dictionary Task",
  ),
  go: language(
    "break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var",
    "bool byte complex128 error float32 float64 int int8 int16 int32 int64 rune string uint uint8 uint16 uint32 uint64 any true false nil iota append cap len make new panic",
    { over: [["/*", "*/", "comment"], TICKS] },
  ),
  rust: language(
    "as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return self static struct super trait type unsafe use where while",
    "bool char f32 f64 i8 i16 i32 i64 i128 isize str u8 u16 u32 u64 u128 usize String Vec Option Result Box Self Some None Ok Err true false",
    { strings: String.raw`${DOUBLE}|'(?:\\.[^']*|[^\\'])'`, other: String.raw`#!?\[[^\]]*\]|\b\w+!(?=[\s({\[])|'[a-z]\w*` },
  ),
  swift: language(
    "as associatedtype break case catch class continue default defer deinit do else enum extension fallthrough for func guard if import in init inout is lazy let mutating operator override private protocol public repeat return self static struct subscript super switch throw throws try var weak where while async await",
    "Any Bool Character Double Float Int String UInt Void Array Dictionary Set Optional true false nil",
    { over: [["/*", "*/", "comment"], ['"""', '"""', "string"]], other: String.raw`@\w+` },
  ), // prettier-ignore
  kotlin: language(
    "abstract as break by catch class companion const constructor continue data do else enum final finally for fun if import in init inline interface internal is lateinit object open operator override package private protected public return sealed super suspend this throw try typealias val var when where while",
    "Any Boolean Byte Char Double Float Int Long Short String Unit List Map Set Array true false null",
    { over: [["/*", "*/", "comment"], ['"""', '"""', "string"]], other: String.raw`@\w+` },
  ), // prettier-ignore
  php: language(
    "abstract and array as break case catch class clone const continue declare default do echo else elseif empty extends final finally fn for foreach function global if implements include instanceof interface isset match namespace new or private protected public readonly require return static switch throw trait try unset use var while yield",
    "bool float int string void mixed object self parent true false null",
    { comments: "//.*|#(?!\\[).*", other: "<\\?(?:php)?|\\?>" },
  ),
  python: language(
    "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield",
    "True False None self cls int float str bool bytes list dict set tuple object type range len print open enumerate zip map filter sum min max sorted super isinstance Exception ValueError TypeError KeyError",
    { comments: HASH, over: [['"""', '"""', "string"], ["'''", "'''", "string"]], strings: `[rRbBfFuU]{0,2}(?:${DOUBLE}|${SINGLE})`, other: String.raw`^\s*@[\w.]+` },
  ), // prettier-ignore
  ruby: language(
    "alias and begin break case class def defined? do else elsif end ensure for if in module next not or redo require rescue retry return self super then undef unless until when while yield attr_accessor attr_reader include",
    "true false nil puts print Array Hash String Integer Float",
    { comments: HASH, over: [["=begin", "=end", "comment"]], other: String.raw`:[A-Za-z_]\w*|@{1,2}\w+` },
  ),
  lua: language("and break do else elseif end for function goto if in local not or repeat return then until while", "true false nil self string table math print pairs ipairs", {
    comments: "--(?!\\[\\[).*", over: [["--[[", "]]", "comment"], ["[[", "]]", "string"]],
  }), // prettier-ignore
  shell: SHELL,
  makefile: language("ifeq ifneq ifdef ifndef else endif include define endef export override", "", {
    comments: String.raw`(?<!\\)#.*`, over: [], other: String.raw`\$[({][^)}]*[)}]|\$[@<^*?]|^[\w./%-]+(?=\s*:)`,
  }), // prettier-ignore
  sql: language(
    "add all alter and any as asc begin between by cascade case check column commit constraint create cross cte default delete desc distinct drop else end exists explain foreign from full group having if in index inner insert intersect into is join key left like limit not null offset on or order outer over partition primary references returning right rollback select set table then union unique update using values view when where with",
    "bigint blob boolean char date decimal double float int integer json numeric real serial smallint text time timestamp uuid varchar avg coalesce count max min sum true false",
    { comments: "--.*", folds: true },
  ),
  json: language("", "true false null", { comments: SLASHES, strings: DOUBLE, other: String.raw`"(?:\\.|[^"\\])*"(?=\s*:)` }),
  yaml: language("", "true false null yes no on off", { strings: CLOSED, comments: String.raw`(?<![^\s])#.*`, over: [], other: String.raw`^\s*(?:- )*[\w./-]+(?=\s*:(?:\s|$))|^---|[&*][\w-]+` }),
  ini: language("", "true false", { strings: CLOSED, comments: "[#;].*", over: [], other: String.raw`^\s*\[{1,2}[^\]]*\]{1,2}|^\s*[\w.-]+(?=\s*=)` }),
  css: language("", "inherit initial unset none auto important", {
    comments: "(?!)", other: String.raw`[\w-]+(?=\s*:)|@[\w-]+|--[\w-]+|\.[A-Za-z][\w-]*|#[\da-fA-F]{3,8}\b|#[A-Za-z][\w-]*`, name: String.raw`[A-Za-z][\w-]*`,
  }), // prettier-ignore
  html: language("", "", { comments: "(?!)", strings: `"[^"<>]*"|'[^'<>]*'(?=[\\s>/])`, over: [["<!--", "-->", "comment"]], other: String.raw`</?[A-Za-z][\w:-]*|/?>|\b[A-Za-z_:@][\w:.-]*(?==)|&#?\w+;` }),
  diff: language("", "", { comments: "^(?:diff|index|---|\\+\\+\\+|@@).*", strings: String.raw`^\+.*`, over: [], other: "^-.*", name: "(?!)" }),
}; // prettier-ignore

const NAMES = {
  h: "c", "c++": "cpp", cc: "cpp", cxx: "cpp", hpp: "cpp", cuda: "cpp", cu: "cpp", javascript: "js", jsx: "js", mjs: "js", node: "js",
  typescript: "ts", tsx: "ts", cs: "csharp", "c#": "csharp", golang: "go", rs: "rust", kt: "kotlin", py: "python", python3: "python",
  rb: "ruby", sh: "shell", bash: "shell", zsh: "shell", console: "shell", dockerfile: "shell", make: "makefile", jsonc: "json", json5: "json",
  jsonl: "json", yml: "yaml", toml: "ini", cfg: "ini", conf: "ini", properties: "ini", scss: "css", less: "css", xml: "html", svg: "html",
  vue: "html", postgresql: "sql", mysql: "sql", sqlite: "sql", patch: "diff",
}; // prettier-ignore

const escaped = (text) => text.replace(/[\\^$*+?.()|[\]{}]/g, "\\$&");

function compiled(one) {
  one.expression ??= new RegExp(
    [
      `(?<over>${one.over.map(([begin]) => escaped(begin)).join("|") || "(?!)"})`,
      `(?<comment>${one.comments})`,
      `(?<other>${one.other || "(?!)"})`,
      `(?<string>${one.strings})`,
      `(?<number>${NUMBER})`,
      `(?<name>${one.name})(?<call>\\s*\\()?`,
    ].join("|"),
    "g",
  );
  return one.expression;
}

/** The colors of a language, by the name that stands after a fence; null: none are known. */
export function languageOf(name) {
  const given = name.toLowerCase();
  const key = Object.hasOwn(NAMES, given) ? NAMES[given] : given;
  return Object.hasOwn(LANGUAGES, key) ? LANGUAGES[key] : null;
}

const colored = (kind, text) => el("span", { class: `c-${kind}` }, text);

/** [nodes of a line, what goes on in the next]; mode: what went on before it, null at first. */
export function colorLine(one, text, mode) {
  const nodes = [];
  let from = 0;
  const say = (kind, to) => {
    if (to > from) nodes.push(kind ? colored(kind, text.slice(from, to)) : document.createTextNode(text.slice(from, to)));
    from = to;
  };
  /** To the end of what began, which is looked for from a place on; true: it goes on in the next line. */
  const through = ([, end, kind], searched) => {
    const at = text.indexOf(end, searched);
    say(kind, at < 0 ? text.length : at + end.length);
    return at < 0;
  };
  if (mode && through(mode, 0)) return [nodes, mode];
  const expression = compiled(one);
  expression.lastIndex = from;
  for (let m; (m = expression.exec(text)); ) {
    const { over, comment, other, string, number, name, call } = m.groups;
    if (!m[0]) {
      expression.lastIndex++;
      continue;
    }
    say(null, m.index);
    if (over) {
      const long = one.over.find(([begin]) => begin === over);
      if (through(long, m.index + over.length)) return [nodes, long];
    } else if (name) {
      const word = one.folds ? name.toLowerCase() : name;
      const kind = one.keywords.has(word) ? "keyword" : one.types.has(word) ? "type" : call ? "call" : null;
      say(kind, m.index + name.length);
    } else {
      say(comment ? "comment" : other ? "other" : string ? "string" : number ? "number" : null, m.index + m[0].length);
    }
    expression.lastIndex = from;
  }
  say(null, text.length);
  return [nodes, null];
}
