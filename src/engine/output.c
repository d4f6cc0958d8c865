/* output.c - see output.h. Stop strings are few and short, so each is searched directly. */
#include "engine/output.h"

#include <stdlib.h>
#include <string.h>

static bool is_text(hd_delta_kind kind) {
    return kind == HD_DELTA_REASONING || kind == HD_DELTA_CONTENT;
}

/* ---- deltas ---- */

static bool grow(hd_output *o) {
    const size_t cap = o->cap_deltas ? 2 * o->cap_deltas : 8;
    hd_output_delta *deltas = realloc(o->deltas, cap * sizeof *deltas);
    if (deltas) o->deltas = deltas;
    hd_delta *shown = realloc(o->shown, cap * sizeof *shown);
    if (shown) o->shown = shown;
    if (!deltas || !shown) return false;
    o->cap_deltas = cap;
    return true;
}

static bool continues(const hd_output *o, const hd_output_delta *p) {
    if (o->n_deltas == 0 || !(is_text(p->kind) || p->kind == HD_DELTA_ARGUMENTS)) return false;
    const hd_output_delta *before = &o->deltas[o->n_deltas - 1];
    return before->kind == p->kind && before->call == p->call;
}

static void add(hd_output *o, hd_output_delta p, const char *text, size_t n) {
    p.at = o->text.n;
    p.n = n;
    if (hd_bytes_append(&o->text, text, n, NULL) != HD_OK) {
        o->out_of_memory = true;
    } else if (continues(o, &p)) {
        o->deltas[o->n_deltas - 1].n += n;
    } else if (o->n_deltas < o->cap_deltas || grow(o)) {
        o->deltas[o->n_deltas++] = p;
    } else {
        o->out_of_memory = true;
    }
}

static void on_reply(void *user, const hd_reply_event *e) {
    static const hd_delta_kind kinds[] = {
        [HD_REPLY_REASONING] = HD_DELTA_REASONING, [HD_REPLY_CONTENT] = HD_DELTA_CONTENT,
        [HD_REPLY_CALL_BEGIN] = HD_DELTA_CALL,     [HD_REPLY_ARGUMENTS] = HD_DELTA_ARGUMENTS,
        [HD_REPLY_CALL_END] = HD_DELTA_CALL_END,   [HD_REPLY_NOTE] = HD_DELTA_NOTE};
    const bool call = e->kind == HD_REPLY_CALL_BEGIN || e->kind == HD_REPLY_ARGUMENTS ||
                      e->kind == HD_REPLY_CALL_END;
    const hd_output_delta p = {.kind = kinds[e->kind],
                               .call = call ? e->call : 0,
                               .whole =
                                   e->kind == HD_REPLY_CALL_END && e->end == HD_REPLY_COMPLETE};
    const char *text = e->text ? e->text : "";
    size_t n = e->text ? e->n : 0;
    hd_output *o = user;
    engine_answer_tokens_event(&o->answer, e);
    if (e->kind == HD_REPLY_NOTE) {
        text = hd_reply_note_text(e->note);
        n = strlen(text);
    }
    add(o, p, text, n);
}

/* ---- stop strings ---- */

/* Returns where in text[n] the stop string begins that ends first, or n if there is none. */
static size_t find_stop(const hd_output_rules *r, const char *text, size_t n,
                        const char **out) {
    size_t begin = n, first_end = n + 1;
    for (size_t i = 0; i < r->n_stop; i++) {
        const size_t k = strlen(r->stop[i]);
        for (size_t end = k; end <= n && end < first_end; end++) {
            if (memcmp(text + end - k, r->stop[i], k) != 0) continue;
            first_end = end;
            begin = end - k;
            *out = r->stop[i];
        }
    }
    return begin;
}

/* Removes everything from the first stop string on. */
static void cut_at_stop(hd_output *o) {
    for (size_t i = o->n_scanned; i < o->n_deltas && !o->stop; i++) {
        hd_output_delta *p = &o->deltas[i];
        o->n_scanned = i; /* the last delta may still grow */
        if (!is_text(p->kind)) continue;
        const size_t begin = find_stop(o->rules, o->text.data + p->at, p->n, &o->stop);
        if (!o->stop) continue;
        p->n = begin + (o->rules->keep_stop ? strlen(o->stop) : 0);
        o->n_deltas = i + 1;
        o->text.n = p->at + p->n;
    }
}

/* Returns how many bytes at the end of the last delta are the beginning of a stop string. */
static size_t held_back(const hd_output *o) {
    if (o->n_deltas == 0 || !is_text(o->deltas[o->n_deltas - 1].kind)) return 0;
    const hd_output_delta *p = &o->deltas[o->n_deltas - 1];
    const char *end = o->text.data + p->at + p->n;
    size_t most = 0;
    for (size_t i = 0; i < o->rules->n_stop; i++) {
        const size_t len = strlen(o->rules->stop[i]);
        for (size_t k = len - 1 < p->n ? len - 1 : p->n; k > most; k--) {
            if (memcmp(end - k, o->rules->stop[i], k) == 0) most = k;
        }
    }
    return most;
}

/* ---- one token ---- */

hd_status hd_output_init(hd_output *o, const hd_output_rules *rules, hd_err *err) {
    *o = (hd_output){.rules = rules};
    hd_detokenizer_init(&o->detokenizer, rules->tokenizer, !rules->keep_special);
    return rules->parse ? hd_reply_open(&o->reply, rules->parse, on_reply, o, err) : HD_OK;
}

void hd_output_deinit(hd_output *o) {
    hd_reply_close(o->reply);
    hd_bytes_deinit(&o->text);
    free(o->deltas);
    free(o->shown);
    engine_answer_tokens_deinit(&o->answer);
    *o = (hd_output){0};
}

static bool listed(const int32_t *ids, int32_t n, int32_t token) {
    for (int32_t i = 0; i < n; i++) {
        if (ids[i] == token) return true;
    }
    return false;
}

/* An end-of-sequence token that does not end this choice is shown or dropped like any other
 * special token. The reply parser must not see it, because it would end the reply there. */
static hd_status parse(hd_output *o, int32_t token, hd_err *err) {
    const hd_output_rules *r = o->rules;
    size_t n;
    const uint8_t *piece = hd_tokenizer_piece(r->tokenizer, token, &n);
    const bool eos = listed(r->eos, r->n_eos, token);
    const bool marker = !eos && listed(r->markers, r->n_markers, token);
    const bool control = !marker && hd_tokenizer_is_special(r->tokenizer, token);
    const bool special = marker || (!eos && hd_tokenizer_is_added(r->tokenizer, token));
    if (r->keep_special || !control) HD_TRY(hd_reply_feed(o->reply, piece, n, special, err));
    if (hd_reply_in_reasoning(o->reply)) o->n_reasoning++;
    engine_answer_tokens_push(&o->answer, token);
    o->answer.lost = o->answer.lost || control || eos;
    return HD_OK;
}

engine_answer_tokens *hd_output_answer_tokens(hd_output *o) {
    if (!o->reply || o->stop) return NULL;
    o->answer.thought = o->rules->parse->starts_in_reasoning || o->n_reasoning > 0;
    o->answer.lost = o->answer.lost || hd_reply_in_reasoning(o->reply);
    return &o->answer;
}

static hd_status flush(hd_output *o, hd_err *err) {
    if (o->out_of_memory) return HD_FAIL(err, HD_ENOMEM, "no memory for the text of a choice");
    if (o->rules->n_stop) cut_at_stop(o);
    return HD_OK;
}

/* Adds detokenized text as content. Bytes that the detokenizer appends extend the last
 * delta. */
static void add_decoded(hd_output *o, hd_bytes *decoded) {
    if (decoded->n)
        add(o, (hd_output_delta){.kind = HD_DELTA_CONTENT}, decoded->data, decoded->n);
    hd_bytes_deinit(decoded);
}

hd_status hd_output_push(hd_output *o, int32_t token, hd_err *err) {
    if (!o->rules->tokenizer) return HD_OK;
    if (o->reply) {
        HD_TRY(parse(o, token, err));
    } else {
        hd_bytes decoded = {0};
        const hd_status st = hd_detokenizer_push(&o->detokenizer, token, &decoded, err);
        add_decoded(o, &decoded);
        HD_TRY(st);
    }
    return flush(o, err);
}

hd_status hd_output_finish(hd_output *o, hd_finish_reason reason, hd_err *err) {
    if (o->stop) return HD_OK;
    if (o->reply) {
        HD_TRY(hd_reply_finish(o->reply, reason, err));
    } else {
        hd_bytes decoded = {0};
        const hd_status st = hd_detokenizer_finish(&o->detokenizer, &decoded, err);
        add_decoded(o, &decoded);
        HD_TRY(st);
    }
    return flush(o, err);
}

void hd_output_show(hd_output *o, bool last) {
    o->held = last || o->stop ? 0 : held_back(o);
    o->n_shown = 0;
    for (size_t i = 0; i < o->n_deltas; i++) {
        const hd_output_delta *p = &o->deltas[i];
        const size_t n = p->n - (i + 1 == o->n_deltas ? o->held : 0);
        if (n == 0 && (is_text(p->kind) || p->kind == HD_DELTA_ARGUMENTS)) continue;
        o->shown[o->n_shown++] = (hd_delta){.kind = p->kind,
                                            .call = p->call,
                                            .whole = p->whole,
                                            .text = o->text.data ? o->text.data + p->at : "",
                                            .n = n};
    }
}

void hd_output_taken(hd_output *o) {
    if (o->held) {
        hd_output_delta p = o->deltas[o->n_deltas - 1];
        memmove(o->text.data, o->text.data + o->text.n - o->held, o->held);
        p.at = 0;
        p.n = o->held;
        o->deltas[0] = p;
    }
    o->n_deltas = o->held ? 1 : 0;
    o->text.n = o->held;
    o->n_scanned = o->n_shown = o->held = 0;
}
