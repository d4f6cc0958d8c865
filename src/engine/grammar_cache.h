/* grammar_cache.h - compiled grammars of structured output, shared by requests with the same
 * response format or tools. The submitting thread compiles a grammar, and later requests
 * find it by its text. If there are too many, the least recently used of those that no
 * request uses are freed. Any thread may call. */
#ifndef HD_ENGINE_GRAMMAR_CACHE_H
#define HD_ENGINE_GRAMMAR_CACHE_H

#include "hadal.h"
#include "grammar/grammar.h"

typedef struct engine_grammar_cache engine_grammar_cache;
typedef struct engine_grammar engine_grammar;

hd_status engine_grammar_cache_open(engine_grammar_cache **out, hd_err *err);
void engine_grammar_cache_close(
    engine_grammar_cache *f); /* NULL is fine; every grammar must have been released */

/* Finds or compiles the grammar of g's response format, of its tool calls, or of both.
 * Release it afterwards. */
hd_status engine_grammar_cache_acquire(engine_grammar_cache *f, engine_grammar **out,
                                       const hd_request *g, const hd_grammar_calls *calls,
                                       hd_err *err);
void engine_grammar_cache_release(engine_grammar_cache *f,
                                  engine_grammar *grammar); /* NULL is fine */

const hd_grammar *engine_grammar_of(const engine_grammar *grammar);

/* All that a grammar is compiled from, as bytes for another process of the same version; that
 * acquires the same grammar by them. */
const hd_bytes *engine_grammar_key(const engine_grammar *grammar);
hd_status engine_grammar_cache_acquire_key(engine_grammar_cache *f, engine_grammar **out,
                                           const char *key, size_t n, hd_err *err);

#endif
