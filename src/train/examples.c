/* examples.c - parses lines of training data and encodes them. */
#include "train/examples.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/philox.h"

enum { MOST_EXAMPLES = 1 << 26, SHUFFLE = 2 /* high counter word */ };

/* The examples while they are read: tokens and masks of all, one after another. */
typedef struct reader {
    const hd_example_rules *rules;
    char where[600]; /* "FILE: line 3" */
    hd_err *err;
    hd_ids ids;
    hd_bytes mask;
    size_t *first; /* [n] of each example */
    int32_t n, cap;
} reader;

static hd_status refuse(const reader *r, const char *why) {
    return HD_FAIL(r->err, HD_EINVAL, "%s: %s", r->where, why);
}

/* ---- the kinds of lines ---- */

/* Gives the tokens that have been added since the mask was as long as they were. */
static hd_status mark(reader *r, uint8_t loss) {
    hd_status st = HD_OK;
    while (st == HD_OK && r->mask.n < r->ids.n) {
        st = hd_bytes_append(&r->mask, &loss, 1, r->err);
    }
    return st;
}

static hd_status add_text(reader *r, const json_t *value, bool begins, uint8_t loss) {
    const hd_tokenizer *t = r->rules->tokenizer;
    const uint32_t bos = begins && hd_tokenizer_adds_bos(t) ? HD_ENCODE_BOS : 0;
    if (!json_is_string(value)) return refuse(r, "a text must be a string");
    HD_TRY(hd_tokenizer_encode(t, json_string_value(value), json_string_length(value),
                               HD_ENCODE_SPECIAL | bos, &r->ids, r->err));
    return mark(r, loss);
}

static hd_status add_end(reader *r) {
    if (r->rules->eos < 0) return HD_OK;
    HD_TRY(hd_ids_push(&r->ids, r->rules->eos, r->err));
    return mark(r, 1);
}

static hd_status add_tokens(reader *r, const json_t *tokens, const json_t *mask) {
    const size_t n = json_array_size(tokens);
    if (mask && json_array_size(mask) != n) {
        return refuse(r, "tokens and mask must be arrays of one length");
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(tokens, i),
                     *m = mask ? json_array_get(mask, i) : NULL;
        const json_int_t value = json_integer_value(id);
        if (!json_is_integer(id) || value < 0 || value >= r->rules->vocab) {
            return refuse(r, "tokens has what is no token of this model");
        }
        if (m &&
            (!json_is_integer(m) || json_integer_value(m) < 0 || json_integer_value(m) > 1)) {
            return refuse(r, "mask must have 0 and 1 alone");
        }
        HD_TRY(hd_ids_push(&r->ids, (int32_t)value, r->err));
        HD_TRY(mark(r, m ? (uint8_t)json_integer_value(m) : 1));
    }
    return HD_OK;
}

/* Encodes text [from, to) of the prompt; the pieces' borders are those of control tokens, so
 * that the ids are those of the whole. */
static hd_status encode_piece(reader *r, const hd_chat_prompt *p, size_t from, size_t to,
                              uint8_t loss) {
    hd_chat_prompt piece = {.text = p->text + from, .n = to - from};
    piece.spans = calloc((size_t)p->n_spans + 1, sizeof *piece.spans);
    if (!piece.spans) return HD_FAIL(r->err, HD_ENOMEM, "no memory for a conversation");
    size_t at = 0;
    for (int32_t i = 0; i < p->n_spans; i++) {
        const size_t end = at + p->spans[i].n;
        const size_t low = at > from ? at : from, high = end < to ? end : to;
        if (low < high) {
            hd_text_span *s = &piece.spans[piece.n_spans++];
            *s = p->spans[i];
            s->start = low - from;
            s->n = high - low;
        }
        at = end;
    }
    hd_status st = hd_chat_encode(&piece, r->rules->tokenizer, &r->ids, r->err);
    free(piece.spans);
    return st == HD_OK ? mark(r, loss) : st;
}

/* The end of an answer with the end of sequence that it was ended by. */
static size_t end_of(const reader *r, const hd_chat_prompt *p, const hd_chat_block *b) {
    size_t n;
    const uint8_t *eos = hd_tokenizer_piece(r->rules->tokenizer, r->rules->eos, &n);
    const bool follows = n > 0 && p->n - b->end >= n && memcmp(p->text + b->end, eos, n) == 0;
    return follows ? b->end + n : b->end;
}

static hd_status encode_blocks(reader *r, const hd_chat_prompt *p) {
    size_t at = 0;
    for (int32_t i = 0; i < p->n_blocks; i++) {
        const hd_chat_block *b = &p->blocks[i];
        const size_t end = end_of(r, p, b);
        if (b->begin > at) HD_TRY(encode_piece(r, p, at, b->begin, 0));
        HD_TRY(encode_piece(r, p, b->begin, end, 1));
        at = end;
    }
    return at < p->n ? encode_piece(r, p, at, p->n, 0) : HD_OK;
}

static hd_status add_messages(reader *r, json_t *line, json_t *messages) {
    const json_t *thinking = json_object_get(line, "thinking");
    const hd_chat_options options = {.encoding = r->rules->encoding,
                                     .thinking =
                                         thinking ? json_is_true(thinking) : r->rules->thinks,
                                     .no_generation_prompt = true};
    hd_conversation c = {0};
    hd_chat_prompt p = {0};
    hd_err why = {0};
    hd_status st =
        hd_chat_parse(&c, messages, json_object_get(line, "tools"), NULL, false, &why);
    if (st == HD_OK) st = hd_chat_render(&p, &c, &options, &why);
    if (st != HD_OK) {
        HD_FAIL(r->err, st, "%s: %s", r->where, why.msg);
    } else {
        st = encode_blocks(r, &p);
    }
    hd_chat_prompt_deinit(&p);
    hd_conversation_deinit(&c);
    return st;
}

/* ---- lines ---- */

static hd_status add_example(reader *r, json_t *line) {
    json_t *messages = json_object_get(line, "messages");
    const json_t *prompt = json_object_get(line, "prompt");
    const json_t *text = json_object_get(line, "text"),
                 *tokens = json_object_get(line, "tokens");
    if ((messages != NULL) + (prompt != NULL) + (text != NULL) + (tokens != NULL) != 1) {
        return refuse(r, "must have one of messages, prompt, text and tokens");
    }
    if (tokens && !json_is_array(tokens)) return refuse(r, "tokens must be an array");
    if (tokens) return add_tokens(r, tokens, json_object_get(line, "mask"));
    if (messages) return add_messages(r, line, messages);
    if (text) {
        HD_TRY(add_text(r, text, true, 1));
    } else {
        HD_TRY(add_text(r, prompt, true, 0));
        HD_TRY(add_text(r, json_object_get(line, "completion"), false, 1));
    }
    return add_end(r);
}

static hd_status check_example(reader *r, size_t first) {
    const size_t n = r->ids.n - first;
    bool any = false;
    if (n < 2) return refuse(r, "a sequence needs two tokens at least");
    if (n > (size_t)r->rules->context) {
        return HD_FAIL(r->err, HD_EINVAL, "%s: %zu tokens; the context is %d", r->where, n,
                       r->rules->context);
    }
    r->mask.data[first] = 0;
    for (size_t i = first; i < r->ids.n; i++) any = any || r->mask.data[i];
    return any ? HD_OK : refuse(r, "no token has a loss");
}

static hd_status take_line(reader *r, const char *text, size_t n) {
    json_t *line;
    HD_TRY(hd_json_parse(&line, text, n, r->where, r->err));
    if (r->n == r->cap) {
        const int32_t cap = r->cap ? 2 * r->cap : 1024;
        size_t *more = realloc(r->first, (size_t)cap * sizeof *more);
        if (!more) {
            json_decref(line);
            return HD_FAIL(r->err, HD_ENOMEM, "no memory for examples");
        }
        r->first = more;
        r->cap = cap;
    }
    const size_t first = r->ids.n;
    r->first[r->n++] = first;
    hd_status st = json_is_object(line) ? add_example(r, line) : refuse(r, "must be an object");
    json_decref(line);
    return st == HD_OK ? check_example(r, first) : st;
}

static hd_status read_lines(reader *r, const char *text, size_t n, const char *label) {
    int32_t number = 1;
    for (size_t at = 0; at < n; number++) {
        const char *end = memchr(text + at, '\n', n - at);
        const size_t length = end ? (size_t)(end - text) - at : n - at;
        snprintf(r->where, sizeof r->where, "%.500s: line %d", label, number);
        if (r->n == MOST_EXAMPLES) return refuse(r, "too many examples");
        if (length > 0) HD_TRY(take_line(r, text + at, length));
        at += length + 1;
    }
    if (r->n > 0) return HD_OK;
    return HD_FAIL(r->err, HD_EINVAL, "%s: no examples in it", label);
}

/* Hands the storage over, and lists the examples in it. */
static hd_status hand_over(hd_examples *out, reader *r) {
    out->all = calloc((size_t)r->n, sizeof *out->all);
    if (!out->all) return HD_FAIL(r->err, HD_ENOMEM, "no memory for examples");
    out->tokens = r->ids.ids;
    out->mask = (uint8_t *)r->mask.data;
    out->n = r->n;
    for (int32_t i = 0; i < r->n; i++) {
        const size_t first = r->first[i], end = i + 1 < r->n ? r->first[i + 1] : r->ids.n;
        hd_example *e = &out->all[i];
        *e = (hd_example){.tokens = out->tokens + first,
                          .mask = out->mask + first,
                          .n = (int32_t)(end - first),
                          .first = (int32_t)(end - first)};
        for (int32_t k = e->n - 1; k > 0; k--) {
            e->n_loss += e->mask[k];
            if (e->mask[k]) e->first = k;
        }
    }
    r->ids = (hd_ids){0};
    r->mask = (hd_bytes){0};
    return HD_OK;
}

hd_status hd_examples_read(hd_examples *out, const char *text, size_t n, const char *label,
                           const hd_example_rules *rules, hd_err *err) {
    reader r = {.rules = rules, .err = err};
    *out = (hd_examples){0};
    hd_status st = read_lines(&r, text, n, label);
    if (st == HD_OK) st = hand_over(out, &r);
    hd_ids_deinit(&r.ids);
    hd_bytes_deinit(&r.mask);
    free(r.first);
    return st;
}

void hd_examples_deinit(hd_examples *e) {
    free(e->all);
    free(e->tokens);
    free(e->mask);
    *e = (hd_examples){0};
}

/* ---- order ---- */

/* A number below n that belongs to (seed, epoch, round). */
static uint32_t random_below(uint64_t seed, int64_t epoch, uint32_t round, uint32_t n) {
    const uint64_t low = (uint64_t)epoch << 32 | round;
    return (uint32_t)((uint64_t)hd_philox_at(seed, SHUFFLE, low).v[0] * n >> 32);
}

/* "Swap or not" (Hoang, Morris and Rogaway, 2012): a permutation that is computed place by
 * place, so that a run goes on at any place without the ones before. */
int32_t hd_examples_shuffled(const hd_examples *e, uint64_t seed, int64_t i) {
    enum { ROUNDS = 96 };
    const uint32_t n = (uint32_t)e->n;
    const int64_t epoch = i / n;
    uint32_t x = (uint32_t)(i % n);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const uint32_t partner = (random_below(seed, epoch, round, n) + n - x) % n;
        const uint32_t larger = partner > x ? partner : x;
        const uint64_t low = (uint64_t)epoch << 32 | (ROUNDS + round);
        if (hd_philox_at(seed, SHUFFLE + 1 + (uint64_t)larger, low).v[1] & 1) x = partner;
    }
    return (int32_t)x;
}
