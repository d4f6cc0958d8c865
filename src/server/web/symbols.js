// symbols.js - what tex.js knows by name: symbols by their class, functions, accents, alphabets.

const pairs = (text) => text.trim().split(/\s+/);
const table = (text, kind) => {
  const words = pairs(text);
  const out = [];
  for (let n = 0; n < words.length; n += 2) out.push([words[n], [words[n + 1], kind]]);
  return out;
};

/** Name to [character, class]. Classes are those of TeX: letter, ord, bin, rel, op, open, close, punct. */
export const SYMBOLS = new Map([
  ...table(
    `alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ
    varkappa ϰ lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ
    upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω digamma ϝ
    hbar ℏ hslash ℏ ell ℓ imath ı jmath ȷ wp ℘ partial ∂ eth ð`,
    "letter",
  ),
  ...table(
    `Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω nabla ∇ Re ℜ Im ℑ
    aleph ℵ beth ℶ gimel ℷ infty ∞ emptyset ∅ varnothing ∅ top ⊤ bot ⊥ angle ∠ measuredangle ∡ triangle △
    square □ Box □ blacksquare ■ qed ∎ diamond ⋄ Diamond ◊ lozenge ◊ clubsuit ♣ diamondsuit ♢ heartsuit ♡ spadesuit ♠
    flat ♭ natural ♮ sharp ♯ checkmark ✓ degree ° copyright © pounds £ euro € yen ¥ S § P ¶ dag † ddag ‡
    mho ℧ Bbbk 𝕜 complement ∁ prime ′ backprime ‵ AA Å aa å`,
    "upright",
  ),
  ...table(
    `forall ∀ exists ∃ nexists ∄ neg ¬ lnot ¬ ldots … dots … dotsc … dotso … cdots ⋯ dotsb ⋯ dotsm ⋯ dotsi ⋯
    vdots ⋮ ddots ⋱ backslash \\ surd √ % % # # $ $ & & _ _ lbrack [ rbrack ] vert | Vert ‖ | ‖`,
    "ord",
  ),
  ...table(
    `pm ± mp ∓ times × div ÷ cdot ⋅ ast ∗ star ⋆ circ ∘ bullet ∙ cap ∩ cup ∪ sqcap ⊓ sqcup ⊔ vee ∨ lor ∨ wedge ∧
    land ∧ setminus ∖ smallsetminus ∖ wr ≀ oplus ⊕ ominus ⊖ otimes ⊗ oslash ⊘ odot ⊙ dagger † ddagger ‡ amalg ⨿
    uplus ⊎ ltimes ⋉ rtimes ⋊ bowtie ⋈ triangleleft ◃ triangleright ▹ bigtriangleup △ bigtriangledown ▽ bigcirc ◯
    barwedge ⊼ veebar ⊻ curlyvee ⋎ curlywedge ⋏ boxplus ⊞ boxtimes ⊠ dotplus ∔ intercal ⊺ centerdot ⋅ And &`,
    "bin",
  ),
  ...table(
    `leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ lt < gt > ll ≪ gg ≫ lll ⋘ ggg ⋙ leqq ≦ geqq ≧ leqslant ⩽ geqslant ⩾ lesssim ≲
    gtrsim ≳ lessgtr ≶ nleq ≰ ngeq ≱ nless ≮ ngtr ≯ equiv ≡ sim ∼ simeq ≃ nsim ≁ approx ≈ approxeq ≊ cong ≅ ncong ≇
    propto ∝ varpropto ∝ asymp ≍ doteq ≐ triangleq ≜ coloneqq ≔ coloneq ≔ eqqcolon ≕ eqcirc ≖ in ∈ notin ∉ ni ∋
    owns ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ supsetneq ⊋ nsubseteq ⊈ nsupseteq ⊉ sqsubset ⊏
    sqsubseteq ⊑ sqsupset ⊐ sqsupseteq ⊒ prec ≺ succ ≻ preceq ⪯ succeq ⪰ mid ∣ nmid ∤ parallel ∥ nparallel ∦ perp ⟂
    vdash ⊢ dashv ⊣ models ⊨ vDash ⊨ Vdash ⊩ nvdash ⊬ therefore ∴ because ∵ smile ⌣ frown ⌢ between ≬ trianglelefteq ⊴
    trianglerighteq ⊵ vartriangleleft ⊲ vartriangleright ⊳ colon :
    to → rightarrow → gets ← leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹
    impliedby ⟸ iff ⟺ longrightarrow ⟶ longleftarrow ⟵ longleftrightarrow ⟷ Longrightarrow ⟹ Longleftarrow ⟸
    Longleftrightarrow ⟺ mapsto ↦ longmapsto ⟼ hookrightarrow ↪ hookleftarrow ↩ uparrow ↑ downarrow ↓ updownarrow ↕
    Uparrow ⇑ Downarrow ⇓ Updownarrow ⇕ nearrow ↗ searrow ↘ swarrow ↙ nwarrow ↖ rightharpoonup ⇀ rightharpoondown ⇁
    leftharpoonup ↼ leftharpoondown ↽ rightleftharpoons ⇌ leftrightharpoons ⇋ rightleftarrows ⇄ leftrightarrows ⇆
    rightrightarrows ⇉ twoheadrightarrow ↠ rightsquigarrow ⇝ leadsto ⇝ nrightarrow ↛ nleftarrow ↚ nRightarrow ⇏
    nLeftrightarrow ⇎ circlearrowleft ↺ circlearrowright ↻ multimap ⊸ restriction ↾`,
    "rel",
  ),
  ...table(
    `sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigsqcup ⨆ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂ bigodot ⨀
    biguplus ⨄`,
    "sum",
  ),
  ...table("int ∫ iint ∬ iiint ∭ iiiint ⨌ oint ∮ oiint ∯ oiiint ∰ smallint ∫", "integral"),
  ...table("lparen ( { { lbrace { langle ⟨ lceil ⌈ lfloor ⌊ lvert | lVert ‖ lgroup ⟮ llbracket ⟦ ulcorner ⌜", "open"),
  ...table("rparen ) } } rbrace } rangle ⟩ rceil ⌉ rfloor ⌋ rvert | rVert ‖ rgroup ⟯ rrbracket ⟧ urcorner ⌝", "close"),
]);

/** Characters that mean more than themselves. */
export const CHARACTERS = new Map([
  ...table("+ + - − * ∗ × × ÷ ÷ ± ± ∓ ∓ · ⋅ ⋅ ⋅ ∘ ∘ ∧ ∧ ∨ ∨ ∩ ∩ ∪ ∪ ∖ ∖ ⊕ ⊕ ⊗ ⊗ − −", "bin"),
  ...table("= = < < > > : :", "rel"),
  ...table(", , ; ;", "punct"),
  ...table("( ( [ [", "open"),
  ...table(") ) ] ] ! ! ? ?", "close"),
  ...table('| | / / . . @ @ " " ` ‘ % %', "ord"),
]);
for (const [character, kind] of SYMBOLS.values()) {
  if (!CHARACTERS.has(character) && !/[\\{}#$&_%]/.test(character)) CHARACTERS.set(character, [character, kind]);
}

/** Names that stand upright; those of LIMITS carry what is below them. */
export const FUNCTIONS = new Set(
  pairs(`sin cos tan cot sec csc sinh cosh tanh coth sech csch arcsin arccos arctan arccot arg deg dim exp hom ker lg ln
  log sgn tr Tr rank diag erf`),
);
export const LIMITS = new Map(
  pairs("lim max min sup inf det gcd lcm Pr argmax argmin limsup liminf injlim projlim varlimsup varliminf").map((name) => [
    name,
    { argmax: "arg max", argmin: "arg min", limsup: "lim sup", liminf: "lim inf", varlimsup: "lim sup", varliminf: "lim inf" }[
      name
    ] ?? name,
  ]),
);

/** Widths in em. */
export const SPACES = new Map(
  Object.entries({ ",": 3, thinspace: 3, ":": 4, ">": 4, medspace: 4, ";": 5, thickspace: 5, "!": -3, negthinspace: -3, quad: 18, qquad: 36, enspace: 9, " ": 4.5, nobreakspace: 4.5, space: 4.5 }).map(
    ([name, n]) => [name, Number((n / 18).toFixed(4))],
  ),
);

/** Above or below what they take: [character, stretches, below]. */
export const ACCENTS = new Map(
  Object.entries({
    hat: ["^"], check: ["ˇ"], tilde: ["~"], bar: ["¯"], vec: ["→"], dot: ["˙"], ddot: ["¨"], dddot: ["⃛"], acute: ["´"],
    grave: ["`"], breve: ["˘"], mathring: ["˚"], widehat: ["^", true], widetilde: ["~", true], widecheck: ["ˇ", true],
    overrightarrow: ["→", true], overleftarrow: ["←", true], overleftrightarrow: ["↔", true], overbrace: ["⏞", true],
    overparen: ["⏜", true], overbracket: ["⎴", true], underbrace: ["⏟", true, true], underbracket: ["⎵", true, true],
    underparen: ["⏝", true, true], underrightarrow: ["→", true, true], underleftarrow: ["←", true, true],
  }), // prettier-ignore
);

/** Arrows that grow with what stands on them. */
export const LONG_ARROWS = new Map(
  table(
    `xrightarrow → xleftarrow ← xleftrightarrow ↔ xRightarrow ⇒ xLeftarrow ⇐ xLeftrightarrow ⇔ xmapsto ↦
    xhookrightarrow ↪ xrightleftharpoons ⇌ xlongequal =`,
  ).map(([name, [character]]) => [name, character]),
);

/** What \not makes; the rest gets a stroke. */
export const NEGATED = new Map(
  table("= ≠ ∈ ∉ ∋ ∌ ⊂ ⊄ ⊃ ⊅ ⊆ ⊈ ⊇ ⊉ < ≮ > ≯ ≤ ≰ ≥ ≱ ≡ ≢ ∼ ≁ ≈ ≉ ≅ ≇ ∥ ∦ ∣ ∤ ∃ ∄ → ↛ ⇒ ⇏ ⇔ ⇎ ⊢ ⊬ ⊨ ⊭").map(
    ([from, [to]]) => [from, to],
  ),
);

/** Delimiters besides the symbols that open and close: what may follow \left, \right and \big. */
export const DELIMITERS = new Map([
  ...[..."()[]|/"].map((c) => [c, c]),
  ...table("< ⟨ > ⟩ \\| ‖ \\vert | \\Vert ‖ \\backslash \\ \\lbrack [ \\rbrack ] \\uparrow ↑ \\downarrow ↓ \\updownarrow ↕").map(
    ([name, [c]]) => [name, c],
  ),
  ...[...SYMBOLS].filter(([, [, kind]]) => kind === "open" || kind === "close").map(([name, [c]]) => [`\\${name}`, c]),
  [".", ""],
]);

/** Font commands; the values are keys of ALPHABETS, or rm. */
export const FONTS = new Map(
  Object.entries({
    mathrm: "rm", mathnormal: "", mathup: "rm", mathbf: "bf", mathit: "it", mathsf: "sf", mathtt: "tt", mathbb: "bb",
    mathcal: "cal", mathscr: "cal", mathfrak: "frak", boldsymbol: "bm", bm: "bm", symbf: "bf", Bbb: "bb", frak: "frak",
  }), // prettier-ignore
);
/** They hold to the end of the group. */
export const OLD_FONTS = new Map(Object.entries({ rm: "rm", bf: "bf", it: "it", sf: "sf", tt: "tt", cal: "cal" }));

// First of A-Z, of a-z, of 0-9, of Α-Ω, of α-ω in Unicode, and the letters that stand elsewhere.
const ALPHABETS = {
  bf: [0x1d400, 0x1d41a, 0x1d7ce, 0x1d6a8, 0x1d6c2],
  it: [0x1d434, 0x1d44e, 0, 0x1d6e2, 0x1d6fc, "hℎ"],
  bm: [0x1d468, 0x1d482, 0x1d7ce, 0x1d71c, 0x1d736],
  cal: [0x1d49c, 0x1d4b6, 0, 0, 0, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"],
  frak: [0x1d504, 0x1d51e, 0, 0, 0, "CℭHℌIℑRℜZℨ"],
  bb: [0x1d538, 0x1d552, 0x1d7d8, 0, 0, "CℂHℍNℕPℙQℚRℝZℤ"],
  sf: [0x1d5a0, 0x1d5ba, 0x1d7e2],
  tt: [0x1d670, 0x1d68a, 0x1d7f6],
};
const FIRSTS = ["A", "a", "0", "Α", "α"].map((c) => c.codePointAt(0));
const SIZES = [26, 26, 10, 25, 25];

/** A character in a font: itself where the font has none. */
export function inFont(character, font) {
  const alphabet = ALPHABETS[font];
  if (!alphabet) return character;
  const special = alphabet[5]?.indexOf(character) ?? -1;
  if (special >= 0 && special % 2 === 0) return alphabet[5][special + 1];
  const code = character.codePointAt(0);
  const at = FIRSTS.findIndex((first, n) => code >= first && code < first + SIZES[n]);
  return at >= 0 && alphabet[at] ? String.fromCodePoint(alphabet[at] + code - FIRSTS[at]) : character;
}

const matrix = (open, close) => ({ open, close, columns: "c" });

/** Environments: delimiters; columns, their alignments in turn; spec: an argument names them. */
export const ENVIRONMENTS = new Map(
  Object.entries({
    matrix: matrix("", ""), pmatrix: matrix("(", ")"), bmatrix: matrix("[", "]"), Bmatrix: matrix("{", "}"),
    vmatrix: matrix("|", "|"), Vmatrix: matrix("‖", "‖"), smallmatrix: { ...matrix("", ""), small: true },
    cases: { open: "{", close: "", columns: "l" }, dcases: { open: "{", close: "", columns: "l", display: true },
    rcases: { open: "", close: "}", columns: "l" }, array: { columns: "c", spec: true }, subarray: { columns: "c", spec: true },
    ...Object.fromEntries(["aligned", "align", "split", "eqnarray", "flalign"].map((name) => [name, { columns: "rl", display: true }])),
    ...Object.fromEntries(["alignat", "alignedat"].map((name) => [name, { columns: "rl", display: true, spec: true }])),
    ...Object.fromEntries(["gather", "gathered", "equation", "multline", "displaymath", "math"].map((name) => [name, { columns: "c", display: true }])),
  }), // prettier-ignore
);
