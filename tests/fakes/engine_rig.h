/* engine_rig.h - an engine on the shipped model, and the choices of its requests, collected. */
#ifndef HD_TESTS_FAKES_ENGINE_RIG_H
#define HD_TESTS_FAKES_ENGINE_RIG_H

#include "hadal.h"
#include "tokenizer/tokenizer.h"

#define TINY "models/tiny-v4"

/* One choice: the text of each kind, joined, and the figures of its last event. */
typedef struct rig_answer {
    hd_bytes reasoning, content,
        calls; /* calls: name(arguments)! for complete ones, ? for others */
    hd_ids tokens;
    int32_t n_events, n_ends;
    hd_event end; /* pointers in it are stale, but for stop_text's first bytes below */
    char stop_text[32], why[600];
} rig_answer;

hd_engine *rig_open(const char *backend, const hd_engine_options *more);

void rig_take(rig_answer *a, const hd_event *e);
void rig_deinit(rig_answer *a);

/* Submits and polls until the request's last event; out[n choices of g]. */
void rig_run(hd_engine *e, const hd_request *g, rig_answer *out);

/* Fails unless both have the same text, tokens and finish reason. */
void rig_same(const rig_answer *a, const rig_answer *b);

#endif
