/* grammar_cache.c - see grammar_cache.h. A list, because few grammars are kept. */
#include "engine/grammar_cache.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_IDLE_BYTES = 32 << 20, MAX_IDLE = 128 };

struct engine_grammar {
    hd_bytes key; /* a key_head, tools, text and choices */
    hd_grammar *compiled;
    int32_t users;
    engine_grammar *prev, *next; /* linked by use, the most recently used first */
};

struct engine_grammar_cache {
    pthread_mutex_t lock;
    engine_grammar *first, *last;
};

hd_status engine_grammar_cache_open(engine_grammar_cache **out, hd_err *err) {
    *out = calloc(1, sizeof **out);
    if (!*out) return HD_FAIL(err, HD_ENOMEM, "no memory for grammars");
    pthread_mutex_init(&(*out)->lock, NULL);
    return HD_OK;
}

static void drop(engine_grammar *grammar) {
    if (!grammar) return;
    hd_grammar_close(grammar->compiled);
    hd_bytes_deinit(&grammar->key);
    free(grammar);
}

void engine_grammar_cache_close(engine_grammar_cache *f) {
    if (!f) return;
    for (engine_grammar *grammar = f->first, *next; grammar; grammar = next) {
        next = grammar->next;
        drop(grammar);
    }
    pthread_mutex_destroy(&f->lock);
    free(f);
}

const hd_grammar *engine_grammar_of(const engine_grammar *grammar) {
    return grammar->compiled;
}

const hd_bytes *engine_grammar_key(const engine_grammar *grammar) {
    return &grammar->key;
}

/* ---- the list, under the lock ---- */

static void unlink_grammar(engine_grammar_cache *f, engine_grammar *grammar) {
    *(grammar->prev ? &grammar->prev->next : &f->first) = grammar->next;
    *(grammar->next ? &grammar->next->prev : &f->last) = grammar->prev;
    grammar->prev = grammar->next = NULL;
}

static void link_first(engine_grammar_cache *f, engine_grammar *grammar) {
    grammar->next = f->first;
    *(f->first ? &f->first->prev : &f->last) = grammar;
    f->first = grammar;
}

static engine_grammar *find(engine_grammar_cache *f, const hd_bytes *key) {
    for (engine_grammar *grammar = f->first; grammar; grammar = grammar->next) {
        if (grammar->key.n != key->n || memcmp(grammar->key.data, key->data, key->n) != 0)
            continue;
        unlink_grammar(f, grammar);
        link_first(f, grammar);
        grammar->users++;
        return grammar;
    }
    return NULL;
}

/* Frees unused grammars beyond the bounds, the least recently used first. */
static void trim(engine_grammar_cache *f) {
    size_t bytes = 0;
    int32_t n = 0;
    for (engine_grammar *grammar = f->first, *next; grammar; grammar = next) {
        next = grammar->next;
        if (grammar->users) continue;
        bytes += hd_grammar_bytes(grammar->compiled) + grammar->key.n;
        if (++n <= MAX_IDLE && bytes <= MAX_IDLE_BYTES) continue;
        unlink_grammar(f, grammar);
        drop(grammar);
    }
}

/* ---- what a request needs ---- */

static hd_status fill_args(hd_grammar_args *args, size_t *lengths, const hd_request *g,
                           const hd_grammar_calls *calls, hd_err *err) {
    static const hd_grammar_kind kinds[] = {[HD_FORMAT_FREE] = HD_GRAMMAR_CALLS,
                                            [HD_FORMAT_JSON] = HD_GRAMMAR_JSON_OBJECT,
                                            [HD_FORMAT_JSON_SCHEMA] = HD_GRAMMAR_JSON_SCHEMA,
                                            [HD_FORMAT_REGEX] = HD_GRAMMAR_REGEX,
                                            [HD_FORMAT_CHOICE] = HD_GRAMMAR_CHOICE};
    *args = (hd_grammar_args){.kind = kinds[g->response_format], .calls = *calls};
    if (g->response_format == HD_FORMAT_JSON_SCHEMA || g->response_format == HD_FORMAT_REGEX) {
        if (!g->format_text)
            return HD_FAIL(err, HD_EINVAL, "the response format has no format_text");
        args->text = g->format_text;
        args->n = strlen(g->format_text);
    }
    if (g->response_format == HD_FORMAT_CHOICE) {
        for (size_t i = 0; i < g->n_choices; i++) lengths[i] = strlen(g->choices[i]);
        args->choices = g->choices;
        args->choice_bytes = lengths;
        args->n_choices = (int32_t)g->n_choices;
    }
    return HD_OK;
}

typedef struct key_head {
    uint32_t kind, format, marks, flagged, hold, n_tools, n_text;
    int32_t most, n_choices;
} key_head;

static hd_status make_key(hd_bytes *key, const hd_grammar_args *a, hd_err *err) {
    const hd_grammar_calls *c = &a->calls;
    const key_head head = {.kind = (uint32_t)a->kind,
                           .format = (uint32_t)c->format,
                           .marks = c->marks,
                           .flagged = c->flagged,
                           .hold = c->hold,
                           .n_tools = (uint32_t)c->n_tools,
                           .n_text = (uint32_t)a->n,
                           .most = c->most,
                           .n_choices = a->n_choices};
    HD_TRY(hd_bytes_append(key, &head, sizeof head, err));
    HD_TRY(hd_bytes_append(key, c->tools, c->n_tools, err));
    HD_TRY(hd_bytes_append(key, a->text, a->n, err));
    for (int32_t i = 0; i < a->n_choices; i++) { /* the NULs separate the strings */
        HD_TRY(hd_bytes_append(key, a->choices[i], a->choice_bytes[i] + 1, err));
    }
    return HD_OK;
}

static hd_status compile(engine_grammar **out, hd_bytes *key, const hd_grammar_args *args,
                         hd_err *err) {
    engine_grammar *grammar = calloc(1, sizeof *grammar);
    *out = NULL;
    if (!grammar) return HD_FAIL(err, HD_ENOMEM, "no memory for a grammar");
    const hd_status st = hd_grammar_open(&grammar->compiled, args, err);
    if (st != HD_OK) {
        free(grammar);
        return st;
    }
    grammar->key = *key;
    *key = (hd_bytes){0};
    grammar->users = 1;
    *out = grammar;
    return HD_OK;
}

/* Two threads may compile the same grammar at the same time; then one of the two is freed. */
static hd_status find_or_compile(engine_grammar_cache *f, engine_grammar **out, hd_bytes *key,
                                 const hd_grammar_args *args, hd_err *err) {
    pthread_mutex_lock(&f->lock);
    *out = find(f, key);
    pthread_mutex_unlock(&f->lock);
    if (*out) return HD_OK;
    engine_grammar *made;
    HD_TRY(compile(&made, key, args, err));
    pthread_mutex_lock(&f->lock);
    *out = find(f, &made->key);
    if (!*out) {
        *out = made;
        link_first(f, made);
        made = NULL;
    }
    pthread_mutex_unlock(&f->lock);
    drop(made);
    return HD_OK;
}

hd_status engine_grammar_cache_acquire(engine_grammar_cache *f, engine_grammar **out,
                                       const hd_request *g, const hd_grammar_calls *calls,
                                       hd_err *err) {
    hd_grammar_args args;
    hd_bytes key = {0};
    *out = NULL;
    if (g->n_choices > HD_GRAMMAR_MAX_CHOICES) {
        return HD_REFUSE(err, HD_EINVAL, "schema_too_complex", NULL,
                         "schema_too_complex: %zu choices; at most %d", g->n_choices,
                         HD_GRAMMAR_MAX_CHOICES);
    }
    size_t *lengths = calloc(g->n_choices + 1, sizeof *lengths);
    if (!lengths) return HD_FAIL(err, HD_ENOMEM, "no memory for %zu choices", g->n_choices);
    hd_status st = fill_args(&args, lengths, g, calls, err);
    if (st == HD_OK) st = make_key(&key, &args, err);
    if (st == HD_OK) st = find_or_compile(f, out, &key, &args, err);
    hd_bytes_deinit(&key);
    free(lengths);
    return st;
}

/* ---- by the key alone ---- */

static hd_status refuse_key(hd_err *err) {
    return HD_FAIL(err, HD_EPEER, "another process sent a grammar that cannot be right");
}

/* Choices are the rest of the key, each with its NUL. */
static bool read_choices(hd_grammar_args *a, const char **choices, size_t *lengths,
                         const char *at, size_t n) {
    for (int32_t i = 0; i < a->n_choices; i++) {
        const char *end = n ? memchr(at, 0, n) : NULL;
        if (!end) return false;
        choices[i] = at;
        lengths[i] = (size_t)(end - at);
        n -= lengths[i] + 1;
        at = end + 1;
    }
    a->choices = choices;
    a->choice_bytes = lengths;
    return n == 0;
}

static bool read_key(hd_grammar_args *a, const key_head *h, const char *at, size_t n) {
    if (h->kind > HD_GRAMMAR_CALLS || h->format > HD_REPLY_V41 || h->n_tools > n ||
        h->n_text > n - h->n_tools || h->n_choices < 0 ||
        h->n_choices > HD_GRAMMAR_MAX_CHOICES) {
        return false;
    }
    *a = (hd_grammar_args){
        .kind = (hd_grammar_kind)h->kind,
        .text = h->n_text ? at + h->n_tools : NULL,
        .n = h->n_text,
        .n_choices = h->n_choices,
        .calls = {.tools = h->n_tools ? at : NULL,
                  .n_tools = h->n_tools,
                  .format = (hd_reply_format)h->format,
                  .marks = h->marks,
                  .flagged = h->flagged != 0,
                  .hold = h->hold != 0,
                  .most = h->most}
    };
    return true;
}

hd_status engine_grammar_cache_acquire_key(engine_grammar_cache *f, engine_grammar **out,
                                           const char *key, size_t n, hd_err *err) {
    key_head head;
    hd_grammar_args args;
    hd_bytes copy = {0};
    *out = NULL;
    if (n < sizeof head) return refuse_key(err);
    memcpy(&head, key, sizeof head);
    const char *body = key + sizeof head;
    const size_t n_body = n - sizeof head;
    if (!read_key(&args, &head, body, n_body)) return refuse_key(err);
    const size_t n_lists = (size_t)args.n_choices + 1, before = args.n + head.n_tools;
    const char **choices = calloc(n_lists, sizeof(char *));
    size_t *lengths = calloc(n_lists, sizeof *lengths);
    hd_status st = HD_OK;
    if (!choices || !lengths) {
        st = HD_FAIL(err, HD_ENOMEM, "no memory for %d choices", args.n_choices);
    } else if (!read_choices(&args, choices, lengths, body + before, n_body - before)) {
        st = refuse_key(err);
    }
    if (st == HD_OK) st = hd_bytes_append(&copy, key, n, err);
    if (st == HD_OK) st = find_or_compile(f, out, &copy, &args, err);
    hd_bytes_deinit(&copy);
    free(choices);
    free(lengths);
    return st;
}

void engine_grammar_cache_release(engine_grammar_cache *f, engine_grammar *grammar) {
    if (!grammar) return;
    pthread_mutex_lock(&f->lock);
    grammar->users--;
    trim(f);
    pthread_mutex_unlock(&f->lock);
}
