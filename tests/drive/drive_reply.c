/* drive_reply.c - the reply parser, line by line, for tests in other languages.
 *
 * Reads one JSON object per line: format (a number), reasoning (the prompt ended inside it), off
 * (thinking is off), tools, text, and slices: the bytes of each piece that is fed; the last one
 * has the rest. Answers with one line: reasoning, content, calls of name and arguments, notes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "chat/reply.h"

typedef struct reply {
    hd_bytes reasoning, content, arguments;
    json_t *calls, *notes;
    hd_err err;
} reply;

static void append(reply *r, hd_bytes *to, const hd_reply_event *e) {
    if (r->err.status == HD_OK) (void)hd_bytes_append(to, e->text, e->n, &r->err);
}

static void on_event(void *user, const hd_reply_event *e) {
    reply *r = user;
    if (e->kind == HD_REPLY_REASONING) append(r, &r->reasoning, e);
    if (e->kind == HD_REPLY_CONTENT) append(r, &r->content, e);
    if (e->kind == HD_REPLY_ARGUMENTS) append(r, &r->arguments, e);
    if (e->kind == HD_REPLY_NOTE) {
        json_array_append_new(r->notes, json_string(hd_reply_note_text(e->note)));
    }
    if (e->kind == HD_REPLY_CALL_BEGIN) {
        r->arguments.n = 0;
        json_array_append_new(r->calls, json_pack("{s:s%}", "name", e->text, e->n));
    }
    if (e->kind == HD_REPLY_CALL_END) {
        json_object_set_new(
            json_array_get(r->calls, json_array_size(r->calls) - 1), "arguments",
            json_stringn(r->arguments.n ? r->arguments.data : "", r->arguments.n));
    }
}

static hd_status feed(hd_reply *p, const json_t *line, hd_err *err) {
    const char *text = json_string_value(json_object_get(line, "text"));
    size_t left = json_string_length(json_object_get(line, "text")), i;
    json_t *slice;
    json_array_foreach(json_object_get(line, "slices"), i, slice) {
        const size_t n = (size_t)json_integer_value(slice);
        if (n > left) break;
        HD_TRY(hd_reply_feed(p, text, n, false, err));
        text += n;
        left -= n;
    }
    HD_TRY(hd_reply_feed(p, text, left, false, err));
    return hd_reply_finish(p, HD_FINISH_STOP, err);
}

static hd_status parse(reply *r, json_t *line, const hd_reply_tools *tools, hd_err *err) {
    hd_reply *p;
    const hd_reply_options options = {
        .format = (hd_reply_format)json_integer_value(json_object_get(line, "format")),
        .starts_in_reasoning = json_is_true(json_object_get(line, "reasoning")),
        .thinking_off = json_is_true(json_object_get(line, "off")),
        .parse_tools = tools->n_tools > 0,
        .tools = tools->tools,
        .n_tools = tools->n_tools};
    HD_TRY(hd_reply_open(&p, &options, on_event, r, err));
    const hd_status st = feed(p, line, err);
    hd_reply_close(p);
    return st != HD_OK ? st : r->err.status;
}

static json_t *answer(json_t *line) {
    reply r = {.calls = json_array(), .notes = json_array()};
    hd_reply_tools tools = {0};
    hd_err err = {0};
    hd_status st = hd_reply_tools_init(&tools, json_object_get(line, "tools"), &err);
    if (st == HD_OK) st = parse(&r, line, &tools, &err);
    json_t *out = st != HD_OK ? json_pack("{s:s}", "error", err.msg)
                              : json_pack("{s:s%, s:s%, s:O, s:O}", "reasoning",
                                          r.reasoning.n ? r.reasoning.data : "", r.reasoning.n,
                                          "content", r.content.n ? r.content.data : "",
                                          r.content.n, "calls", r.calls, "notes", r.notes);
    json_decref(r.calls);
    json_decref(r.notes);
    hd_reply_tools_deinit(&tools);
    hd_bytes_deinit(&r.reasoning);
    hd_bytes_deinit(&r.content);
    hd_bytes_deinit(&r.arguments);
    return out;
}

int main(void) {
    char *text = NULL;
    size_t size = 0;
    ssize_t n;
    while ((n = getline(&text, &size, stdin)) > 0) {
        json_error_t why;
        json_t *line = hd_json_read(text, (size_t)n, JSON_ALLOW_NUL, &why);
        json_t *out = line ? answer(line) : json_pack("{s:s}", "error", why.text);
        char *text_out = out ? hd_json_write(out, JSON_COMPACT) : NULL;
        puts(text_out ? text_out : "{\"error\":\"no memory\"}");
        fflush(stdout);
        free(text_out);
        json_decref(out);
        json_decref(line);
    }
    free(text);
    return 0;
}
