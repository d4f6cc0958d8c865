/* token_history.c - see token_history.h. A hash table by the keyed hash of the prompt, with
 * least-recently-used eviction. Salts and texts of answers are compared too. */
#include "engine/token_history.h"

#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/siphash.h"

enum { BUCKETS = 4096 };

typedef struct entry {
    struct entry *chain;         /* next entry of the same bucket */
    struct entry *newer, *older; /* by use */
    uint64_t salt, key;
    size_t bytes;
    engine_answer_tokens answer;
} entry;

struct engine_token_history {
    pthread_mutex_t lock; /* guards the fields below */
    entry *buckets[BUCKETS];
    entry *newest, *oldest;
    size_t bytes, max_bytes;
};

/* ---- collecting ---- */

static void append(engine_answer_tokens *s, hd_bytes *to, const char *text, size_t n) {
    if (hd_bytes_append(to, text, n, NULL) != HD_OK) s->lost = true;
}

/* Ends a name or arguments with a NUL, which neither can contain when a client sends it
 * back. */
static void append_end(engine_answer_tokens *s) {
    append(s, &s->calls, "", 1);
}

void engine_answer_tokens_event(engine_answer_tokens *s, const hd_reply_event *e) {
    switch (e->kind) {
    case HD_REPLY_REASONING:
        append(s, &s->reasoning, e->text, e->n);
        break;
    case HD_REPLY_CONTENT:
        append(s, &s->content, e->text, e->n);
        break;
    case HD_REPLY_CALL_BEGIN:
        s->lost = s->lost || s->in_call;
        s->in_call = true;
        s->n_calls++;
        append(s, &s->calls, e->text, e->n);
        append_end(s);
        break;
    case HD_REPLY_ARGUMENTS:
        append(s, &s->calls, e->text, e->n);
        break;
    case HD_REPLY_CALL_END:
        s->in_call = e->end != HD_REPLY_COMPLETE;
        append_end(s);
        break;
    case HD_REPLY_NOTE:
        break;
    }
}

void engine_answer_tokens_push(engine_answer_tokens *s, int32_t token) {
    if (hd_ids_push(&s->tokens, token, NULL) != HD_OK) s->lost = true;
}

void engine_answer_tokens_deinit(engine_answer_tokens *s) {
    hd_ids_deinit(&s->tokens);
    hd_bytes_deinit(&s->reasoning);
    hd_bytes_deinit(&s->content);
    hd_bytes_deinit(&s->calls);
    *s = (engine_answer_tokens){0};
}

/* ---- the entries, under the lock ---- */

static entry **bucket_of(engine_token_history *r, uint64_t key) {
    return &r->buckets[(key ^ key >> 32) % BUCKETS];
}

static void unlink_use(engine_token_history *r, entry *e) {
    if (e->newer) e->newer->older = e->older;
    if (e->older) e->older->newer = e->newer;
    if (r->newest == e) r->newest = e->older;
    if (r->oldest == e) r->oldest = e->newer;
}

static void link_newest(engine_token_history *r, entry *e) {
    e->newer = NULL;
    e->older = r->newest;
    *(r->newest ? &r->newest->newer : &r->oldest) = e;
    r->newest = e;
}

static void forget(engine_token_history *r, entry *e) {
    entry **at = bucket_of(r, e->key);
    while (*at && *at != e) at = &(*at)->chain;
    if (*at) *at = e->chain;
    unlink_use(r, e);
    r->bytes -= e->bytes;
    engine_answer_tokens_deinit(&e->answer);
    free(e);
}

hd_status engine_token_history_open(engine_token_history **out, size_t max_bytes, hd_err *err) {
    engine_token_history *r = calloc(1, sizeof *r);
    *out = r;
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory for the token history");
    pthread_mutex_init(&r->lock, NULL);
    r->max_bytes = max_bytes;
    return HD_OK;
}

void engine_token_history_close(engine_token_history *r) {
    if (!r) return;
    while (r->newest) forget(r, r->newest);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

static bool same_bytes(const hd_bytes *a, const char *text, size_t n) {
    return a->n == n && (n == 0 || memcmp(a->data, text, n) == 0);
}

static bool same_answer(const engine_answer_tokens *a, const engine_answer_tokens *b) {
    return a->thought == b->thought && a->n_calls == b->n_calls &&
           same_bytes(&a->reasoning, b->reasoning.data, b->reasoning.n) &&
           same_bytes(&a->content, b->content.data, b->content.n) &&
           same_bytes(&a->calls, b->calls.data, b->calls.n);
}

static bool same_prompt(const entry *e, uint64_t salt, uint64_t key) {
    return e->salt == salt && e->key == key;
}

/* If one answer is stored with two tokenizations, the later is kept. */
static void forget_same(engine_token_history *r, const entry *like) {
    entry *e = *bucket_of(r, like->key);
    while (e &&
           !(same_prompt(e, like->salt, like->key) && same_answer(&e->answer, &like->answer))) {
        e = e->chain;
    }
    if (e) forget(r, e);
}

static void add(engine_token_history *r, entry *e) {
    entry **bucket = bucket_of(r, e->key);
    forget_same(r, e);
    e->chain = *bucket;
    *bucket = e;
    link_newest(r, e);
    r->bytes += e->bytes;
    while (r->oldest && r->bytes > r->max_bytes) forget(r, r->oldest);
}

void engine_token_history_keep(engine_token_history *r, uint64_t salt, uint64_t key,
                               engine_answer_tokens *answer) {
    entry *e =
        answer->lost || answer->in_call || !answer->tokens.n ? NULL : calloc(1, sizeof *e);
    if (!e) {
        engine_answer_tokens_deinit(answer);
        return;
    }
    *e = (entry){.salt = salt, .key = key, .answer = *answer};
    *answer = (engine_answer_tokens){0};
    e->bytes = sizeof *e + e->answer.tokens.cap * sizeof *e->answer.tokens.ids +
               e->answer.reasoning.cap + e->answer.content.cap + e->answer.calls.cap;
    pthread_mutex_lock(&r->lock);
    add(r, e);
    pthread_mutex_unlock(&r->lock);
}

/* ---- comparing ---- */

static json_t *parse(const char *text, size_t n) {
    return hd_json_read(text, n, JSON_REJECT_DUPLICATES, NULL);
}

/* Compares as text, and if that differs as JSON, because some APIs carry arguments as an
 * object. */
static bool same_arguments(const hd_chat_call *call, const char *text, size_t n) {
    if (!call->object && call->arguments.n == n && memcmp(call->arguments.data, text, n) == 0) {
        return true;
    }
    json_t *was = parse(text, n);
    json_t *is = call->object ? json_incref(call->object)
                              : parse(call->arguments.data, call->arguments.n);
    const bool same = was && is && json_equal(was, is);
    json_decref(was);
    json_decref(is);
    return same;
}

static bool same_calls(const engine_answer_tokens *s, const hd_chat_message *m) {
    const char *at = s->calls.data ? s->calls.data : "", *end = at + s->calls.n;
    for (int32_t i = 0; i < m->n_calls; i++) {
        const hd_chat_call *call = &m->calls[i];
        const char *name_end = memchr(at, '\0', (size_t)(end - at));
        const char *arguments = name_end ? name_end + 1 : end;
        const char *arguments_end = memchr(arguments, '\0', (size_t)(end - arguments));
        if (!arguments_end || (size_t)(name_end - at) != call->name.n ||
            memcmp(at, call->name.data, call->name.n) != 0 ||
            !same_arguments(call, arguments, (size_t)(arguments_end - arguments))) {
            return false;
        }
        at = arguments_end + 1;
    }
    return at == end;
}

/* Whether the rendered block contains exactly the texts of this answer. */
static bool is_same(const engine_answer_tokens *s, const hd_chat_prompt *p,
                    const hd_chat_block *b, const hd_chat_message *m) {
    return s->thought == b->thought && s->n_calls == b->n_calls &&
           same_bytes(&s->reasoning, p->text + b->begin, b->n_reasoning) &&
           same_bytes(&s->content, p->text + b->content, b->n_content) &&
           (s->n_calls == 0 || (m->n_calls == s->n_calls && same_calls(s, m)));
}

/* ---- matching ---- */

/* Copies the stored tokens of a block. */
static hd_status take(engine_token_history *r, uint64_t salt, uint64_t key,
                      const hd_chat_message *m, const hd_chat_prompt *p, hd_chat_block *b,
                      hd_err *err) {
    hd_status st = HD_OK;
    pthread_mutex_lock(&r->lock);
    entry *e = *bucket_of(r, key);
    while (e && !(same_prompt(e, salt, key) && is_same(&e->answer, p, b, m))) e = e->chain;
    if (e) {
        unlink_use(r, e);
        link_newest(r, e);
        st = hd_ids_append(&b->tokens, e->answer.tokens.ids, e->answer.tokens.n, err);
    }
    pthread_mutex_unlock(&r->lock);
    return st;
}

hd_status engine_token_history_fill(engine_token_history *r, uint64_t salt,
                                    const hd_conversation *c, hd_chat_prompt *p, uint64_t *key,
                                    hd_err *err) {
    hd_siphash h;
    size_t at = 0;
    hd_siphash_init_secret(&h);
    hd_siphash_add(&h, &salt, sizeof salt);
    for (int32_t i = 0; i < p->n_blocks; i++) {
        hd_chat_block *b = &p->blocks[i];
        hd_siphash_add(&h, p->text + at, b->begin - at);
        at = b->begin;
        HD_TRY(take(r, salt, hd_siphash_value(&h), &c->messages[b->message], p, b, err));
    }
    hd_siphash_add(&h, p->text + at, p->n - at);
    *key = hd_siphash_value(&h);
    return HD_OK;
}
