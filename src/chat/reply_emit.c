/* reply_emit.c - output of the reply parser: text through a UTF-8 filter, calls as events.
 * Text collects in a small buffer, which is emitted when it is full, when its kind changes
 * and at the end of a feed, always between characters. String arguments are escaped for
 * JSON. */
#include "chat/reply_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum { LONGEST_UNIT = 6 }; /* \u001f */

static void emit(hd_reply *r, hd_reply_event e) {
    if (r->status == HD_OK) r->sink(r->user, &e);
}

void reply_flush(hd_reply *r) {
    if (r->out_n == 0) return;
    emit(r, (hd_reply_event){
                .kind = r->out_kind, .call = r->n_begun - 1, .text = r->out, .n = r->out_n});
    r->out_n = 0;
}

static void hold_args(hd_reply *r, const char *unit, size_t n) {
    if (n > r->held_cap - r->held_n) {
        size_t cap = r->held_cap ? r->held_cap * 2 : 1024;
        char *wider = realloc(r->held_args, cap);
        if (!wider) {
            r->status = HD_FAIL(r->err, HD_ENOMEM, "no memory for %zu bytes of arguments", cap);
            return;
        }
        r->held_args = wider;
        r->held_cap = cap;
    }
    memcpy(r->held_args + r->held_n, unit, n);
    r->held_n += n;
}

/* One character, or one escape. */
static void put_unit(hd_reply *r, const char *unit, size_t n) {
    if (r->status != HD_OK) return;
    if (r->out_kind == HD_REPLY_ARGUMENTS) {
        r->args_over = r->args_over || n > r->opt.max_arguments - r->n_arguments;
        if (r->args_over) return;
        r->n_arguments += n;
    }
    if (r->out_kind == HD_REPLY_ARGUMENTS && r->opt.whole_calls) {
        hold_args(r, unit, n);
        return;
    }
    if (n > sizeof r->out - r->out_n) reply_flush(r);
    memcpy(r->out + r->out_n, unit, n);
    r->out_n += n;
}

static void put_char(hd_reply *r, const char *c, size_t n, bool escape) {
    static const char shorts[] = "\b\f\n\r\t\"\\", letters[] = "bfnrt\"\\";
    char unit[LONGEST_UNIT + 1] = "\\";
    unsigned char first = (unsigned char)*c;
    if (!escape || (first >= 0x20 && first != '"' && first != '\\')) {
        put_unit(r, c, n);
        return;
    }
    const char *at = first ? strchr(shorts, first) : NULL;
    if (at) {
        unit[1] = letters[at - shorts];
        put_unit(r, unit, 2);
    } else {
        snprintf(unit, sizeof unit, "\\u%04x", first);
        put_unit(r, unit, LONGEST_UNIT);
    }
}

/* The first byte of a character: how many follow, and the range of the next. */
static void lead(hd_reply *r, uint8_t c, bool escape) {
    r->utf8_low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
    r->utf8_high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
    r->utf8_need = c < 0xc2 || c > 0xf4 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
    r->utf8[0] = c;
    r->utf8_n = 1;
    if (r->utf8_need > 0) return;
    if (c < 0x80) {
        put_char(r, (const char *)r->utf8, 1, escape);
    } else {
        put_unit(r, "\xef\xbf\xbd", 3);
    }
}

static void filter(hd_reply *r, const char *text, size_t n, bool escape) {
    for (size_t i = 0; i < n; i++) {
        uint8_t c = (uint8_t)text[i];
        if (r->utf8_need == 0) {
            lead(r, c, escape);
        } else if (c >= r->utf8_low && c <= r->utf8_high) {
            r->utf8[r->utf8_n++] = c;
            r->utf8_low = 0x80;
            r->utf8_high = 0xbf;
            if (--r->utf8_need == 0) put_unit(r, (const char *)r->utf8, r->utf8_n);
        } else {
            put_unit(r, "\xef\xbf\xbd", 3);
            lead(r, c, escape);
        }
    }
}

/* A character that never became whole. */
void reply_end_text(hd_reply *r) {
    if (r->utf8_need > 0) put_unit(r, "\xef\xbf\xbd", 3);
    r->utf8_need = 0;
}

static void switch_to(hd_reply *r, hd_reply_event_kind kind) {
    if (r->out_kind == kind) return;
    reply_end_text(r);
    reply_flush(r);
    r->out_kind = kind;
}

void reply_put(hd_reply *r, hd_reply_event_kind kind, const char *text, size_t n) {
    if (n == 0) return;
    switch_to(r, kind);
    if (kind == HD_REPLY_CONTENT) r->any_content = true;
    filter(r, text, n, false);
}

static void put_event(hd_reply *r, hd_reply_event e) {
    reply_end_text(r);
    reply_flush(r);
    emit(r, e);
}

const char *hd_reply_note_text(hd_reply_note note) {
    static const char *const texts[] = {
#define X(name, text) [HD_REPLY_NOTE_##name] = (text),
        HD_REPLY_NOTES(X)
#undef X
    };
    return note < HD_REPLY_N_NOTES ? texts[note] : "?";
}

/* Limits and policies are not part of the format. */
static bool is_deviation(hd_reply_note note) {
    return note != HD_REPLY_NOTE_UNKNOWN_TOOL && note != HD_REPLY_NOTE_TOOLS_NOT_OFFERED &&
           note != HD_REPLY_NOTE_CUT;
}

void reply_note(hd_reply *r, hd_reply_note note) {
    put_event(r, (hd_reply_event){.kind = HD_REPLY_NOTE, .note = note});
    if (r->opt.strict && is_deviation(note) && r->status == HD_OK) {
        r->status = HD_FAIL(r->err, HD_EFORMAT, "reply, byte %zu: %s", r->pos,
                            hd_reply_note_text(note));
    }
}

/* --- calls --- */

void reply_call_open(hd_reply *r) {
    r->mode = REPLY_HEADER;
    r->call_start = r->pos;
    r->tool = NULL;
    r->json_done = false;
    r->n_params = 0;
    r->n_arguments = 0;
    r->args_over = false;
    r->held_n = 0;
}

static void emit_begin(hd_reply *r) {
    put_event(r, (hd_reply_event){.kind = HD_REPLY_CALL_BEGIN,
                                  .call = r->n_begun++,
                                  .text = r->raw + r->name,
                                  .n = r->name_n});
}

void reply_call_name(hd_reply *r, size_t name, size_t n) {
    r->name = name;
    r->name_n = n;
    if (n == 0) {
        r->mode = REPLY_BLANK;
    } else if (n > HD_REPLY_MAX_NAME) {
        reply_call_lost(r, HD_REPLY_NOTE_NAME_TOO_LONG);
    } else if (r->n_begun >= HD_CHAT_MAX_CALLS) {
        reply_call_lost(r, HD_REPLY_NOTE_TOO_MANY_CALLS);
    } else {
        r->tool = reply_find_tool(r, name, n);
        if (!r->tool && r->opt.unknown_as_text) {
            reply_call_lost(r, HD_REPLY_NOTE_UNKNOWN_TOOL);
            return;
        }
        r->mode = REPLY_CALL;
        if (!r->opt.whole_calls) emit_begin(r);
    }
}

static void put_args(hd_reply *r, const char *text, size_t n, bool escape) {
    if (n == 0 || r->mode != REPLY_CALL) return;
    switch_to(r, HD_REPLY_ARGUMENTS);
    filter(r, text, n, escape);
    if (r->args_over) reply_call_lost(r, HD_REPLY_NOTE_ARGUMENTS_TOO_LONG);
}

void reply_args(hd_reply *r, const char *text, size_t n) {
    put_args(r, text, n, false);
}

void reply_args_escaped(hd_reply *r, const char *text, size_t n) {
    put_args(r, text, n, true);
}

void reply_args_end_string(hd_reply *r) {
    reply_end_text(r);
    reply_args(r, "\"", 1);
}

void reply_call_complete(hd_reply *r) {
    if (r->mode == REPLY_BLANK) reply_note(r, HD_REPLY_NOTE_BLANK_CALL);
    if (r->mode != REPLY_CALL) return;
    if (!r->json_done) reply_args(r, r->n_params ? "}" : "{}", r->n_params ? 1 : 2);
    if (r->mode != REPLY_CALL) return; /* that was one byte too many */
    reply_end_text(r);
    reply_flush(r);
    if (r->opt.whole_calls) {
        emit_begin(r);
        emit(r, (hd_reply_event){.kind = HD_REPLY_ARGUMENTS,
                                 .call = r->n_begun - 1,
                                 .text = r->held_args,
                                 .n = r->held_n});
    }
    put_event(r, (hd_reply_event){.kind = HD_REPLY_CALL_END,
                                  .call = r->n_begun - 1,
                                  .end = HD_REPLY_COMPLETE});
}

static void emit_end(hd_reply *r, hd_reply_end end) {
    reply_end_text(r);
    if (r->mode != REPLY_CALL || r->opt.whole_calls) return;
    put_event(r,
              (hd_reply_event){.kind = HD_REPLY_CALL_END, .call = r->n_begun - 1, .end = end});
}

void reply_call_cut(hd_reply *r) {
    emit_end(r, HD_REPLY_CUT);
    reply_note(r, HD_REPLY_NOTE_CUT);
}

void reply_call_lost(hd_reply *r, hd_reply_note why) {
    if (r->mode == REPLY_TEXT) return;
    emit_end(r, HD_REPLY_MALFORMED);
    r->mode = REPLY_TEXT;
    reply_note(r, why);
    reply_put(r, HD_REPLY_CONTENT, r->raw + r->call_start, r->pos - r->call_start);
}

void reply_consume_to(hd_reply *r, size_t to) {
    if (r->mode == REPLY_TEXT) reply_put(r, HD_REPLY_CONTENT, r->raw + r->pos, to - r->pos);
    r->pos = to;
}
