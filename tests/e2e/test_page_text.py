"""What the page makes of a model's text: Markdown, formulas, colors of code; hostile text above all."""

import json

import pytest

from conftest import GOLDEN
from page_fixtures import ask, browser, last_answer, mock, scratch, visit  # noqa: F401
from page_mock import HOSTILE, MARKDOWN

pytestmark = pytest.mark.slow


# ---- Markdown ----


def test_hostile_text_stays_text(mock, visit):  # E13
    page = visit(mock().address)
    ask(page, "hostile")
    assert page.js("document.title") == "hadal"
    allowed = {"P", "A", "STRONG", "CODE"}
    assert set(page.js("[...document.querySelectorAll('.answer .body *')].map(e => e.tagName)")) <= allowed
    links = page.js("[...document.querySelectorAll('.answer .body a')].map(a => [a.href, a.rel, a.target])")
    safe = ["noopener noreferrer", "_blank"]
    assert links == [["https://example.org/track.png", *safe], ["https://example.org/", *safe]]
    assert "<script>" in last_answer(page) and "javascript:" in last_answer(page)


def render(page, text, cuts):
    """The HTML that Markdown makes of text when it comes in pieces of these lengths."""
    return page.js(f"""import('./page/markdown.js').then(({{Markdown}}) => {{
        const root = document.createElement('div'), m = new Markdown(root), text = {json.dumps(text)};
        const cuts = {json.dumps(cuts)};
        for (let at = 0, n = 0; at < text.length; n++) {{
            const to = at + cuts[n % cuts.length];
            m.write(text.slice(at, to));
            at = to;
        }}
        m.end();
        for (const b of root.querySelectorAll('.code-head')) b.remove();
        return root.innerHTML;
    }})""")


@pytest.mark.parametrize("text, html", [
    ("a *b* **c** `d` ~~e~~ _f_ snake_case_name", "<p dir=\"auto\">a <em>b</em> <strong>c</strong> <code>d</code> <del>e</del> <em>f</em> snake_case_name</p>"),
    ("# One\ntext\n\nmore", "<h3>One</h3><p dir=\"auto\">text</p><p dir=\"auto\">more</p>"),
    ("1. a\n2. b\n   - c\n3. d", "<ol data-marker=\".\"><li><p dir=\"auto\">a</p></li><li><p dir=\"auto\">b</p><ul data-marker=\"-\"><li><p dir=\"auto\">c</p></li></ul></li><li><p dir=\"auto\">d</p></li></ol>"),
    ("> a\n> b\n\nc", "<blockquote><p dir=\"auto\">a\nb</p></blockquote><p dir=\"auto\">c</p>"),
    ("```py\nx = *1*\n\n# y\n```\nz", "<div class=\"code\"><pre tabindex=\"0\"><code>x = *<span class=\"c-number\">1</span>*\n\n<span class=\"c-comment\"># y</span>\n</code></pre></div><p dir=\"auto\">z</p>"),
    ("|a|b|\n|-|-|\n|1|`2`|", "<div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table></div>"),
    ("|a|b|c|\n|:-|:-:|--:|\n|1|2|3|", "<div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th class=\"l\">a</th><th class=\"c\">b</th><th class=\"r\">c</th></tr></thead><tbody><tr><td class=\"l\">1</td><td class=\"c\">2</td><td class=\"r\">3</td></tr></tbody></table></div>"),
    ("3 * 4 * 5 = 60 and a | b", "<p dir=\"auto\">3 * 4 * 5 = 60 and a | b</p>"),
    ("https://example.org/a_b.", "<p dir=\"auto\"><a href=\"https://example.org/a_b\" target=\"_blank\" rel=\"noopener noreferrer\">https://example.org/a_b</a>.</p>"),
    ("\\*not\\* &amp; <i>\n---\n**open", "<p dir=\"auto\">*not* &amp;amp; &lt;i&gt;</p><hr><p dir=\"auto\">**open</p>"),
])  # fmt: skip
def test_markdown(scratch, text, html):
    for cuts in ([len(text)], [1], [2], [3, 1], [7]):
        assert render(scratch, text, cuts) == html


def test_markdown_is_the_same_in_any_pieces(scratch):
    for text in (MARKDOWN, HOSTILE, "```\n" + "x" * 3000 + "\n```\n" + "*y* " * 280):
        whole = render(scratch, text, [1 << 30])
        for cuts in ([1], [5, 2, 11], [997]):
            assert render(scratch, text, cuts) == whole


RANDOM_MARKDOWN = """import('./page/markdown.js').then(({Markdown}) => {
  const parts = ['a', 'word ', ' ', '\\n', '\\n\\n', '*', '**', '_', '`', '```', '~~~', '~~', '#', '## ', '> ', '- ', '1. ', '  ',
    '    ', '\\t', '|', '|-|-|', '[', '](', ')', '!', 'https://e.org/', 'javascript:', '<b>', '<script>', '&lt;', '\\\\', '---', '\\u202e', '😀',
    '$', '$$', '\\\\(', '\\\\)', '\\\\[', '\\\\]', 'x^2', '\\\\frac', '{', '}', '_1', '&', '\\\\text{<b>}', '\\\\begin{matrix}', '\\\\end{matrix}', '```js\\n', '"', '/*'];
  let seed = 1;
  const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
  const draw = (text, piece) => {
    const root = document.createElement('div'), m = new Markdown(root);
    for (let at = 0; at < text.length; ) { const n = piece(); m.write(text.slice(at, at + n)); at += n; }
    m.end();
    return root;
  };
  const allowed = new Set(('P A STRONG EM DEL CODE PRE H3 H4 H5 H6 UL OL LI BLOCKQUOTE HR DIV SPAN BUTTON TABLE THEAD TBODY TR TH TD math mi mn mo ' +
    'mtext mspace mrow mfrac msqrt mroot msub msup msubsup munder mover munderover mtable mtr mtd mstyle').split(' '));
  const names = new Set(['dir', 'href', 'rel', 'target', 'class', 'type', 'tabindex', 'start', 'data-marker', 'display', 'mathvariant',
    'form', 'fence', 'stretchy', 'width', 'lspace', 'rspace', 'movablelimits', 'accent', 'displaystyle', 'scriptlevel', 'linethickness']);
  const wrong = [];
  for (let n = 0; n < 1500; n++) {
    const text = Array.from({length: 1 + random(40)}, () => parts[random(parts.length)]).join('');
    const whole = draw(text, () => text.length);
    for (const node of whole.querySelectorAll('*')) {
      if (!allowed.has(node.tagName)) wrong.push([text, node.tagName]);
      for (const {name, value} of node.attributes) {
        if (!names.has(name) || (name === 'href' && !/^https?:/.test(value))) wrong.push([text, name, value]);
      }
    }
    if (draw(text, () => 1 + random(6)).innerHTML !== whole.innerHTML) wrong.push([text, 'pieces matter']);
  }
  return wrong.slice(0, 5);
})"""


def test_random_markup_is_harmless_and_pieces_do_not_matter(scratch):  # E13
    assert scratch.js(RANDOM_MARKDOWN) == []


# ---- formulas ----

# A formula in brief: names as they are, #numbers, :operators (! without space around, ↕ stretched),
# "words", _widths of spaces, 'upright letters; (msup a b) without its m as (sup a b).
NOTATION = """
window.inBrief = (node) => {
  const name = node.localName, text = node.textContent;
  const shown = [...node.attributes].filter((a) => name !== 'mo' || !['form', 'fence', 'stretchy'].includes(a.name));
  const attributes = shown.length ? `[${shown.map((a) => `${a.name}=${a.value}`).join(' ')}]` : '';
  if (name === 'mo') {
    const stretched = node.getAttribute('stretchy') === 'true' ? '↕' : '';
    return `:${text}${stretched}${attributes.replace('[lspace=0 rspace=0]', '!')}`;
  }
  if (name === 'mi') return node.getAttribute('mathvariant') ? `'${text}` : text;
  if (name === 'mn') return `#${text}`;
  if (name === 'mtext') return `"${text}"${attributes}`;
  if (name === 'mspace') return `_${node.getAttribute('width')}`;
  return `(${[name.replace(/^m/, '') + attributes, ...Array.from(node.children, window.inBrief)].join(' ')})`;
};
window.formula = (text) => import('./page/tex.js').then(({mathml}) => {
  const math = mathml(text, true);
  return math && Array.from(math.children, window.inBrief).join(' ');
});
"""

# What is wrong with the elements of a formula that is laid out: children, names, size.
WRONG = """import('./page/tex.js').then(({mathml}) => texts.map((text) => {
  const counts = {mfrac: 2, mroot: 2, msub: 2, msup: 2, munder: 2, mover: 2, msubsup: 3, munderover: 3};
  const parents = {mtr: 'mtable', mtd: 'mtr'};
  const leaves = new Set(['mi', 'mn', 'mo', 'mtext', 'mspace']);
  const math = mathml(text, true);
  const box = document.createElement('div');
  box.append(math);
  document.body.append(box);
  const wrong = [];
  for (const node of math.querySelectorAll('*')) {
    const name = node.localName;
    if (name in counts && node.childElementCount !== counts[name]) wrong.push(`${name} of ${node.childElementCount}`);
    if (name in parents && node.parentNode.localName !== parents[name]) wrong.push(`${name} in ${node.parentNode.localName}`);
    if (leaves.has(name) ? node.childElementCount : [...node.childNodes].some((n) => n.nodeType === 3)) wrong.push(`${name} with ${node.innerHTML}`);
  }
  const {width, height} = math.getBoundingClientRect();
  if (math.querySelector('mi, mn, mtext') && !(width > 2 && height > 2)) wrong.push(`${width} by ${height}`);
  box.remove();
  return [text, wrong];
}).filter(([, wrong]) => wrong.length))"""

FORMULAS = [line.split("\t") for line in (GOLDEN / "formulas.tsv").read_text().splitlines()]


def test_formulas_become_these_elements(scratch):
    assert len(FORMULAS) >= 300
    scratch.js(NOTATION)
    texts = json.dumps([text for text, _ in FORMULAS])
    got = scratch.js(f"Promise.all({texts}.map(window.formula))")
    assert [[text, brief] for (text, _), brief in zip(FORMULAS, got)] == FORMULAS


def test_formulas_are_well_formed_and_can_be_seen(scratch):
    assert scratch.js(f"(texts => {WRONG})({json.dumps([text for text, _ in FORMULAS])})") == []


NOT_FORMULAS = [
    "\\frac{1}", "\\frac{1}{", "{", "}", "x}", "{x", "x^", "x_", "^", "x^1^2", "x_1_2", "\\unknown", "\\unknown{x}", "\\left(", "\\right)",
    "\\left( x", "\\left( x \\right", "\\left x \\right)", "\\begin{matrix}", "\\begin{matrix} a", "\\end{matrix}", "\\begin{what} a \\end{what}",
    "\\begin{matrix} a \\end{pmatrix}", "\\begin", "\\begin{", "\\sqrt", "\\sqrt[3", "\\text{x", "\\text", "\\text{\\alpha}", "\\hat", "$", "a $ b",
    "#", "\\", "\\not", "\\not{", "\\hspace{wide}", "\\begin{array}{lxr} a \\end{array}", "\\operatorname", "\\color", "\\big", "\\big x", "&{",
    "\\href{javascript:alert(1)}{x}", "\\includegraphics{x}", "\\def\\x{\\x\\x}\\x", "\\newcommand{\\a}{\\a\\a}\\a", "\\input{/etc/passwd}",
    "\\constructor", "\\__proto__", "\\toString{x}", "\\begin{constructor} x \\end{constructor}", "{" * 100 + "x" + "}" * 100, "\\sqrt" * 500 + "x",
    "\\left(" * 200, "x" * 5000, "\u0301", "^^^", "___", "\\limits", "\\middle|", " ", "",
]  # fmt: skip


def test_what_is_no_formula_gives_nothing(scratch):
    assert scratch.js(f"import('./page/tex.js').then(t => {json.dumps(NOT_FORMULAS)}.filter(text => t.mathml(text, false) !== null))") == []


RANDOM_FORMULAS = """import('./page/tex.js').then(({mathml}) => {
  const parts = ['x', '1', '+', '=', '^', '_', "'", '{', '}', '&', '\\\\\\\\', ' ', '(', ')', '|', '\\\\frac', '\\\\sqrt', '[', ']', '\\\\left', '\\\\right', '\\\\middle', '.',
    '\\\\begin{matrix}', '\\\\end{matrix}', '\\\\begin{cases}', '\\\\end{cases}', '\\\\begin{array}{c|c}', '\\\\end{array}', '\\\\text{a $b$ <i>}', '\\\\sum', '\\\\int', '\\\\lim', '\\\\limits',
    '\\\\hat', '\\\\mathbf', '\\\\mathrm', '\\\\bf', '\\\\over', '\\\\choose', '\\\\displaystyle', '\\\\not', '\\\\in', '\\\\alpha', '\\\\sin', '\\\\operatorname', '\\\\overset', '\\\\underbrace',
    '\\\\substack', '\\\\hline', '\\\\tag', '\\\\pmod', '\\\\big', '\\\\xrightarrow', '\\\\,', '<script>', '&lt;', '😀', '\\\\x', '~', '%', '#', '$'];
  let seed = 7;
  const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
  const names = new Set(('math mi mn mo mtext mspace mrow mfrac msqrt mroot msub msup msubsup munder mover munderover mtable mtr mtd mstyle mphantom mpadded').split(' '));
  const wrong = [];
  let drawn = 0;
  for (let n = 0; n < 6000; n++) {
    const text = Array.from({length: 1 + random(n % 2 ? 5 : 14)}, () => parts[random(parts.length)]).join('');
    const math = mathml(text, true); // must not throw
    if (!math) continue;
    drawn++;
    for (const node of [math, ...math.querySelectorAll('*')]) if (!names.has(node.localName)) wrong.push([text, node.localName]);
  }
  return [drawn > 500, wrong.slice(0, 5)];
})"""


def test_random_formulas_are_harmless(scratch):
    assert scratch.js(RANDOM_FORMULAS) == [True, []]


@pytest.mark.parametrize("text, formulas", [
    ("It costs $5 and $10.", 0), ("From $5-$10 or US$5 and CA$10", 0), ("$1,000 to $2,500 a month, or 10$ and 20$", 0),
    ("$5 per month or 10$ in all", 0), ("echo $HOME and $PATH or $HOME:$PATH", 0), ("`$x$` and `\\(x\\)`", 0), ("Cost ($) and price ($)", 0),
    ("escaped \\$x\\$", 0), ("$ x $ and $x $ and $ x$", 0), ("$$", 0), ("$$$", 0), ("a $5 note, **two** of them make $10", 0),
    ("$x$", 1), ("$x$ and $y$", 2), ("the $n$th and the $i$-th", 2), ("(where $x > 0$), or \"$y$\"", 2), ("costs $5, where $x = 5$", 1),
    ("\\(x\\) and \\[y\\] and $$z$$", 3), ("**bold $x$** and *slanted $y$*", 2), ("$100$", 1), ("$a*b*c$ and $a_1 b_1$", 2), ("# On $x$", 1), ("- $x$\n- $y$", 2),
    ("> $x$", 1), ("a\n$$\nx\n+ 1\n$$\nb", 1), ("\\[\nx\n\\]", 1), ("1. a\n\n   $$\n   x\n   $$\n2. b", 1), ("> $$\n> x\n> $$\n> b", 1),
    ("$$x$$", 1), ("$$x$$.", 1), ("$$x$$ and $$y$$", 2), ("$$\n\nx\n$$", 1), ("$$x = 1\n+ 2$$", 1), ("其中$x$是", 1),
    ("|a|b|\n|-|-|\n|$|x|$|$y$|", 2), ("|Cost ($)|Price ($)|\n|-|-|\n|$5|$6|", 0), ("$$\nnever\n\nended", 0), ("$$\nx\n```", 0),
])  # fmt: skip
def test_which_dollars_are_formulas(scratch, text, formulas):
    for cuts in ([len(text)], [1], [3, 2]):
        html = render(scratch, text, cuts)
        assert html.count("<math") == formulas, html


def test_a_broken_formula_is_shown_as_it_was_written(scratch):
    for text in ("$\\frac{1}$", "\\(\\what\\)", "$$\\left( x$$", "\\[x^\\]", "$$\n\\what\n$$", "\\[\nx\n", "$$\nnever"):
        shown = scratch.js(f"(d => {{ d.innerHTML = {json.dumps(render(scratch, text, [1]))}; return d.textContent; }})(document.createElement('div'))")
        assert shown.strip() == text.strip()


def test_an_unfinished_formula_is_source_until_it_ends(scratch):
    seen = scratch.js("""import('./page/markdown.js').then(({Markdown}) => {
        const root = document.createElement('div'), m = new Markdown(root), seen = [];
        for (const c of 'So $a_1 + b_1$ and \\\\(c\\\\).\\n\\\\[\\nd\\n\\\\]\\n$$e$$\\n') {
            m.write(c);
            seen.push([root.textContent, root.querySelectorAll('math').length]);
        }
        return seen;
    })""")
    texts = [text for text, _ in seen]
    assert "So $a_1 + b_" in texts and "So $a_1 + b_1" in texts  # no emphasis meanwhile
    counts = [n for _, n in seen]
    assert counts == sorted(counts) and counts[-1] == 4
    assert any("\\(c" in text for text in texts) and any(text.endswith("\\[\nd") for text in texts)


def test_a_long_line_is_cut_outside_of_formulas(scratch):
    text = "word " * 150 + "and $a + b + c + d$ and **bold text** and `code here` " * 20
    html = render(scratch, text, [13])
    assert html.count("<math") == html.count("<strong>") == html.count("<code>") == 20


# ---- colors of code ----


@pytest.mark.parametrize("name, code, html", [
    ("c", "/* a\nb */ int x = 0x1F; // \"c\"", "<comment>/* a</>\n<comment>b */</> <type>int</> x = <number>0x1F</>; <comment>// \"c\"</>\n"),
    ("c", "#include <a.h>\nf(\"\\\"x\", 'y')", "<other>#include</> &lt;a.h&gt;\n<call>f</>(<string>\"\\\"x\"</>, <string>'y'</>)\n"),
    ("cpp", "template <class T> auto f();", "<keyword>template</> &lt;<keyword>class</> T&gt; <keyword>auto</> <call>f</>();\n"),
    ("python", "def f(x):\n  '''a\n  b''' # c\n@d", "<keyword>def</> <call>f</>(x):\n  <string>'''a</>\n<string>  b'''</> <comment># c</>\n<other>@d</>\n"),
    ("js", "const a = `b\n${c}`; // d", "<keyword>const</> a = <string>`b</>\n<string>${c}`</>; <comment>// d</>\n"),
    ("bash", "if [ -n \"$x\" ]; then # y\n  echo $HOME", "<keyword>if</> [ <other>-n</> <string>\"$x\"</> ]; <keyword>then</> <comment># y</>\n  <type>echo</> <other>$HOME</>\n"),
    ("rust", "fn f<'a>() { println!(\"x\"); }", "<keyword>fn</> f&lt;<other>'a</>&gt;() { <other>println!</>(<string>\"x\"</>); }\n"),
    ("go", "func f() error { return nil }", "<keyword>func</> <call>f</>() <type>error</> { <keyword>return</> <type>nil</> }\n"),
    ("json", '{"a": "b", "c": [1.5e3, true]}', '{<other>"a"</>: <string>"b"</>, <other>"c"</>: [<number>1.5e3</>, <type>true</>]}\n'),
    ("sql", "SELECT a FROM b -- c", "<keyword>SELECT</> a <keyword>FROM</> b <comment>-- c</>\n"),
    ("yaml", "a: it's # c\nb: 'x'", "<other>a</>: it's <comment># c</>\n<other>b</>: <string>'x'</>\n"),
    ("html", "<p class=\"a\">it's <!-- b\n--></p>", "<other>&lt;p</> <other>class</>=<string>\"a\"</><other>&gt;</>it's <comment>&lt;!-- b</>\n<comment>--&gt;</><other>&lt;/p</><other>&gt;</>\n"),
    ("css", "a { color: #fff; } /* b */", "a { <other>color</>: <other>#fff</>; } <comment>/* b */</>\n"),
    ("diff", "-old\n+new\n same", "<other>-old</>\n<string>+new</>\n same\n"),
    ("unknown", "if x = 1 # \"y\"", "if x = 1 # \"y\"\n"),
    ("", "if x = 1", "if x = 1\n"),
    ("constructor", "if x", "if x\n"),
])  # fmt: skip
def test_code_is_colored(scratch, name, code, html):
    text = f"```{name}\n{code}\n```\n"
    for cuts in ([len(text)], [1], [7]):
        got = render(scratch, text, cuts)
        inner = got[got.index("<code>") + 6 : got.index("</code>")]
        assert inner.replace('<span class="c-', "<").replace("</span>", "</>").replace('">', ">") == html


def test_colors_change_no_text(scratch):
    names = scratch.js("import('./page/code.js').then(c => ['c', 'cpp', 'js', 'ts', 'java', 'csharp', 'go', 'rust', 'swift', 'kotlin', 'php', 'python', 'ruby', 'lua', "
                       "'shell', 'makefile', 'sql', 'json', 'yaml', 'ini', 'css', 'html', 'diff'].filter(n => c.languageOf(n)))")  # fmt: skip
    assert len(names) == 23
    wrong = scratch.js(f"""import('./page/code.js').then(({{colorLine, languageOf}}) => {{
      const parts = ['"', "'", '`', '/*', '*/', '//', '#', '--', '<!--', '-->', '[[', ']]', 'x', 'if', '(', ' ', '1', '0x', '.', '$', '\\\\', '@', ':', '=', '<', '😀'];
      let seed = 3;
      const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
      const wrong = [];
      for (const name of {json.dumps(names)}) {{
        let mode = null;
        for (let n = 0; n < 200; n++) {{
          const text = Array.from({{length: random(30)}}, () => parts[random(parts.length)]).join('');
          let nodes;
          [nodes, mode] = colorLine(languageOf(name), text, mode);
          if (nodes.map((node) => node.textContent).join('') !== text) wrong.push([name, text]);
        }}
      }}
      return wrong.slice(0, 5);
    }})""")
    assert wrong == []
