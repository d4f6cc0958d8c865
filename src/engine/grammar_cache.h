/* grammar_cache.h - compiled forms of answers, shared by the requests that ask for the same.
 *
 * A form is compiled on the thread that submits and found again by its text. The least recently
 * used ones that nobody needs are forgotten when there are too many; those in use stay. Any
 * thread may call. */
#ifndef HD_ENGINE_GRAMMAR_CACHE_H
#define HD_ENGINE_GRAMMAR_CACHE_H

#include "hadal.h"
#include "grammar/grammar.h"

typedef struct engine_forms engine_forms;
typedef struct engine_form engine_form;

hd_status engine_forms_open(engine_forms **out, hd_err *err);
void engine_forms_close(engine_forms *f); /* NULL is fine; every form must have been put back */

/* What g->form asks for, or calls, or either; to be put back. */
hd_status engine_forms_take(engine_forms *f, engine_form **out, const hd_generation *g,
                            const hd_grammar_calls *calls, hd_err *err);
void engine_forms_put(engine_forms *f, engine_form *form); /* NULL is fine */

const hd_grammar *engine_form_grammar(const engine_form *form);

#endif
