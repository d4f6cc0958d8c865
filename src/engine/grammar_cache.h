/* grammar_cache.h - compiled forms of answers, shared by the requests that ask for the same.
 *
 * A form is compiled on the thread that submits and found again by its text. The least recently
 * used ones that nobody needs are forgotten when there are too many; those in use stay. Any
 * thread may call. */
#ifndef HD_ENGINE_GRAMMAR_CACHE_H
#define HD_ENGINE_GRAMMAR_CACHE_H

#include "hadal.h"
#include "grammar/grammar.h"

typedef struct engine_grammar_cache engine_grammar_cache;
typedef struct engine_grammar engine_grammar;

hd_status engine_grammar_cache_open(engine_grammar_cache **out, hd_err *err);
void engine_grammar_cache_close(
    engine_grammar_cache *f); /* NULL is fine; every form must have been put back */

/* What g->form asks for, or calls, or either; to be put back. */
hd_status engine_grammar_cache_acquire(engine_grammar_cache *f, engine_grammar **out,
                                       const hd_request *g, const hd_grammar_calls *calls,
                                       hd_err *err);
void engine_grammar_cache_release(engine_grammar_cache *f,
                                  engine_grammar *form); /* NULL is fine */

const hd_grammar *engine_grammar_of(const engine_grammar *form);

#endif
