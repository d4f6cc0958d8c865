/* reply.c - the reply parser (reasoning and tool call parser): memory, main loop, and the
 * states outside calls. */
#include "chat/reply_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

static const size_t default_max_bytes = (size_t)64 << 20;
static const size_t default_max_arguments = (size_t)16 << 20;

hd_reply_format hd_reply_format_of(hd_chat_encoding encoding) {
    switch (encoding) {
    case HD_CHAT_V2:
    case HD_CHAT_N_ENCODINGS:
        return HD_REPLY_PLAIN;
    case HD_CHAT_V3:
    case HD_CHAT_V3_0324:
    case HD_CHAT_R1:
    case HD_CHAT_R1_0528:
        return HD_REPLY_V3;
    case HD_CHAT_V31:
    case HD_CHAT_V31_TERMINUS:
        return HD_REPLY_V31;
    case HD_CHAT_V32:
        return HD_REPLY_V32;
    case HD_CHAT_V4:
    case HD_CHAT_V4_0731:
        break;
    case HD_CHAT_V41:
        return HD_REPLY_V41;
    }
    return HD_REPLY_V4;
}

hd_status hd_reply_open(hd_reply **out, const hd_reply_options *options, hd_reply_sink *sink,
                        void *user, hd_err *err) {
    hd_reply *r = calloc(1, sizeof *r);
    *out = r;
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory for a reply parser");
    r->opt = *options;
    if (r->opt.max_bytes == 0) r->opt.max_bytes = default_max_bytes;
    if (r->opt.max_arguments == 0) r->opt.max_arguments = default_max_arguments;
    r->sink = sink;
    r->user = user;
    r->tools = r->opt.parse_tools && r->opt.format != HD_REPLY_PLAIN;
    r->state =
        r->opt.starts_in_reasoning && !r->opt.thinking_off && r->opt.format != HD_REPLY_PLAIN
            ? REPLY_IN_REASONING
            : REPLY_IN_CONTENT;
    return HD_OK;
}

void hd_reply_close(hd_reply *r) {
    if (!r) return;
    free(r->raw);
    free(r->special);
    free(r->held_args);
    free(r);
}

bool hd_reply_in_reasoning(const hd_reply *r) {
    return r->state == REPLY_IN_REASONING;
}

static bool in_calls(const hd_reply *r) {
    return r->state != REPLY_IN_REASONING && r->state != REPLY_IN_CONTENT;
}

/* --- what the states share --- */

bool reply_space(hd_reply *r, size_t *end) {
    size_t i = r->scan > r->pos ? r->scan : r->pos;
    while (i < r->n && reply_is_space(r->raw[i])) i++;
    r->scan = i;
    *end = i;
    return i < r->n;
}

void reply_at_eos(hd_reply *r, size_t at) {
    r->n = at; /* what follows is no part of the reply */
    r->ended = true;
    r->reason = HD_FINISH_STOP;
}

static reply_match text_run(hd_reply *r, hd_reply_event_kind kind, bool hold,
                            reply_probe *probe, reply_mark *mark) {
    reply_match m = REPLY_NO;
    bool at_end = r->ended && r->state != REPLY_IN_BLOCK; /* no marker can begin any more */
    size_t i = r->pos, from;
    for (;;) {
        while (i < r->n && r->raw[i] != '<' && !(hold && reply_is_space(r->raw[i]))) i++;
        from = i;
        if (hold && r->scan > i) i = r->scan;
        while (hold && i < r->n && reply_is_space(r->raw[i])) i++;
        if (i == r->n) break;
        if (r->raw[i] != '<') continue;
        m = probe(r, i, mark);
        if (m == REPLY_YES || (m == REPLY_PART && !at_end)) break;
        i++;
    }
    if (i == r->n && at_end) from = i;
    reply_put(r, kind, r->raw + r->pos, from - r->pos);
    r->pos = from;
    r->scan = i;
    return m;
}

void reply_check_space(hd_reply *r, size_t end, bool allow_two) {
    size_t n = end - r->pos;
    if (!r->opt.strict || r->checked_space == end) return;
    r->checked_space = end;
    if (n == 0 || n > 1 + (size_t)allow_two || memcmp(r->raw + r->pos, "\n\n", n) != 0) {
        reply_note(r, HD_REPLY_NOTE_SPELLING);
    }
}

bool reply_next_in_block(hd_reply *r, reply_probe *probe, reply_mark *mark) {
    size_t end;
    if (!r->stray) {
        reply_match m = REPLY_NO;
        if (!reply_space(r, &end)) return false;
        if (r->raw[end] == '<') m = probe(r, end, mark);
        if (m == REPLY_PART) return false;
        if (m == REPLY_YES) {
            if (mark->kind == REPLY_MARK_TAG) reply_check_space(r, end, false);
            r->pos = end;
            return true;
        }
        reply_note(r, HD_REPLY_NOTE_TEXT_BETWEEN_CALLS);
        r->stray = true;
    }
    if (text_run(r, HD_REPLY_CONTENT, true, probe, mark) != REPLY_YES) return false;
    r->stray = false;
    r->pos = mark->at;
    return true;
}

void reply_leave_block(hd_reply *r) {
    r->state = REPLY_IN_CONTENT;
    r->skip_space = true;
}

/* --- content and reasoning --- */

/* Moves pos to the marker; the white space before it is text. */
static void keep_space(hd_reply *r, hd_reply_event_kind kind, const reply_mark *mark) {
    reply_put(r, kind, r->raw + r->pos, mark->at - r->pos);
    r->pos = mark->at;
}

static void pass_mark(hd_reply *r, hd_reply_event_kind kind, const reply_mark *mark) {
    reply_put(r, kind, r->raw + mark->at, mark->n);
    r->pos = mark->at + mark->n;
}

static reply_word own_block(const hd_reply *r) {
    if (r->opt.format == HD_REPLY_V32) return REPLY_FUNCTION_CALLS;
    return r->opt.format == HD_REPLY_V4 ? REPLY_TOOL_CALLS : REPLY_CALLS;
}

/* The format has an empty line before a DSML block and nothing before the others. */
static void enter_block(hd_reply *r, const reply_mark *mark) {
    size_t space = mark->at - r->pos, wanted = reply_is_dsml(r) ? 2 : 0;
    bool exact = space == wanted && memcmp(r->raw + r->pos, "\n\n", wanted) == 0;
    if (r->opt.strict && space > wanted && (!wanted || r->raw[mark->at - 2] == '\n') &&
        (!wanted || r->raw[mark->at - 1] == '\n')) {
        reply_put(r, HD_REPLY_CONTENT, r->raw + r->pos, space - wanted);
        exact = true;
    }
    if (reply_is_dsml(r)) {
        exact = exact && mark->tag.word == own_block(r) && mark->tag.spelling == REPLY_TRUE &&
                mark->tag.spaced == reply_is_spaced(r) && mark->n == mark->tag.n + 1;
        if (!exact) reply_note(r, HD_REPLY_NOTE_SPELLING);
    }
    r->state = REPLY_IN_BLOCK;
    r->stray = false;
    /* A bare call of V3 opens its block by itself. */
    r->pos = mark->kind == REPLY_MARK_CALL ? mark->at : mark->at + mark->n;
}

static void content_mark(hd_reply *r, const reply_mark *mark) {
    bool block = mark->kind == REPLY_MARK_BLOCK || mark->kind == REPLY_MARK_CALL;
    bool opens = mark->kind == REPLY_MARK_THINK && !r->any_content && !r->opt.thinking_off;
    if (block && r->opt.n_tools == 0 && r->opt.unknown_as_text) {
        keep_space(r, HD_REPLY_CONTENT, mark);
        reply_note(r, HD_REPLY_NOTE_TOOLS_NOT_OFFERED);
        r->tools = false;
    } else if (block) {
        enter_block(r, mark);
    } else if (opens) {
        r->pos = mark->at + mark->n;
        r->state = REPLY_IN_REASONING;
        if (reply_is_dsml(r)) reply_note(r, HD_REPLY_NOTE_THINK_TAG);
    } else if (mark->kind == REPLY_MARK_EOS) {
        keep_space(r, HD_REPLY_CONTENT, mark);
        reply_at_eos(r, mark->at);
    } else if (mark->kind == REPLY_MARK_THINK || mark->kind == REPLY_MARK_END_THINK) {
        keep_space(r, HD_REPLY_CONTENT, mark);
        reply_note(r, HD_REPLY_NOTE_THINK_TAG);
        r->pos += mark->n;
    } else {
        keep_space(r, HD_REPLY_CONTENT, mark);
        reply_note(r, HD_REPLY_NOTE_STRAY_TAG);
        pass_mark(r, HD_REPLY_CONTENT, mark);
    }
}

static bool content(hd_reply *r) {
    reply_mark mark;
    while (r->skip_space && r->pos < r->n && reply_is_space(r->raw[r->pos])) r->pos++;
    if (r->pos == r->n) return false;
    r->skip_space = false;
    bool hold = r->tools || !r->any_content;
    if (text_run(r, HD_REPLY_CONTENT, hold, reply_probe_content, &mark) != REPLY_YES) {
        return false;
    }
    content_mark(r, &mark);
    return true;
}

/* A block whose first call follows at once ends the reasoning. */
static bool reasoning(hd_reply *r) {
    reply_mark mark;
    if (text_run(r, HD_REPLY_REASONING, r->tools, reply_probe_reasoning, &mark) != REPLY_YES) {
        return false;
    }
    if (mark.kind == REPLY_MARK_BLOCK || mark.kind == REPLY_MARK_CALL) {
        reply_note(r, HD_REPLY_NOTE_BLOCK_IN_REASONING);
        enter_block(r, &mark);
        return true;
    }
    keep_space(r, HD_REPLY_REASONING, &mark);
    switch (mark.kind) {
    case REPLY_MARK_EOS:
        reply_at_eos(r, mark.at);
        return true;
    case REPLY_MARK_END_THINK:
        r->pos += mark.n;
        r->state = REPLY_IN_CONTENT;
        return true;
    case REPLY_MARK_THINK:
        reply_note(r, HD_REPLY_NOTE_THINK_TAG);
        r->pos += mark.n;
        return true;
    case REPLY_MARK_BLOCK:
    case REPLY_MARK_CALL:
    case REPLY_MARK_TAG:
    case REPLY_MARK_CALL_END:
    case REPLY_MARK_BLOCK_END:
        break;
    }
    pass_mark(r, HD_REPLY_REASONING, &mark);
    return true;
}

/* --- the loop --- */

static reply_state_fn *const states[REPLY_N_STATES] = {
    [REPLY_IN_CONTENT] = content,
    [REPLY_IN_REASONING] = reasoning,
    [REPLY_IN_BODY] = reply_dsml_body,
    [REPLY_IN_VALUE] = reply_dsml_value,
    [REPLY_IN_TYPE] = reply_v3_type,
    [REPLY_IN_NAME] = reply_v3_name,
    [REPLY_BEFORE_JSON] = reply_v3_before_json,
    [REPLY_IN_JSON] = reply_json_arguments,
    [REPLY_AFTER_JSON] = reply_v3_after_json,
    [REPLY_IN_LOST_CALL] = reply_v3_lost_call,
};

static reply_state_fn *state_of(const hd_reply *r) {
    if (r->state != REPLY_IN_BLOCK) return states[r->state];
    return reply_is_dsml(r) ? reply_dsml_block : reply_v3_block;
}

/* Called inside a call. Whether only the closing tag is missing. */
static bool only_end_missing(hd_reply *r) {
    size_t i = r->pos;
    if (r->mode != REPLY_CALL) return false;
    while (i < r->n && (reply_is_space(r->raw[i]) || r->raw[i] == '`')) i++;
    if (i < r->n) return false;
    if (r->state == REPLY_AFTER_JSON) return true;
    return r->state == REPLY_IN_BODY && r->reason == HD_FINISH_STOP &&
           (r->n_params > 0 || r->json_done);
}

static void end_in_call(hd_reply *r) {
    bool stop = r->reason == HD_FINISH_STOP;
    if (only_end_missing(r)) {
        reply_note(r, stop ? HD_REPLY_NOTE_MISSING_END : HD_REPLY_NOTE_CUT);
        reply_call_complete(r);
        r->pos = r->n;
    } else if (r->mode == REPLY_TEXT || r->mode == REPLY_BLANK) {
        if (r->mode == REPLY_BLANK) reply_call_complete(r);
        reply_consume_to(r, r->n);
        if (!stop) reply_note(r, HD_REPLY_NOTE_CUT);
    } else if (stop) {
        r->pos = r->n;
        reply_call_lost(r, HD_REPLY_NOTE_UNFINISHED);
    } else {
        reply_call_cut(r);
        r->pos = r->n;
    }
}

/* The block was not closed, and raw[pos, n) is white space and perhaps a piece of a tag. */
static void end_in_block(hd_reply *r) {
    bool stop = r->reason == HD_FINISH_STOP;
    size_t i = r->pos;
    while (i < r->n && reply_is_space(r->raw[i])) i++;
    if (stop && i < r->n) {
        if (!r->stray) reply_note(r, HD_REPLY_NOTE_BAD_TAG);
        reply_put(r, HD_REPLY_CONTENT, r->raw + r->pos, r->n - r->pos);
    } else {
        reply_note(r, stop ? HD_REPLY_NOTE_MISSING_END : HD_REPLY_NOTE_CUT);
    }
    r->pos = r->n;
}

static void end(hd_reply *r) {
    r->finished = true;
    if (hd_reply_in_reasoning(r) && r->reason == HD_FINISH_STOP) {
        reply_note(r, HD_REPLY_NOTE_UNFINISHED_REASONING);
    }
    if (r->state == REPLY_IN_BLOCK) {
        end_in_block(r);
    } else if (in_calls(r)) {
        end_in_call(r);
    }
}

static hd_status run(hd_reply *r, hd_err *err) {
    r->err = err;
    while (r->status == HD_OK && r->pos < r->n && state_of(r)(r)) {
    }
    if (r->status == HD_OK && r->ended && !r->finished) end(r);
    if (r->finished) reply_end_text(r);
    reply_flush(r);
    r->err = NULL;
    return r->status;
}

static hd_status grow(hd_reply *r, size_t need, hd_err *err) {
    size_t cap = r->cap ? r->cap : 4096;
    while (cap < need) cap += cap / 2; /* need is at most max_bytes, far from overflow */
    char *wider = realloc(r->raw, cap);
    if (!wider) return HD_FAIL(err, HD_ENOMEM, "no memory for a reply of %zu bytes", need);
    r->raw = wider;
    if (r->opt.flagged || r->opt.dsml_flagged) {
        uint8_t *bits = realloc(r->special, cap / 8 + 1);
        if (!bits) return HD_FAIL(err, HD_ENOMEM, "no memory for a reply of %zu bytes", need);
        r->special = bits;
    }
    r->cap = cap;
    return HD_OK;
}

static void mark_bytes(hd_reply *r, size_t n, bool special) {
    for (size_t i = r->n; i < r->n + n; i++) {
        uint8_t bit = (uint8_t)(1u << (i % 8)), *byte = &r->special[i / 8];
        *byte = (uint8_t)(special ? *byte | bit : *byte & ~bit);
    }
}

hd_status hd_reply_feed(hd_reply *r, const void *bytes, size_t n, bool special, hd_err *err) {
    if (r->status != HD_OK) return HD_FAIL(err, r->status, "the reply has failed before");
    if (r->ended || n == 0) return HD_OK;
    if (n > r->opt.max_bytes - r->n) {
        r->status = HD_FAIL(err, HD_EINVAL, "a reply of more than %zu bytes", r->opt.max_bytes);
        return r->status;
    }
    if (n > r->cap - r->n) {
        r->status = grow(r, r->n + n, err);
        if (r->status != HD_OK) return r->status;
    }
    memcpy(r->raw + r->n, bytes, n);
    if (r->special) mark_bytes(r, n, special);
    r->n += n;
    return run(r, err);
}

hd_status hd_reply_finish(hd_reply *r, hd_finish_reason reason, hd_err *err) {
    if (r->status != HD_OK) return HD_FAIL(err, r->status, "the reply has failed before");
    if (r->ended) return HD_OK;
    r->ended = true;
    r->reason = reason;
    return run(r, err);
}
