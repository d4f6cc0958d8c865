/* chat.c - the chat templates by name, and helpers to write prompt text. */
#include "chat/chat_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum { FIRST_BYTES = 4096, FIRST_SPANS = 64, FIRST_BLOCKS = 8, DEFAULT_MAX_BYTES = 256 << 20 };

static const struct {
    const char *name;
    chat_render_fn *render;
    bool thinks; /* the default if the request does not say */
} encodings[] = {
    [HD_CHAT_V2] = {"v2",            chat_render_v2,  false},
    [HD_CHAT_V3] = {"v3",            chat_render_v3,  false},
    [HD_CHAT_V3_0324] = {"v3-0324",       chat_render_v3,  false},
    [HD_CHAT_R1] = {"r1",            chat_render_v3,  true },
    [HD_CHAT_R1_0528] = {"r1-0528",       chat_render_v3,  true },
    [HD_CHAT_V31] = {"v3.1",          chat_render_v31, false},
    [HD_CHAT_V31_TERMINUS] = {"v3.1-terminus", chat_render_v31, false},
    [HD_CHAT_V32] = {"v3.2",          chat_render_v32, false},
    [HD_CHAT_V4] = {"v4",            chat_render_v4,  false},
    [HD_CHAT_V4_0731] = {"v4-0731",       chat_render_v4,  false},
    [HD_CHAT_V41] = {"v4.1",          chat_render_v4,  true },
};
_Static_assert(HD_LEN(encodings) == HD_CHAT_N_ENCODINGS, "one row per encoding");

const char *hd_chat_encoding_name(hd_chat_encoding encoding) {
    return encodings[encoding].name;
}

bool hd_chat_thinks(hd_chat_encoding encoding) {
    return encodings[encoding].thinks;
}

static void fail_memory(chat_out *o) {
    o->status = HD_FAIL(o->err, HD_ENOMEM, "no memory for a prompt of %zu bytes", o->prompt->n);
}

static bool reserve_text(chat_out *o, size_t more) {
    hd_chat_prompt *p = o->prompt;
    size_t need;
    if (!hd_add_size(p->n, more, &need) || need > o->max) {
        o->status = HD_FAIL(o->err, HD_EINVAL, "the prompt is larger than %zu bytes", o->max);
        return false;
    }
    if (need <= o->cap) return true;
    size_t cap = o->cap ? o->cap : FIRST_BYTES;
    while (cap < need) cap = cap > o->max / 2 ? o->max : cap * 2;
    char *text = realloc(p->text, cap);
    if (!text) {
        fail_memory(o);
        return false;
    }
    p->text = text;
    o->cap = cap;
    return true;
}

static bool reserve_span(chat_out *o) {
    hd_chat_prompt *p = o->prompt;
    if (p->n_spans < o->span_cap) return true;
    if (o->span_cap > INT32_MAX / 2) {
        fail_memory(o);
        return false;
    }
    int32_t cap = o->span_cap ? o->span_cap * 2 : FIRST_SPANS;
    hd_text_span *spans = realloc(p->spans, (size_t)cap * sizeof *spans);
    if (!spans) {
        fail_memory(o);
        return false;
    }
    p->spans = spans;
    o->span_cap = cap;
    return true;
}

static void put(chat_out *o, const char *data, size_t n, bool is_control) {
    hd_chat_prompt *p = o->prompt;
    if (n == 0 || o->status != HD_OK || !reserve_text(o, n)) return;
    if (p->n_spans == 0 || p->spans[p->n_spans - 1].is_control != is_control) {
        if (!reserve_span(o)) return;
        p->spans[p->n_spans++] = (hd_text_span){.start = p->n, .is_control = is_control};
    }
    memcpy(p->text + p->n, data, n);
    p->n += n;
    p->spans[p->n_spans - 1].n += n;
}

void chat_control(chat_out *o, const char *literal) {
    put(o, literal, strlen(literal), true);
}

void chat_content(chat_out *o, hd_chat_text text) {
    put(o, text.data, text.n, false);
}

void chat_content_bytes(chat_out *o, const char *data, size_t n) {
    put(o, data, n, false);
}

void chat_parts(chat_out *o, const hd_chat_message *m) {
    for (int32_t i = 0; i < m->n_parts; i++) {
        if (i > 0) chat_content_bytes(o, o->part_gap, strlen(o->part_gap));
        chat_content(o, m->parts[i].text);
    }
}

void chat_begin_block(chat_out *o, const hd_chat_message *m, int32_t n_calls) {
    hd_chat_prompt *p = o->prompt;
    if (o->status != HD_OK) return;
    if (p->n_blocks == o->block_cap) {
        const int32_t cap = o->block_cap ? 2 * o->block_cap : FIRST_BLOCKS;
        hd_chat_block *blocks = realloc(p->blocks, (size_t)cap * sizeof *blocks);
        if (!blocks) {
            fail_memory(o);
            return;
        }
        p->blocks = blocks;
        o->block_cap = cap;
    }
    p->blocks[p->n_blocks++] =
        (hd_chat_block){.message = m->index, .begin = p->n, .n_calls = n_calls};
}

/* NULL after a failure; the result is not used then. */
static hd_chat_block *last_block(const chat_out *o) {
    return o->status == HD_OK ? &o->prompt->blocks[o->prompt->n_blocks - 1] : NULL;
}

void chat_end_block(chat_out *o) {
    hd_chat_block *b = last_block(o);
    if (b) b->end = o->prompt->n;
}

void chat_reasoning(chat_out *o, const hd_chat_message *m) {
    chat_content(o, m->reasoning);
    hd_chat_block *b = last_block(o);
    if (b) b->thought = true;
    if (b) b->n_reasoning = o->prompt->n - b->begin;
    chat_control(o, CHAT_END_THINK);
}

void chat_system_texts(const chat_job *job, bool *any) {
    *any = false;
    for (int32_t i = 0; i < job->c->n; i++) {
        const hd_chat_message *m = &job->c->messages[i];
        if (m->role != HD_CHAT_SYSTEM && m->role != HD_CHAT_DEVELOPER) continue;
        if (*any) chat_control(job->out, "\n\n");
        chat_parts(job->out, m);
        *any = true;
    }
}

void chat_arguments(chat_out *o, const hd_chat_call *call) {
    if (call->object) {
        pyjson_write(o, call->object, 0);
    } else {
        chat_content(o, call->arguments);
    }
}

/* Returns where the text behind the first or last </think> begins; 0 if there is none. */
static size_t after_think(hd_chat_text t, bool last) {
    const size_t tag = strlen(CHAT_END_THINK);
    size_t found = 0;
    for (size_t i = 0; i + tag <= t.n; i++) {
        if (t.data[i] != '<' || memcmp(t.data + i, CHAT_END_THINK, tag) != 0) continue;
        found = i + tag;
        if (!last) break;
    }
    return found;
}

static void note_content(chat_out *o, size_t begin) {
    hd_chat_block *b = last_block(o);
    if (b) b->content = begin;
    if (b) b->n_content = o->prompt->n - begin;
}

void chat_answer(chat_out *o, const hd_chat_message *m, chat_think_cut cut) {
    const size_t begin = o->prompt->n;
    int32_t first = 0;
    size_t skip = 0;
    for (int32_t i = 0; cut != CHAT_CUT_NONE && i < m->n_parts; i++) {
        size_t at = after_think(m->parts[i].text, cut == CHAT_CUT_LAST);
        if (at == 0) continue;
        first = i;
        skip = at;
        if (cut == CHAT_CUT_FIRST) break;
    }
    for (int32_t i = first; i < m->n_parts; i++) {
        hd_chat_text t = m->parts[i].text;
        if (i > first) chat_content_bytes(o, o->part_gap, strlen(o->part_gap));
        chat_content_bytes(o, t.data + skip, t.n - skip);
        skip = 0;
    }
    note_content(o, begin);
}

hd_status chat_fail(hd_err *err, hd_status status, hd_field field, const char *why, ...) {
    char text[sizeof err->msg];
    va_list args;
    va_start(args, why);
    vsnprintf(text, sizeof text, why, args);
    va_end(args);
    return HD_REFUSE(err, status, NULL, field.path, "%s: %s", field.path, text);
}

hd_status chat_refuse(const chat_job *job, const hd_chat_message *m, const char *field,
                      const char *why) {
    return chat_fail(job->err, HD_EUNSUPPORTED, hd_field_of("messages[%d].%s", m->index, field),
                     "the %s encoding %s", encodings[job->options->encoding].name, why);
}

/* Refuses what only the formats of V4 have, and content that is not text. */
static hd_status check_messages(const chat_job *job) {
    hd_chat_encoding e = job->options->encoding;
    bool v4 = e >= HD_CHAT_V4;
    bool names_parts = v4 && e != HD_CHAT_V41; /* results show which part is no text */
    for (int32_t i = 0; i < job->c->n; i++) {
        const hd_chat_message *m = &job->c->messages[i];
        if (m->role == HD_CHAT_LATEST_REMINDER && !v4) {
            return chat_refuse(job, m, "role", "has no role 'latest_reminder'");
        }
        if (m->task != HD_TASK_NONE && !v4) return chat_refuse(job, m, "task", "has no tasks");
        if (m->wo_eos && !v4) return chat_refuse(job, m, "wo_eos", "always ends an answer");
        if (e < HD_CHAT_V32 && m->tools) {
            return chat_refuse(job, m, "tools", "takes tools from the request only");
        }
        if (e < HD_CHAT_V32 && m->response_format) {
            return chat_refuse(job, m, "response_format", "has no response format");
        }
        for (int32_t p = 0; p < m->n_parts; p++) {
            if (!m->parts[p].unsupported || (names_parts && m->role == HD_CHAT_TOOL)) {
                continue;
            }
            return chat_fail(job->err, HD_EUNSUPPORTED,
                             hd_field_of("messages[%d].content[%d].type", m->index, p),
                             "'%.*s' is not supported, only 'text'",
                             (int)(m->parts[p].text.n < 64 ? m->parts[p].text.n : 64),
                             m->parts[p].text.data);
        }
    }
    if (e < HD_CHAT_V32 && job->c->response_format) {
        return chat_fail(job->err, HD_EUNSUPPORTED, hd_field_of("response_format"),
                         "the %s encoding has no response format", encodings[e].name);
    }
    if (job->options->effort != HD_EFFORT_NONE && !v4) {
        return chat_fail(job->err, HD_EUNSUPPORTED, hd_field_of("effort"),
                         "the %s encoding has no levels of it", encodings[e].name);
    }
    if (job->options->effort_number != 0 && e != HD_CHAT_V41) {
        return chat_fail(job->err, HD_EUNSUPPORTED, hd_field_of("effort"),
                         "the %s encoding has no numbers for it", encodings[e].name);
    }
    if (job->options->effort_number < 0 || job->options->effort_number > HD_MAX_EFFORT) {
        return chat_fail(job->err, HD_EINVAL, hd_field_of("effort"), "%d is not from 1 to 100",
                         job->options->effort_number);
    }
    return HD_OK;
}

hd_status hd_chat_render(hd_chat_prompt *out, const hd_conversation *c,
                         const hd_chat_options *options, hd_err *err) {
    *out = (hd_chat_prompt){0};
    chat_out o = {.prompt = out,
                  .part_gap = options->encoding == HD_CHAT_V41 ? "\n\n" : "\n",
                  .max = options->max_bytes ? options->max_bytes : DEFAULT_MAX_BYTES,
                  .err = err};
    chat_job job = {.c = c, .options = options, .out = &o, .err = err};
    hd_status st = check_messages(&job);
    if (st == HD_OK) st = encodings[options->encoding].render(&job);
    if (st == HD_OK) st = o.status;
    free(o.frames);
    if (st != HD_OK) hd_chat_prompt_deinit(out);
    return st;
}

void hd_chat_prompt_deinit(hd_chat_prompt *p) {
    for (int32_t i = 0; i < p->n_blocks; i++) hd_ids_deinit(&p->blocks[i].tokens);
    free(p->text);
    free(p->spans);
    free(p->blocks);
    *p = (hd_chat_prompt){0};
}
