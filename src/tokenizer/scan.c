/* scan.c - matches patterns that are runs of character classes, in linear time.
 *
 * A pattern is a list of branches, tried in order; a branch is up to SCAN_MAX_ITEMS greedy
 * runs, at the end perhaps a look at the next character. Code points fall into kinds (those
 * in the same classes); a table gives the kind, and the kind says which branches may start.
 *
 * Linear: after an unbounded run nothing may fail, except when that run leads its branch.
 * Then the places where the rest could go on are the same for every later start in the same
 * run, so one failure settles them all; the search remembers that in dead[]. */
#include "tokenizer/pattern_internal.h"

#include <stdlib.h>
#include <string.h>

enum {
    SCAN_MAX_CLASSES = 32,
    SCAN_MAX_BRANCHES = 32,
    SCAN_MAX_ITEMS = 8,
    SCAN_MAX_KINDS = 255,
    SCAN_MAX_TRIES = 4096, /* assignments of characters to a branch's bounded runs */
    BLOCK = 256,
    N_BLOCKS = TEXT_UNICODE_END / BLOCK,
};

typedef enum item_kind { ITEM_RUN, ITEM_NOT_NEXT, ITEM_LINE_END } item_kind;

typedef struct item {
    item_kind kind;
    uint32_t class_bit; /* of a run, or of the character that must not follow */
    size_t min, max;    /* of a run, in characters */
} item;

typedef struct branch {
    item items[SCAN_MAX_ITEMS];
    int32_t n_items;
    int32_t dead; /* slot in text_search.dead, -1 for none */
} branch;

typedef struct kind {
    uint32_t classes;  /* bit per class that holds these code points */
    uint32_t branches; /* bit per branch that may start with it */
} kind;

struct text_scan {
    branch branches[SCAN_MAX_BRANCHES];
    int32_t n_branches, n_classes, n_dead;
    kind kinds[SCAN_MAX_KINDS];
    int32_t n_kinds;
    uint8_t ascii[128];          /* kind of the first code points */
    uint16_t block_of[N_BLOCKS]; /* index into blocks */
    uint8_t *blocks;             /* [n_blocks, BLOCK] kinds */
    int32_t n_blocks;
};

/* Compiler: the classes, as bit sets until the table is built. */
typedef struct builder {
    text_scan *scan;
    text_charset *classes; /* [SCAN_MAX_CLASSES] */
    bool fits;
} builder;

static inline uint32_t classes_at(const text_scan *s, const uint8_t *text, size_t *at) {
    uint8_t c = text[*at];
    if (c < 0x80) {
        *at += 1;
        return s->kinds[s->ascii[c]].classes;
    }
    uint32_t cp = text_utf8_next(text, at);
    return s->kinds[s->blocks[s->block_of[cp / BLOCK] * BLOCK + cp % BLOCK]].classes;
}

/* Returns the bit of the class that equals `set`, which is added if it is new; 0 if there are
 * too many. */
static uint32_t class_bit(builder *b, const text_charset *set) {
    int32_t n = b->scan->n_classes;
    for (int32_t i = 0; i < n; i++) {
        if (memcmp(&b->classes[i], set, sizeof *set) == 0) return 1u << i;
    }
    if (n == SCAN_MAX_CLASSES) return 0;
    b->classes[n] = *set;
    b->scan->n_classes++;
    return 1u << n;
}

static hd_status read_atom(builder *b, text_reader *r, uint32_t *bit, hd_err *err) {
    text_charset *set = calloc(1, sizeof *set);
    if (!set) return HD_FAIL(err, HD_ENOMEM, "no memory for a character class");
    uint32_t single;
    hd_status st = text_atom_read(r, set, &single, err);
    if (st == HD_OK) *bit = class_bit(b, set);
    free(set);
    return st;
}

static bool at_text(const text_reader *r, const char *word) {
    size_t n = strlen(word);
    return r->n - r->at >= n && memcmp(r->source + r->at, word, n) == 0;
}

/* Parses one item; clears *fits if the scanner does not support the pattern. */
static hd_status read_item(builder *b, text_reader *r, item *out, hd_err *err) {
    *out = (item){.kind = ITEM_RUN};
    if (at_text(r, "$")) {
        r->at++;
        out->kind = ITEM_LINE_END;
        return HD_OK;
    }
    if (at_text(r, "(?!")) {
        out->kind = ITEM_NOT_NEXT;
        r->at += 3;
        if (r->at < r->n && !strchr("()^$|", r->source[r->at])) {
            HD_TRY(read_atom(b, r, &out->class_bit, err));
        }
        b->fits = out->class_bit && at_text(r, ")");
        r->at++;
        return HD_OK;
    }
    if (strchr("()^", r->source[r->at])) {
        b->fits = false;
        return HD_OK;
    }
    HD_TRY(read_atom(b, r, &out->class_bit, err));
    size_t before = r->at;
    HD_TRY(text_repeat_read(r, &out->min, &out->max, err));
    bool repeated = r->at != before;
    b->fits = out->class_bit && !(repeated && (at_text(r, "?") || at_text(r, "+") ||
                                               at_text(r, "*") || at_text(r, "{")));
    return HD_OK;
}

/* Returns whether matching the branch is linear by the rule above, and the branch never matches
 * an empty text. */
static bool branch_is_fine(const branch *b) {
    bool may_fail = false;
    size_t min = 0, tries = 1;
    for (int32_t i = b->n_items - 1; i >= 0; i--) {
        const item *it = &b->items[i];
        if (it->kind != ITEM_RUN) {
            if (i != b->n_items - 1 || i == 0) return false;
            may_fail = true;
            continue;
        }
        if (it->max == SIZE_MAX && may_fail && i > 0) return false;
        if (it->max != SIZE_MAX) tries *= it->max - it->min + 1;
        if (tries > SCAN_MAX_TRIES) return false;
        if (it->min > 0) may_fail = true;
        min += it->min;
    }
    return min > 0;
}

static hd_status read_branches(builder *b, text_reader *r, hd_err *err) {
    text_scan *s = b->scan;
    branch *now = &s->branches[0];
    s->n_branches = 1;
    while (b->fits && r->at < r->n) {
        if (at_text(r, "|")) {
            r->at++;
            if (s->n_branches == SCAN_MAX_BRANCHES) b->fits = false;
            if (b->fits) now = &s->branches[s->n_branches++];
            continue;
        }
        if (now->n_items == SCAN_MAX_ITEMS) {
            b->fits = false;
            break;
        }
        HD_TRY(read_item(b, r, &now->items[now->n_items], err));
        now->n_items += b->fits;
    }
    for (int32_t i = 0; b->fits && i < s->n_branches; i++) {
        branch *br = &s->branches[i];
        b->fits = branch_is_fine(br);
        bool leads = b->fits && br->items[0].max == SIZE_MAX && br->n_items > 1;
        br->dead = -1;
        if (!leads) continue;
        if (s->n_dead == TEXT_SCAN_MAX_LEADING) {
            b->fits = false;
        } else {
            br->dead = s->n_dead++;
        }
    }
    return HD_OK;
}

/* Returns the branches that a character in these classes may start. */
static uint32_t branches_of(const text_scan *s, uint32_t classes) {
    uint32_t set = 0;
    for (int32_t i = 0; i < s->n_branches; i++) {
        const branch *b = &s->branches[i];
        for (int32_t k = 0; k < b->n_items; k++) {
            if (b->items[k].class_bit & classes) set |= 1u << i;
            if (b->items[k].min > 0) break;
        }
    }
    return set;
}

/* Returns the number of the kind with these classes; SCAN_MAX_KINDS if there are too many. */
static int32_t kind_of(text_scan *s, uint32_t classes) {
    int32_t i = 0;
    while (i < s->n_kinds && s->kinds[i].classes != classes) i++;
    if (i == s->n_kinds && i < SCAN_MAX_KINDS) {
        s->kinds[i] = (kind){.classes = classes, .branches = branches_of(s, classes)};
        s->n_kinds++;
    }
    return i;
}

/* Computes the kinds of one block of code points; false if there are too many kinds. */
static bool fill_block(builder *b, int32_t block, uint8_t *out) {
    uint32_t previous = UINT32_MAX, classes = 0;
    int32_t number = 0;
    for (uint32_t i = 0; i < BLOCK; i++) {
        uint32_t cp = (uint32_t)block * BLOCK + i;
        classes = 0;
        for (int32_t c = 0; c < b->scan->n_classes; c++) {
            classes |= (uint32_t)text_charset_has(&b->classes[c], cp) << c;
        }
        if (i == 0 || classes != previous) number = kind_of(b->scan, classes);
        if (number == SCAN_MAX_KINDS) return false;
        previous = classes;
        out[i] = (uint8_t)number;
    }
    return true;
}

/* Returns whether each class has all or none of the block, and which have all. */
static bool uniform_block(const builder *b, int32_t block, uint32_t *classes) {
    *classes = 0;
    for (int32_t c = 0; c < b->scan->n_classes; c++) {
        const uint64_t *w = &b->classes[c].bits[block * (BLOCK / 64)];
        if (w[0] != 0 && w[0] != UINT64_MAX) return false;
        for (int32_t k = 1; k < BLOCK / 64; k++) {
            if (w[k] != w[0]) return false;
        }
        *classes |= (uint32_t)(w[0] & 1) << c;
    }
    return true;
}

static hd_status build_table(builder *b, hd_err *err) {
    text_scan *s = b->scan;
    uint8_t *blocks = malloc((size_t)N_BLOCKS * BLOCK);
    if (!blocks) return HD_FAIL(err, HD_ENOMEM, "no memory for a pattern");
    int32_t uniform_of[SCAN_MAX_KINDS];
    for (int32_t i = 0; i < SCAN_MAX_KINDS; i++) uniform_of[i] = -1;
    for (int32_t block = 0; b->fits && block < N_BLOCKS; block++) {
        uint32_t classes;
        int32_t number = SCAN_MAX_KINDS;
        if (uniform_block(b, block, &classes)) {
            number = kind_of(s, classes);
            if (number < SCAN_MAX_KINDS && uniform_of[number] >= 0) {
                s->block_of[block] = (uint16_t)uniform_of[number];
                continue;
            }
        }
        b->fits = fill_block(b, block, blocks + (size_t)s->n_blocks * BLOCK);
        if (number < SCAN_MAX_KINDS) uniform_of[number] = s->n_blocks;
        s->block_of[block] = (uint16_t)s->n_blocks++;
    }
    memcpy(s->ascii, blocks + s->block_of[0] * BLOCK, sizeof s->ascii);
    uint8_t *smaller = realloc(blocks, (size_t)s->n_blocks * BLOCK);
    s->blocks = smaller ? smaller : blocks;
    return HD_OK;
}

static hd_status builder_open(builder *b, hd_err *err) {
    *b = (builder){.fits = true};
    b->scan = calloc(1, sizeof *b->scan);
    b->classes = malloc(SCAN_MAX_CLASSES * sizeof *b->classes);
    if (b->scan && b->classes) return HD_OK;
    free(b->scan);
    free(b->classes);
    return HD_FAIL(err, HD_ENOMEM, "no memory for a pattern");
}

static hd_status builder_finish(text_scan **out, builder *b, hd_status st, hd_err *err) {
    if (st == HD_OK && b->fits) st = build_table(b, err);
    free(b->classes);
    if (st == HD_OK && b->fits) {
        *out = b->scan;
    } else {
        text_scan_close(b->scan);
    }
    return st;
}

hd_status text_scan_open(text_scan **out, const char *source, size_t n, hd_err *err) {
    builder b;
    text_reader r = {.source = source, .n = n};
    *out = NULL;
    HD_TRY(builder_open(&b, err));
    return builder_finish(out, &b, read_branches(&b, &r, err), err);
}

hd_status text_scan_open_class(text_scan **out, const text_charset *set, bool single,
                               hd_err *err) {
    builder b;
    *out = NULL;
    HD_TRY(builder_open(&b, err));
    b.scan->n_branches = 1;
    b.scan->branches[0] = (branch){.n_items = 1, .dead = -1};
    b.scan->branches[0].items[0] = (item){.kind = ITEM_RUN,
                                          .class_bit = class_bit(&b, set),
                                          .min = 1,
                                          .max = single ? 1 : SIZE_MAX};
    return builder_finish(out, &b, HD_OK, err);
}

void text_scan_close(text_scan *s) {
    if (!s) return;
    free(s->blocks);
    free(s);
}

/* Advances *at over at most max characters of the class; returns how many. */
static size_t take_run(const text_scan *s, const uint8_t *text, size_t n, size_t *at,
                       uint32_t bit, size_t max) {
    size_t count = 0, here = *at;
    while (count < max && here < n) {
        size_t next = here;
        if (!(classes_at(s, text, &next) & bit)) break;
        here = next;
        count++;
    }
    *at = here;
    return count;
}

static bool assertion_holds(const text_scan *s, const item *it, const uint8_t *text, size_t n,
                            size_t at) {
    if (at >= n) return true;
    if (it->kind == ITEM_LINE_END) return text[at] == '\n';
    return !(classes_at(s, text, &at) & it->class_bit);
}

/* Matches the branch at `first` with backtracking over its few items. run_end: the longest end
 * of the first item's run. */
static bool match_branch(const text_scan *s, const branch *b, const uint8_t *text, size_t n,
                         size_t first, size_t *end, size_t *run_end) {
    size_t ends[SCAN_MAX_ITEMS] = {0}, counts[SCAN_MAX_ITEMS] = {0};
    size_t at = first;
    int32_t i = 0;
    while (i < b->n_items) {
        const item *it = &b->items[i];
        bool fine;
        if (it->kind == ITEM_RUN) {
            counts[i] = take_run(s, text, n, &at, it->class_bit, it->max);
            ends[i] = at;
            if (i == 0) *run_end = at;
            fine = counts[i] >= it->min;
        } else {
            fine = assertion_holds(s, it, text, n, at);
        }
        while (!fine) { /* gives back one character of the nearest run that can spare one */
            if (--i < 0) return false;
            if (b->items[i].kind != ITEM_RUN || counts[i] <= b->items[i].min) continue;
            counts[i]--;
            at = ends[i] = text_utf8_back(text, ends[i]);
            fine = true;
        }
        i++;
    }
    *end = at;
    return true;
}

bool text_scan_next(const text_scan *scan, text_search *s, size_t *first, size_t *end) {
    const uint8_t *text = s->text;
    size_t n = s->n, at = s->at;
    while (at < n) {
        size_t next = at + 1;
        uint8_t number = 0;
        if (text[at] < 0x80) {
            number = scan->ascii[text[at]];
        } else {
            next = at;
            uint32_t cp = text_utf8_next(text, &next);
            number = scan->blocks[scan->block_of[cp / BLOCK] * BLOCK + cp % BLOCK];
        }
        uint32_t candidates = scan->kinds[number].branches;
        for (int32_t i = 0; candidates; i++, candidates >>= 1) {
            if (!(candidates & 1)) continue;
            const branch *b = &scan->branches[i];
            size_t run_end = at;
            if (b->dead >= 0 && at < s->dead[b->dead]) continue;
            if (match_branch(scan, b, text, n, at, end, &run_end)) {
                *first = at;
                s->at = *end;
                return true;
            }
            if (b->dead >= 0) s->dead[b->dead] = run_end;
        }
        at = next;
    }
    s->at = n;
    return false;
}
