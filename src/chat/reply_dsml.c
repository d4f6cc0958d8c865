/* reply_dsml.c - tool call parser for the DSML of V3.2 and later: blocks, invokes, parameters.
 * Arguments become one JSON object in the order of the parameters, with the spacing of
 * Python's json module. Rendering the object again therefore yields the same bytes. */
#include "chat/reply_internal.h"

#include <string.h>

static bool is_block(const reply_tag *tag) {
    return tag->word < REPLY_INVOKE;
}

static bool is_exact(const hd_reply *r, const reply_tag *tag) {
    return tag->spelling == REPLY_TRUE && tag->spaced == reply_is_spaced(r);
}

static void note_spelling(hd_reply *r, const reply_tag *tag) {
    if (!is_exact(r, tag)) reply_note(r, HD_REPLY_NOTE_SPELLING);
}

/* --- between invokes --- */

static bool open_invoke(hd_reply *r, const reply_tag *tag) {
    reply_attrs attrs;
    reply_match m = reply_tag_attrs(r, r->pos + tag->n, REPLY_INVOKE, &attrs);
    if (m == REPLY_PART) return false;
    reply_call_open(r);
    r->state = REPLY_IN_BODY;
    if (m == REPLY_NO) {
        reply_call_lost(r,
                        attrs.too_long ? HD_REPLY_NOTE_NAME_TOO_LONG : HD_REPLY_NOTE_BAD_TAG);
        reply_consume_to(r, r->pos + tag->n);
        return true;
    }
    note_spelling(r, tag);
    reply_call_name(r, attrs.name, attrs.name_n);
    reply_consume_to(r, attrs.end);
    return true;
}

/* Its value may spell anything, so it is read as what it is: a part of a lost call. */
static bool open_outside(hd_reply *r) {
    reply_call_open(r);
    reply_call_lost(r, HD_REPLY_NOTE_PARAMETER_OUTSIDE);
    r->state = REPLY_IN_BODY;
    return true;
}

bool reply_dsml_block(hd_reply *r) {
    reply_mark mark;
    size_t end;
    if (!reply_next_in_block(r, reply_probe_dsml, &mark)) return false;
    if (mark.kind == REPLY_MARK_EOS) {
        reply_at_eos(r, mark.at);
        return true;
    }
    if (mark.tag.word == REPLY_INVOKE && !mark.tag.close) return open_invoke(r, &mark.tag);
    if (mark.tag.word == REPLY_PARAMETER && !mark.tag.close) return open_outside(r);
    reply_match m = reply_tag_end(r, r->pos + mark.tag.n, &end);
    if (m == REPLY_PART) return false;
    if (m == REPLY_YES && is_block(&mark.tag) && mark.tag.close) {
        note_spelling(r, &mark.tag);
        r->pos = end;
        reply_leave_block(r);
        return true;
    }
    reply_note(r, HD_REPLY_NOTE_STRAY_TAG);
    reply_put(r, HD_REPLY_CONTENT, r->raw + r->pos, mark.tag.n);
    r->pos += mark.tag.n;
    r->stray = true;
    return true;
}

/* --- between parameters --- */

static uint32_t hash_name(const char *s, size_t n) {
    uint32_t h = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < n; i++) h = (h ^ (uint8_t)s[i]) * 16777619u;
    return h;
}

/* Returns false if the call is lost: the name is repeated or too many names. */
static bool new_name(hd_reply *r, const reply_attrs *a) {
    uint32_t hash = hash_name(r->raw + a->name, a->name_n);
    for (int32_t i = 0; i < r->n_params; i++) {
        const reply_name *p = &r->params[i];
        if (p->hash == hash && p->n == a->name_n &&
            memcmp(r->raw + r->call_start + p->at, r->raw + a->name, p->n) == 0) {
            reply_call_lost(r, HD_REPLY_NOTE_DUPLICATE_PARAMETER);
            return false;
        }
    }
    if (r->n_params == HD_REPLY_MAX_PARAMS) {
        reply_call_lost(r, HD_REPLY_NOTE_TOO_MANY_PARAMETERS);
        return false;
    }
    r->params[r->n_params++] =
        (reply_name){.hash = hash, .at = a->name - r->call_start, .n = a->name_n};
    return true;
}

/* The tag decides, else the schema, else it is a string. */
static bool value_is_string(const hd_reply *r, const reply_attrs *a) {
    if (a->has_string) return a->string;
    for (int32_t i = 0; r->tool && i < r->tool->n_params; i++) {
        const hd_reply_param *p = &r->tool->params[i];
        if (p->n == a->name_n && memcmp(p->name, r->raw + a->name, p->n) == 0) {
            return p->is_string;
        }
    }
    return true;
}

static void begin_argument(hd_reply *r, const reply_attrs *a) {
    if (!new_name(r, a)) return;
    r->value_is_string = value_is_string(r, a);
    reply_args(r, r->n_params > 1 ? ", \"" : "{\"", r->n_params > 1 ? 3 : 2);
    reply_args_escaped(r, r->raw + a->name, a->name_n);
    reply_args_end_string(r);
    reply_args(r, r->value_is_string ? ": \"" : ": ", r->value_is_string ? 3 : 2);
}

static bool open_parameter(hd_reply *r, const reply_tag *tag) {
    reply_attrs attrs;
    reply_match m = reply_tag_attrs(r, r->pos + tag->n, REPLY_PARAMETER, &attrs);
    if (m == REPLY_PART) return false;
    if (m == REPLY_NO) {
        reply_call_lost(r,
                        attrs.too_long ? HD_REPLY_NOTE_NAME_TOO_LONG : HD_REPLY_NOTE_BAD_TAG);
        reply_consume_to(r, r->pos + tag->n);
        return true;
    }
    if (r->mode == REPLY_BLANK) reply_call_lost(r, HD_REPLY_NOTE_BAD_TAG);
    if (r->mode == REPLY_CALL) {
        note_spelling(r, tag);
        if (!attrs.has_string) reply_note(r, HD_REPLY_NOTE_SPELLING);
        if (r->json_done) {
            reply_call_lost(r, HD_REPLY_NOTE_MIXED_ARGUMENTS);
        } else {
            begin_argument(r, &attrs);
        }
    }
    reply_consume_to(r, attrs.end);
    r->value_spelling = tag->spelling;
    r->value_exact = is_exact(r, tag);
    r->state = REPLY_IN_VALUE;
    return true;
}

static void end_invoke(hd_reply *r) {
    reply_call_complete(r);
    r->state = REPLY_IN_BLOCK;
}

/* Another invoke or the end of the block: this invoke was not closed. */
static bool end_unclosed(hd_reply *r) {
    if (r->mode == REPLY_CALL && (r->n_params > 0 || r->json_done)) {
        reply_note(r, HD_REPLY_NOTE_MISSING_END);
    } else if (r->mode == REPLY_CALL) {
        reply_call_lost(r, HD_REPLY_NOTE_UNFINISHED);
    }
    end_invoke(r);
    return true;
}

static bool body_tag(hd_reply *r, const reply_tag *tag) {
    size_t end;
    if (tag->word == REPLY_PARAMETER && !tag->close) return open_parameter(r, tag);
    if (tag->word == REPLY_INVOKE && !tag->close) return end_unclosed(r);
    reply_match m = reply_tag_end(r, r->pos + tag->n, &end);
    if (m == REPLY_PART) return false;
    if (m == REPLY_YES && tag->close && is_block(tag)) return end_unclosed(r);
    if (m == REPLY_YES && tag->close && tag->word == REPLY_INVOKE) {
        if (r->mode == REPLY_CALL) note_spelling(r, tag);
        reply_consume_to(r, end);
        end_invoke(r);
        return true;
    }
    reply_call_lost(r, HD_REPLY_NOTE_BAD_TAG);
    reply_consume_to(r, r->pos + tag->n);
    return true;
}

bool reply_dsml_body(hd_reply *r) {
    reply_mark mark;
    size_t end;
    if (!reply_space(r, &end)) return false;
    reply_match m = r->raw[end] == '<' ? reply_probe_dsml(r, end, &mark) : REPLY_NO;
    if (m == REPLY_PART) return false;
    if (m == REPLY_YES && mark.kind == REPLY_MARK_EOS) {
        reply_consume_to(r, end);
        reply_at_eos(r, end);
        return true;
    }
    /* An empty list of parameters is an empty line. */
    reply_check_space(r, end, r->n_params == 0);
    reply_consume_to(r, end);
    if (m == REPLY_YES) return body_tag(r, &mark.tag);
    if (r->mode == REPLY_CALL && r->raw[end] == '{' && r->n_params == 0 && !r->json_done) {
        reply_note(r, HD_REPLY_NOTE_SPELLING);
        reply_json_init(&r->json);
        r->state = REPLY_IN_JSON;
        return true;
    }
    reply_call_lost(r, HD_REPLY_NOTE_TEXT_IN_CALL);
    reply_consume_to(r, end + 1);
    return true;
}

/* --- values --- */

/* A value ends with the tag as the format has it. One that was opened in another spelling
 * also ends in that, so text that looks like markup is safe inside a proper value. */
static reply_match probe_close(const hd_reply *r, size_t at, reply_mark *mark) {
    size_t end;
    bool could = reply_literal(r, at, "</｜DSML｜") != REPLY_NO ||
                 (r->value_spelling == REPLY_ASCII && reply_literal(r, at, "</|DSML|")) ||
                 (r->value_spelling == REPLY_BARE && reply_literal(r, at, "</parameter"));
    if (!could) return REPLY_NO;
    reply_match m = reply_dsml_tag(r, at, true, &mark->tag);
    if (m != REPLY_YES) return m;
    const reply_tag *tag = &mark->tag;
    bool spelled = tag->spelling == REPLY_TRUE || tag->spelling == r->value_spelling;
    if (r->value_exact && !is_exact(r, tag)) return REPLY_NO;
    if (!tag->close || tag->word != REPLY_PARAMETER || !spelled) return REPLY_NO;
    m = reply_tag_end(r, at + tag->n, &end);
    if (m != REPLY_YES) return m;
    mark->kind = REPLY_MARK_TAG;
    mark->n = end - at;
    return REPLY_YES;
}

static reply_match probe_value(const hd_reply *r, size_t at, reply_mark *mark) {
    *mark = (reply_mark){.kind = REPLY_MARK_EOS, .at = at};
    reply_match eos = reply_eos(r, at);
    if (eos == REPLY_YES) return eos;
    reply_match m = probe_close(r, at, mark);
    return m == REPLY_NO ? eos : m;
}

/* raw[pos, end) is the value of a parameter that is no string. */
static void put_json_value(hd_reply *r, size_t end) {
    const char *text = r->raw + r->pos;
    size_t n = end - r->pos;
    if (reply_json_valid(text, n)) {
        reply_args(r, text, n);
        return;
    }
    reply_note(r, HD_REPLY_NOTE_NOT_JSON);
    reply_args(r, "\"", 1);
    reply_args_escaped(r, text, n);
    reply_args_end_string(r);
}

static void end_value(hd_reply *r, const reply_mark *mark) {
    if (r->mode == REPLY_CALL) {
        if (r->value_is_string) {
            reply_args_end_string(r);
        } else {
            put_json_value(r, mark->at);
        }
    }
    if (r->mode == REPLY_CALL) note_spelling(r, &mark->tag);
    reply_consume_to(r, mark->at + mark->n);
    r->state = REPLY_IN_BODY;
}

bool reply_dsml_value(hd_reply *r) {
    reply_match m = REPLY_NO;
    reply_mark mark;
    size_t i = r->scan > r->pos ? r->scan : r->pos;
    for (; i < r->n; i++) {
        const char *next = memchr(r->raw + i, '<', r->n - i);
        i = next ? (size_t)(next - r->raw) : r->n;
        if (!next) break;
        m = probe_value(r, i, &mark);
        if (m != REPLY_NO) break;
    }
    bool held = r->mode == REPLY_CALL && !r->value_is_string;
    if (held && i - r->pos > r->opt.max_arguments) {
        reply_call_lost(r, HD_REPLY_NOTE_ARGUMENTS_TOO_LONG);
        held = false;
    }
    if (!held) {
        reply_args_escaped(r, r->raw + r->pos, i - r->pos);
        reply_consume_to(r, i);
    }
    r->scan = i;
    if (m != REPLY_YES) return false;
    if (mark.kind == REPLY_MARK_EOS) {
        reply_at_eos(r, i);
    } else {
        end_value(r, &mark);
    }
    return true;
}
