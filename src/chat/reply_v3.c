/* reply_v3.c - tool call parser for V3, R1 and V3.1: markers around a JSON object. The
 * arguments end with their object, so they stream without being held back. Only the fence
 * and white space may stand between them and the markers. JSON arguments of a DSML invoke
 * are parsed here too. */
#include "chat/reply_internal.h"

#include <string.h>

#define SEPARATOR "<｜tool▁sep｜>"

enum { MAX_TYPE = 64, MAX_FENCE = 64 };

/* --- between calls --- */

bool reply_v3_block(hd_reply *r) {
    reply_mark mark;
    if (!reply_next_in_block(r, reply_probe_v3, &mark)) return false;
    switch (mark.kind) {
    case REPLY_MARK_EOS:
        reply_at_eos(r, mark.at);
        return true;
    case REPLY_MARK_CALL:
        reply_call_open(r);
        r->pos += mark.n;
        r->state = r->opt.format == HD_REPLY_V3 ? REPLY_IN_TYPE : REPLY_IN_NAME;
        return true;
    case REPLY_MARK_BLOCK_END:
        r->pos += mark.n;
        reply_leave_block(r);
        return true;
    case REPLY_MARK_BLOCK:
    case REPLY_MARK_CALL_END:
    case REPLY_MARK_THINK:
    case REPLY_MARK_END_THINK:
    case REPLY_MARK_TAG:
        break;
    }
    reply_note(r, HD_REPLY_NOTE_STRAY_TAG);
    reply_put(r, HD_REPLY_CONTENT, r->raw + r->pos, mark.n);
    r->pos += mark.n;
    return true;
}

/* --- the name --- */

static bool lost(hd_reply *r, hd_reply_note why) {
    reply_call_lost(r, why);
    r->state = REPLY_IN_LOST_CALL;
    return true;
}

static void trim(const hd_reply *r, size_t *at, size_t *end) {
    while (*at < *end && reply_is_space(r->raw[*at])) ++*at;
    while (*end > *at && reply_is_space(r->raw[*end - 1])) --*end;
}

/* The name is there: raw[pos, end). What follows begins at next. */
static bool named(hd_reply *r, size_t end, size_t next) {
    size_t at = r->pos;
    trim(r, &at, &end);
    if (at == end) return lost(r, HD_REPLY_NOTE_BAD_TAG);
    reply_call_name(r, at, end - at);
    if (r->mode != REPLY_CALL) return lost(r, HD_REPLY_NOTE_BAD_TAG);
    r->pos = next;
    r->state = REPLY_BEFORE_JSON;
    return true;
}

/* Looks for the separator within max bytes: yes, not yet (PART), or the call is lost. */
static reply_match find_separator(hd_reply *r, size_t max, hd_reply_note too_long, size_t *at) {
    reply_mark mark;
    for (size_t i = r->pos; i < r->n; i++) {
        if (r->raw[i] == '<') {
            reply_match m = reply_token(r, i, SEPARATOR);
            *at = i;
            if (m != REPLY_NO) return m;
            m = reply_probe_v3(r, i, &mark);
            if (m == REPLY_PART) return m;
            if (m == REPLY_YES) {
                lost(r, HD_REPLY_NOTE_BAD_TAG);
                return REPLY_NO;
            }
        }
        if (i - r->pos >= max) {
            lost(r, too_long);
            return REPLY_NO;
        }
    }
    return REPLY_PART;
}

bool reply_v3_type(hd_reply *r) {
    size_t at;
    reply_match m = find_separator(r, MAX_TYPE, HD_REPLY_NOTE_BAD_TAG, &at);
    if (m != REPLY_YES) return m == REPLY_NO;
    bool function = at - r->pos == 8 && memcmp(r->raw + r->pos, "function", 8) == 0;
    if (!function) reply_note(r, HD_REPLY_NOTE_SPELLING);
    r->pos = at + strlen(SEPARATOR);
    r->state = REPLY_IN_NAME;
    return true;
}

bool reply_v3_name(hd_reply *r) {
    size_t at;
    if (r->opt.format == HD_REPLY_V31) {
        reply_match m =
            find_separator(r, HD_REPLY_MAX_NAME + 1, HD_REPLY_NOTE_NAME_TOO_LONG, &at);
        if (m != REPLY_YES) return m == REPLY_NO;
        return named(r, at, at + strlen(SEPARATOR));
    }
    for (at = r->pos; at < r->n; at++) {
        if (memchr("\n`{<", r->raw[at], 4)) return named(r, at, at);
        if (at - r->pos > HD_REPLY_MAX_NAME) return lost(r, HD_REPLY_NOTE_NAME_TOO_LONG);
    }
    return false;
}

/* --- the arguments --- */

static void check_fence(hd_reply *r, size_t end, const char *wanted) {
    size_t n = strlen(wanted);
    if (r->opt.format == HD_REPLY_V31) n = 0;
    if (end - r->pos != n || memcmp(r->raw + r->pos, wanted, n) != 0) {
        reply_note(r, HD_REPLY_NOTE_SPELLING);
    }
}

/* White space, a fence with its language, white space; then the object. */
bool reply_v3_before_json(hd_reply *r) {
    size_t i = r->pos, end = i + MAX_FENCE < r->n ? i + MAX_FENCE : r->n;
    reply_mark mark;
    while (i < end && reply_is_space(r->raw[i])) i++;
    if (i < end && r->raw[i] == '`') {
        while (i < end && r->raw[i] == '`') i++;
        while (i < end && (r->raw[i] | 32) >= 'a' && (r->raw[i] | 32) <= 'z') i++;
        while (i < end && reply_is_space(r->raw[i])) i++;
    }
    if (i == r->n) return false;
    if (r->raw[i] == '{') {
        check_fence(r, i, "\n```json\n");
        r->pos = i;
        reply_json_init(&r->json);
        r->state = REPLY_IN_JSON;
        return true;
    }
    reply_match m = r->raw[i] == '<' ? reply_probe_v3(r, i, &mark) : REPLY_NO;
    if (m == REPLY_PART) return false;
    if (m == REPLY_YES && mark.kind == REPLY_MARK_CALL_END) {
        reply_note(r, HD_REPLY_NOTE_NO_ARGUMENTS);
        r->pos = i + mark.n;
        reply_call_complete(r);
        r->state = REPLY_IN_BLOCK;
        return true;
    }
    return lost(r, HD_REPLY_NOTE_BAD_ARGUMENTS);
}

/* What ends arguments wherever it stands, even in a string of theirs. */
static reply_match probe_end(const hd_reply *r, size_t at, reply_mark *mark) {
    if (!reply_is_dsml(r)) return reply_probe_v3(r, at, mark);
    reply_match m = reply_probe_dsml(r, at, mark);
    if (m != REPLY_YES || mark->kind == REPLY_MARK_EOS) return m;
    return mark->tag.spelling == REPLY_TRUE ? REPLY_YES : REPLY_NO;
}

bool reply_json_arguments(hd_reply *r) {
    reply_match m = REPLY_NO;
    reply_mark mark;
    bool good = true;
    size_t i = r->pos;
    while (i < r->n && good && !reply_json_closed(&r->json)) {
        if (r->raw[i] == '<') m = probe_end(r, i, &mark);
        if (m != REPLY_NO) break;
        good = reply_json_byte(&r->json, (uint8_t)r->raw[i]);
        i += good;
    }
    reply_args(r, r->raw + r->pos, i - r->pos);
    reply_consume_to(r, i);
    if (m == REPLY_YES && mark.kind == REPLY_MARK_EOS) {
        reply_at_eos(r, i);
        return true;
    }
    bool closed = reply_json_closed(&r->json);
    if (m == REPLY_YES || !good) {
        reply_call_lost(r, HD_REPLY_NOTE_BAD_ARGUMENTS);
    } else if (!closed) {
        return false;
    }
    /* A call that became too long is text now. Its JSON was still read to the end, so that
     * its end does not depend on when it was lost. */
    r->json_done = closed;
    r->state = reply_is_dsml(r)        ? REPLY_IN_BODY
               : r->mode == REPLY_CALL ? REPLY_AFTER_JSON
                                       : REPLY_IN_LOST_CALL;
    return true;
}

bool reply_v3_after_json(hd_reply *r) {
    reply_mark mark;
    size_t i = r->scan > r->pos ? r->scan : r->pos;
    while (i < r->n && (reply_is_space(r->raw[i]) || r->raw[i] == '`')) i++;
    r->scan = i;
    if (i == r->n) return false;
    reply_match m = r->raw[i] == '<' ? reply_probe_v3(r, i, &mark) : REPLY_NO;
    if (m == REPLY_PART) return false;
    if (m == REPLY_NO || mark.kind == REPLY_MARK_BLOCK) {
        return lost(r, HD_REPLY_NOTE_TEXT_IN_CALL);
    }
    if (mark.kind == REPLY_MARK_EOS) {
        reply_at_eos(r, i);
        return true;
    }
    if (mark.kind == REPLY_MARK_CALL_END) {
        check_fence(r, i, "\n```");
        i += mark.n;
    } else {
        reply_note(r, HD_REPLY_NOTE_MISSING_END);
    }
    r->pos = i;
    reply_call_complete(r);
    r->state = REPLY_IN_BLOCK;
    return true;
}

/* --- a call that is text --- */

/* Up to its end: text that looks like a call inside a malformed call must not be executed. */

bool reply_v3_lost_call(hd_reply *r) {
    reply_match m = REPLY_NO;
    reply_mark mark;
    size_t i = r->pos;
    for (; i < r->n; i++) {
        if (r->raw[i] == '<') m = reply_probe_v3(r, i, &mark);
        bool inside = m == REPLY_YES && mark.kind != REPLY_MARK_EOS &&
                      mark.kind != REPLY_MARK_CALL_END && mark.kind != REPLY_MARK_BLOCK_END;
        if (inside) m = REPLY_NO;
        if (m != REPLY_NO) break;
    }
    reply_consume_to(r, i);
    if (m != REPLY_YES) return false;
    if (mark.kind == REPLY_MARK_EOS) {
        reply_at_eos(r, i);
        return true;
    }
    if (mark.kind == REPLY_MARK_CALL_END) reply_consume_to(r, i + mark.n);
    r->state = REPLY_IN_BLOCK;
    return true;
}
