/* grammar_cache.c - see grammar_cache.h. A list, because few grammars are kept. */
#include "engine/grammar_cache.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_IDLE_BYTES = 32 << 20, MAX_IDLE = 128 };

struct engine_grammar {
    hd_bytes key; /* kind and text of the response format */
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

static hd_status make_key(hd_bytes *key, const hd_grammar_args *a, hd_err *err) {
    const hd_grammar_calls *c = &a->calls;
    const uint32_t head[] = {
        (uint32_t)a->kind, (uint32_t)c->format, c->marks, c->flagged, c->hold,
        (uint32_t)c->most, (uint32_t)c->n_tools};
    HD_TRY(hd_bytes_append(key, head, sizeof head, err));
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
        return HD_FAIL(err, HD_EINVAL, "schema_too_complex: %zu choices; at most %d",
                       g->n_choices, HD_GRAMMAR_MAX_CHOICES);
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

void engine_grammar_cache_release(engine_grammar_cache *f, engine_grammar *grammar) {
    if (!grammar) return;
    pthread_mutex_lock(&f->lock);
    grammar->users--;
    trim(f);
    pthread_mutex_unlock(&f->lock);
}
