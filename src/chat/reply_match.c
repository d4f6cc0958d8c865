/* reply_match.c - matches what may stand at a '<': markers and DSML tags in their spellings.
 * The result is no, yes, or "the bytes so far could begin one". If tokens are flagged, a
 * marker must consist of special bytes, so plain text that spells it stays text. */
#include "chat/reply_internal.h"

#include <string.h>

enum { MAX_SPACES = 16, N_BLOCK_WORDS = REPLY_INVOKE };

#define THINK       "<think>"
#define END_THINK   "</think>"
#define EOS         "<｜end▁of▁sentence｜>"
#define CALLS_BEGIN "<｜tool▁calls▁begin｜>"
#define CALLS_END   "<｜tool▁calls▁end｜>"
#define CALL_BEGIN  "<｜tool▁call▁begin｜>"
#define CALL_END    "<｜tool▁call▁end｜>"

static const char *const words[] = {[REPLY_FUNCTION_CALLS] = "function_calls",
                                    [REPLY_TOOL_CALLS] = "tool_calls",
                                    [REPLY_CALLS] = "calls",
                                    [REPLY_INVOKE] = "invoke",
                                    [REPLY_PARAMETER] = "parameter"};
#define DSML "｜DSML｜"

reply_match reply_literal(const hd_reply *r, size_t at, const char *text) {
    size_t n = strlen(text), there = r->n - at;
    if (there >= n) return memcmp(r->raw + at, text, n) == 0 ? REPLY_YES : REPLY_NO;
    return memcmp(r->raw + at, text, there) == 0 ? REPLY_PART : REPLY_NO;
}

static bool all_special(const hd_reply *r, size_t at, size_t n) {
    for (size_t i = at; i < at + n; i++) {
        if (!(r->special[i / 8] >> (i % 8) & 1)) return false;
    }
    return true;
}

reply_match reply_token(const hd_reply *r, size_t at, const char *text) {
    reply_match m = reply_literal(r, at, text);
    if (m == REPLY_NO || !r->opt.flagged) return m;
    return m == REPLY_YES && all_special(r, at, strlen(text)) ? REPLY_YES : REPLY_NO;
}

reply_match reply_eos(const hd_reply *r, size_t at) {
    return reply_token(r, at, EOS);
}

typedef struct marker {
    const char *text;
    reply_mark_kind kind;
} marker;

static const marker think_markers[] = {
    {EOS,       REPLY_MARK_EOS      },
    {THINK,     REPLY_MARK_THINK    },
    {END_THINK, REPLY_MARK_END_THINK}
};
static const marker v3_markers[] = {
    {EOS,         REPLY_MARK_EOS      },
    {CALLS_BEGIN, REPLY_MARK_BLOCK    },
    {CALL_BEGIN,  REPLY_MARK_CALL     },
    {CALL_END,    REPLY_MARK_CALL_END },
    {CALLS_END,   REPLY_MARK_BLOCK_END}
};

/* Widens the answer so far by one of several markers. */
static reply_match markers(const hd_reply *r, size_t at, const marker *list, size_t n_list,
                           reply_match so_far, reply_mark *mark) {
    for (size_t i = 0; i < n_list && so_far != REPLY_YES; i++) {
        reply_match m = reply_token(r, at, list[i].text);
        if (m == REPLY_YES) {
            *mark = (reply_mark){.kind = list[i].kind, .at = at, .n = strlen(list[i].text)};
        }
        if (m != REPLY_NO) so_far = m;
    }
    return so_far;
}

/* --- DSML --- */

/* The word of a tag at raw[at], one of the first n_words, after one optional blank. */
static reply_match tag_word(const hd_reply *r, size_t at, size_t n_words, reply_tag *tag,
                            size_t *end) {
    bool part = false;
    tag->spaced = tag->spelling != REPLY_BARE && at < r->n && r->raw[at] == ' ';
    at += tag->spaced;
    for (size_t w = 0; w < n_words; w++) {
        reply_match m = reply_literal(r, at, words[w]);
        if (m == REPLY_YES) {
            tag->word = (reply_word)w;
            *end = at + strlen(words[w]);
            return REPLY_YES;
        }
        part = part || m == REPLY_PART;
    }
    return part ? REPLY_PART : REPLY_NO;
}

reply_match reply_dsml_tag(const hd_reply *r, size_t at, bool in_block, reply_tag *tag) {
    static const struct {
        const char *lead;
        reply_spelling spelling;
    } leads[] = {
        {DSML,     REPLY_TRUE },
        {"|DSML|", REPLY_ASCII},
        {"",       REPLY_BARE }
    };
    size_t i = at + 1, end = 0;
    bool part = i == r->n;
    tag->close = i < r->n && r->raw[i] == '/';
    i += tag->close;
    for (size_t k = 0; k < HD_LEN(leads); k++) {
        bool other = leads[k].spelling != REPLY_TRUE;
        reply_match m = reply_literal(r, i, leads[k].lead);
        if (m == REPLY_NO || (other && !in_block && tag->close)) continue;
        size_t n_words = other && !in_block ? N_BLOCK_WORDS : HD_LEN(words);
        tag->spelling = leads[k].spelling;
        if (m == REPLY_YES) m = tag_word(r, i + strlen(leads[k].lead), n_words, tag, &end);
        part = part || m == REPLY_PART;
        if (m != REPLY_YES) continue;
        bool forged = !other && r->opt.dsml_flagged && !all_special(r, i, strlen(DSML));
        if (forged) tag->spelling = REPLY_FULL;
        tag->n = end - at;
        return REPLY_YES;
    }
    return part ? REPLY_PART : REPLY_NO;
}

static size_t skip_spaces(const hd_reply *r, size_t at) {
    size_t i = at, max = r->opt.strict ? 1 : MAX_SPACES;
    while (i < r->n && i - at < max && reply_is_space(r->raw[i])) i++;
    return i;
}

reply_match reply_tag_end(const hd_reply *r, size_t at, size_t *end) {
    size_t i = skip_spaces(r, at);
    if (i == r->n) return REPLY_PART;
    *end = i + 1;
    return r->raw[i] == '>' ? REPLY_YES : REPLY_NO;
}

/* What must follow the quote that ends a name, else the quote belongs to the name. */
static reply_match after_name(const hd_reply *r, size_t at, reply_word word, reply_attrs *out) {
    out->has_string = false;
    reply_match m = reply_tag_end(r, at, &out->end);
    size_t i = skip_spaces(r, at);
    bool bare_fits = word == REPLY_INVOKE || !(out->quoted || r->opt.strict);
    if (m == REPLY_YES && !bare_fits) m = REPLY_NO;
    if (m != REPLY_NO || word != REPLY_PARAMETER || i == at) return m;
    m = reply_literal(r, i, "string=\"");
    if (m != REPLY_YES) return m;
    i += strlen("string=\"");
    reply_match yes = reply_literal(r, i, "true\""), no = reply_literal(r, i, "false\"");
    if (yes != REPLY_YES && no != REPLY_YES) {
        return yes == REPLY_PART || no == REPLY_PART ? REPLY_PART : REPLY_NO;
    }
    out->has_string = true;
    out->string = yes == REPLY_YES;
    return reply_tag_end(r, i + strlen(out->string ? "true\"" : "false\""), &out->end);
}

/* Tools have plain names; a parameter may be called anything that stays on its line. */
static bool in_name(char c, reply_word word) {
    if ((unsigned char)c < 0x20) return false;
    return word == REPLY_PARAMETER || (c != '<' && c != '>');
}

reply_match reply_tag_attrs(const hd_reply *r, size_t at, reply_word word, reply_attrs *out) {
    *out = (reply_attrs){0};
    size_t i = skip_spaces(r, at);
    if (word == REPLY_INVOKE && i < r->n && r->raw[i] == '>') {
        out->end = i + 1;
        return REPLY_YES;
    }
    if (i == r->n) return REPLY_PART;
    if (i == at) return REPLY_NO;
    reply_match m = reply_literal(r, i, "name=\"");
    if (m != REPLY_YES) return m;
    out->name = i + strlen("name=\"");
    for (i = out->name; i < r->n; i++) {
        out->name_n = i - out->name;
        m = r->raw[i] == '"' ? after_name(r, i + 1, word, out) : REPLY_NO;
        if (m != REPLY_NO) return m;
        out->quoted = out->quoted || r->raw[i] == '"';
        out->too_long = out->name_n == HD_REPLY_MAX_NAME;
        if (out->too_long || !in_name(r->raw[i], word)) return REPLY_NO;
        m = r->raw[i] == '<' ? reply_eos(r, i) : REPLY_NO;
        if (m != REPLY_NO) return m == REPLY_YES ? REPLY_NO : REPLY_PART;
    }
    return REPLY_PART;
}

const hd_reply_tool *reply_find_tool(const hd_reply *r, size_t name, size_t n) {
    for (int32_t i = 0; i < r->opt.n_tools; i++) {
        const hd_reply_tool *t = &r->opt.tools[i];
        if (t->n == n && memcmp(t->name, r->raw + name, n) == 0) return t;
    }
    return NULL;
}

/* A block in another spelling counts only if an invoke of an offered tool follows at once. */
static reply_match confirm(const hd_reply *r, size_t at) {
    reply_tag tag;
    reply_attrs attrs;
    size_t i = skip_spaces(r, at);
    if (i == r->n) return REPLY_PART;
    if (r->raw[i] != '<') return REPLY_NO;
    reply_match m = reply_dsml_tag(r, i, true, &tag);
    if (m != REPLY_YES) return m;
    if (tag.close || tag.word != REPLY_INVOKE) return REPLY_NO;
    m = reply_tag_attrs(r, i + tag.n, REPLY_INVOKE, &attrs);
    if (m != REPLY_YES) return m;
    return reply_find_tool(r, attrs.name, attrs.name_n) ? REPLY_YES : REPLY_NO;
}

static reply_match probe_opener(const hd_reply *r, size_t at, reply_mark *mark) {
    reply_tag tag;
    size_t end;
    reply_match m = reply_dsml_tag(r, at, false, &tag);
    if (m != REPLY_YES) return m;
    bool block = !tag.close && tag.word < REPLY_INVOKE;
    bool other = tag.spelling != REPLY_TRUE;
    if (other && (!block || r->opt.strict || r->opt.own_spelling)) return REPLY_NO;
    *mark = (reply_mark){.kind = REPLY_MARK_TAG, .at = at, .n = tag.n, .tag = tag};
    if (!block) return REPLY_YES;
    m = reply_tag_end(r, at + tag.n, &end);
    if (m == REPLY_NO) return other ? REPLY_NO : REPLY_YES;
    if (m == REPLY_PART || (other && (m = confirm(r, end)) != REPLY_YES)) return m;
    mark->kind = REPLY_MARK_BLOCK;
    mark->n = end - at;
    return REPLY_YES;
}

static reply_match probe_calls(const hd_reply *r, size_t at, reply_match so_far,
                               reply_mark *mark) {
    if (!r->tools || so_far == REPLY_YES) return so_far;
    if (!reply_is_dsml(r)) return markers(r, at, v3_markers, HD_LEN(v3_markers), so_far, mark);
    reply_match m = probe_opener(r, at, mark);
    return m == REPLY_NO ? so_far : m;
}

reply_match reply_probe_content(const hd_reply *r, size_t at, reply_mark *mark) {
    if (r->opt.format == HD_REPLY_PLAIN)
        return markers(r, at, think_markers, 1, REPLY_NO, mark);
    reply_match m = markers(r, at, think_markers, HD_LEN(think_markers), REPLY_NO, mark);
    return probe_calls(r, at, m, mark);
}

/* The first call must follow the opening at once; text that merely mentions calls does not
 * do that. */
static reply_match confirm_v3(const hd_reply *r, size_t at) {
    const size_t i = skip_spaces(r, at);
    return i == r->n ? REPLY_PART : reply_token(r, i, CALL_BEGIN);
}

reply_match reply_probe_reasoning(const hd_reply *r, size_t at, reply_mark *mark) {
    reply_match m = reply_probe_content(r, at, mark);
    if (m != REPLY_YES || mark->kind != REPLY_MARK_BLOCK) return m;
    if (!reply_is_dsml(r)) {
        m = confirm_v3(r, at + mark->n);
    } else {
        m = mark->tag.spelling == REPLY_TRUE ? confirm(r, at + mark->n) : REPLY_NO;
    }
    if (m != REPLY_NO) return m;
    mark->kind = REPLY_MARK_TAG; /* reasoning about one */
    return REPLY_YES;
}

reply_match reply_probe_dsml(const hd_reply *r, size_t at, reply_mark *mark) {
    reply_match m = markers(r, at, think_markers, 1, REPLY_NO, mark);
    if (m == REPLY_YES) return m;
    reply_tag tag;
    reply_match t = reply_dsml_tag(r, at, true, &tag);
    if (t == REPLY_YES)
        *mark = (reply_mark){.kind = REPLY_MARK_TAG, .at = at, .n = tag.n, .tag = tag};
    return t == REPLY_NO ? m : t;
}

reply_match reply_probe_v3(const hd_reply *r, size_t at, reply_mark *mark) {
    return markers(r, at, v3_markers, HD_LEN(v3_markers), REPLY_NO, mark);
}
