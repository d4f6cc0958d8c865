/* engine_rig.c - runs requests on an engine and collects their choices; see engine_rig.h. */
#include "fakes/engine_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "fakes/gpus.h"

hd_engine *rig_open(const char *backend, const hd_engine_options *more) {
    char why[600];
    hd_engine *e;
    hd_engine_options o = more ? *more : (hd_engine_options){0};
    o.size = sizeof o;
    if (!o.model_dir) o.model_dir = TINY;
    o.backend = backend;
    o.cuda_path = hd_cuda_path_names[gpus_path(backend)];
    if (!o.precision) o.precision = gpus_precision(backend);
    if (!o.threads) o.threads = 1;
    if (hd_engine_open(&e, &o, why, sizeof why) != 0) fail_msg("%s", why);
    return e;
}

static void append(hd_bytes *to, const char *text, size_t n) {
    assert_int_equal(hd_bytes_append(to, text, n, NULL), HD_OK);
}

static void take_part(rig_answer *a, const hd_delta *p) {
    switch (p->kind) {
    case HD_DELTA_REASONING:
        append(&a->reasoning, p->text, p->n);
        break;
    case HD_DELTA_CONTENT:
        append(&a->content, p->text, p->n);
        break;
    case HD_DELTA_CALL:
        append(&a->calls, p->text, p->n);
        append(&a->calls, "(", 1);
        break;
    case HD_DELTA_ARGUMENTS:
        append(&a->calls, p->text, p->n);
        break;
    case HD_DELTA_CALL_END:
        append(&a->calls, p->whole ? ")!" : ")?", 2);
        break;
    case HD_DELTA_NOTE:
        break;
    }
}

void rig_take(rig_answer *a, const hd_event *e) {
    assert_int_equal(a->n_ends, 0); /* nothing follows the end */
    a->n_events++;
    for (size_t i = 0; i < e->n_deltas; i++) take_part(a, &e->deltas[i]);
    assert_int_equal(hd_ids_append(&a->tokens, e->step.tokens, (size_t)e->step.n_tokens, NULL),
                     HD_OK);
    assert_int_equal(a->tokens.n, e->output_tokens);
    assert_true(e->accepted <= e->drafted && e->accepted <= e->output_tokens);
    if (e->step.finish_reason == HD_FINISH_NONE) return;
    a->n_ends++;
    a->end = *e;
    snprintf(a->stop_text, sizeof a->stop_text, "%s", e->stop_text ? e->stop_text : "");
    snprintf(a->why, sizeof a->why, "%s", e->why ? e->why : "");
}

void rig_deinit(rig_answer *a) {
    hd_bytes_deinit(&a->reasoning);
    hd_bytes_deinit(&a->content);
    hd_bytes_deinit(&a->calls);
    hd_ids_deinit(&a->tokens);
    *a = (rig_answer){0};
}

void rig_run(hd_engine *e, const hd_request *g, rig_answer *out) {
    char why[600];
    hd_event event;
    const int n = g->n ? g->n : 1;
    for (int i = 0; i < n; i++) out[i] = (rig_answer){0};
    const uint64_t id = hd_engine_submit(e, g, NULL, why, sizeof why);
    if (!id) fail_msg("%s", why);
    bool last = false;
    int ends = 0;
    while (!last) {
        assert_true(hd_engine_poll(e, &event, -1));
        assert_true(event.id == id && event.choice < n);
        rig_take(&out[event.choice], &event);
        ends += event.step.finish_reason != HD_FINISH_NONE;
        last = event.last;
        assert_true(last == (ends == n));
    }
    assert_false(hd_engine_poll(e, &event, -1)); /* idle: nothing can come */
}

static void same_bytes(const hd_bytes *a, const hd_bytes *b) {
    assert_int_equal(a->n, b->n);
    if (a->n) assert_memory_equal(a->data, b->data, a->n);
}

void rig_same(const rig_answer *a, const rig_answer *b) {
    if (a->end.step.finish_reason != b->end.step.finish_reason)
        fail_msg("one ends so: '%s', the other so: '%s'", a->why, b->why);
    same_bytes(&a->reasoning, &b->reasoning);
    same_bytes(&a->content, &b->content);
    same_bytes(&a->calls, &b->calls);
    assert_int_equal(a->tokens.n, b->tokens.n);
    assert_memory_equal(a->tokens.ids, b->tokens.ids, a->tokens.n * sizeof(int32_t));
    assert_int_equal(a->end.stop_token, b->end.stop_token);
    assert_int_equal(a->end.reasoning_tokens, b->end.reasoning_tokens);
    assert_string_equal(a->stop_text, b->stop_text);
}
