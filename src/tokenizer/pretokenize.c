/* pretokenize.c - runs the stages of a pre-tokenizer over a text, one piece at a time. Each
 * stage splits its piece into events (gap, match, gap ...), and its behavior converts events
 * to pieces. A stage asks the previous stage for a piece only when its own is used up, so
 * memory does not grow with the text. */
#include "tokenizer/pretokenize_internal.h"

#include <stdlib.h>
#include <string.h>

void text_search_start(text_search *s, const uint8_t *text, size_t n) {
    s->text = text;
    s->n = n;
    s->at = 0;
    s->last_end = SIZE_MAX;
    for (int32_t i = 0; i < TEXT_SCAN_MAX_LEADING; i++) s->dead[i] = 0;
}

hd_status text_search_next(text_search *s, size_t *first, size_t *end, bool *found,
                           hd_err *err) {
    if (s->pattern->scan) {
        *found = text_scan_next(s->pattern->scan, s, first, end);
        return HD_OK;
    }
    return text_regex_next(s->pattern->regex, s, first, end, found, err);
}

static void cutter_start(text_cutter *c, const uint8_t *text, size_t n) {
    text_search_start(&c->search, text, n);
    c->n_ahead = 0;
    c->covered = 0;
    c->holds = c->done = false;
}

/* Returns the next gap or match in order; *any is false at the end of the piece. */
static hd_status next_event(text_cutter *c, bool invert, text_event *e, bool *any,
                            hd_err *err) {
    *any = true;
    if (c->holds) {
        c->holds = false;
        *e = c->held;
        return HD_OK;
    }
    bool found = false;
    size_t first = 0, end = 0;
    if (!c->done) HD_TRY(text_search_next(&c->search, &first, &end, &found, err));
    c->done = !found;
    if (!found) first = c->search.n;
    if (found && first == c->covered) {
        *e = (text_event){first, end, !invert};
        c->covered = end;
        return HD_OK;
    }
    if (first == c->covered) {
        *any = false;
        return HD_OK;
    }
    *e = (text_event){c->covered, first, invert};
    c->covered = first;
    if (found) {
        c->held = (text_event){first, end, !invert};
        c->holds = true;
        c->covered = end;
    }
    return HD_OK;
}

/* Reads ahead until `want` events are available, or all that there are. */
static hd_status look_ahead(text_cutter *c, bool invert, int32_t want, hd_err *err) {
    while (c->n_ahead < want) {
        bool any;
        HD_TRY(next_event(c, invert, &c->ahead[c->n_ahead], &any, err));
        if (!any) break;
        c->n_ahead++;
    }
    return HD_OK;
}

static void drop_event(text_cutter *c) {
    c->ahead[0] = c->ahead[1];
    c->n_ahead--;
}

/* Returns whether the event after `now` belongs to the same piece. */
static bool joins(text_behavior behavior, const text_event *now, const text_event *next) {
    switch (behavior) {
    case TEXT_CONTIGUOUS:
        return now->match == next->match;
    case TEXT_MERGED_WITH_PREVIOUS:
        return next->match && !now->match;
    case TEXT_MERGED_WITH_NEXT:
        return now->match && !next->match;
    case TEXT_ISOLATED:
    case TEXT_REMOVED:
        break;
    }
    return false;
}

/* Returns the next piece by the stage's behavior; *any is false at the end. */
static hd_status cut_piece(text_cutter *c, const text_stage *stage, text_event *out, bool *any,
                           hd_err *err) {
    if (stage->behavior == TEXT_ISOLATED) return next_event(c, stage->invert, out, any, err);
    HD_TRY(look_ahead(c, stage->invert, 1, err));
    while (stage->behavior == TEXT_REMOVED && c->n_ahead > 0 && c->ahead[0].match) {
        drop_event(c);
        HD_TRY(look_ahead(c, stage->invert, 1, err));
    }
    *any = c->n_ahead > 0;
    if (!*any) return HD_OK;
    *out = c->ahead[0];
    HD_TRY(look_ahead(c, stage->invert, 2, err));
    while (c->n_ahead > 1 && joins(stage->behavior, &c->ahead[0], &c->ahead[1])) {
        drop_event(c);
        out->end = c->ahead[0].end;
        HD_TRY(look_ahead(c, stage->invert, 2, err));
    }
    drop_event(c);
    return HD_OK;
}

hd_status text_pieces_init(text_pieces *it, const text_pretokenizer *p, hd_err *err) {
    *it = (text_pieces){.p = p, .level = -1};
    if (p->needs_regex) HD_TRY(text_regex_scratch_open(&it->scratch, err));
    for (int32_t i = 0; i < p->n_stages; i++) {
        it->cutters[i].search.pattern = &p->stages[i].pattern;
        it->cutters[i].search.scratch = it->scratch;
    }
    return HD_OK;
}

void text_pieces_deinit(text_pieces *it) {
    text_regex_scratch_close(it->scratch);
    free(it->prefixed);
    *it = (text_pieces){.level = -1};
}

/* Puts a space in front of a piece that does not start with one. */
static hd_status add_prefix(text_pieces *it, const uint8_t **piece, size_t *n, hd_err *err) {
    if (*n == 0 || (*piece)[0] == ' ') return HD_OK;
    if (it->prefixed_cap < *n + 1) {
        size_t cap = (*n + 1) * 2;
        uint8_t *wider = realloc(it->prefixed, cap);
        if (!wider) return HD_FAIL(err, HD_ENOMEM, "no memory for a piece of text");
        it->prefixed = wider;
        it->prefixed_cap = cap;
    }
    it->prefixed[0] = ' ';
    memcpy(it->prefixed + 1, *piece, *n);
    *piece = it->prefixed;
    *n += 1;
    return HD_OK;
}

hd_status text_pieces_start(text_pieces *it, const uint8_t *text, size_t n, hd_err *err) {
    const text_pretokenizer *p = it->p;
    if (p->add_prefix_space && p->prefix_stage == 0) HD_TRY(add_prefix(it, &text, &n, err));
    it->text = text;
    it->n = n;
    it->level = n > 0 ? 0 : -1;
    if (it->level == 0 && p->n_stages > 0) cutter_start(&it->cutters[0], text, n);
    return HD_OK;
}

hd_status text_pieces_next(text_pieces *it, const uint8_t **piece, size_t *n, hd_err *err) {
    const text_pretokenizer *p = it->p;
    *n = 0;
    if (p->n_stages == 0) {
        *piece = it->text;
        *n = it->n;
        it->n = 0;
        return HD_OK;
    }
    while (it->level >= 0) {
        text_cutter *c = &it->cutters[it->level];
        text_event cut = {0};
        bool any;
        HD_TRY(cut_piece(c, &p->stages[it->level], &cut, &any, err));
        if (!any) {
            it->level--;
            continue;
        }
        if (cut.first == cut.end) continue;
        const uint8_t *text = c->search.text + cut.first;
        size_t length = cut.end - cut.first;
        if (p->add_prefix_space && p->prefix_stage == it->level + 1) {
            HD_TRY(add_prefix(it, &text, &length, err));
        }
        if (it->level + 1 == p->n_stages) {
            *piece = text;
            *n = length;
            return HD_OK;
        }
        it->level++;
        cutter_start(&it->cutters[it->level], text, length);
    }
    return HD_OK;
}
