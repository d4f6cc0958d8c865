/* tape.c - replays steps of fixed shape; see tape.h. A step lies between two timestamps; its
 * shape is that of its prepare_step. */
#include "fakes/tape.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { MAX_CALLS = 1000, MAX_ARGS = 512, MAX_TAPES = 64 };

typedef struct call {
    void (*run)(hd_stream *s, const void *args);
    _Alignas(16) uint8_t args[MAX_ARGS];
} call;

typedef struct tape {
    int32_t n, n_drafts, n_before; /* the shape */
    int32_t n_calls;
    call calls[MAX_CALLS];
} tape;

static hd_ops inner;
static tape *tapes[MAX_TAPES];
static tape coming; /* the step that is being recorded */
static int32_t n_tapes, n_repeated;
static bool in_step;

static const tape *find(const tape *one) {
    for (int32_t i = 0; i < n_tapes; i++) {
        const tape *t = tapes[i];
        if (t->n == one->n && t->n_drafts == one->n_drafts && t->n_before == one->n_before) {
            return t;
        }
    }
    return NULL;
}

/* Shapes beyond those that fit run without a tape. */
static void keep(void) {
    if (n_tapes == MAX_TAPES) return;
    if (!tapes[n_tapes]) tapes[n_tapes] = malloc(sizeof(tape));
    assert_non_null(tapes[n_tapes]);
    memcpy(tapes[n_tapes++], &coming, sizeof coming);
}

static void end_step(hd_stream *s) {
    const tape *t = find(&coming);
    n_repeated += t != NULL;
    if (!t) {
        keep();
        t = &coming;
    }
    for (int32_t i = 0; i < t->n_calls; i++) t->calls[i].run(s, t->calls[i].args);
}

static void note(hd_stream *s, void (*run)(hd_stream *, const void *), const void *args,
                 size_t bytes, bool is_stamp) {
    if (!in_step && !is_stamp) {
        run(s, args);
        return;
    }
    if (!in_step) coming.n_calls = 0;
    assert_true(coming.n_calls < MAX_CALLS && bytes <= MAX_ARGS);
    call *c = &coming.calls[coming.n_calls++];
    c->run = run;
    memcpy(c->args, args, bytes);
    if (is_stamp && in_step) end_step(s);
    if (is_stamp) in_step = !in_step;
}

static void note_shape(const void *args, const char *op) {
    if (strcmp(op, "prepare_step") != 0) return;
    const hd_prepare_step_args *a = args;
    coming.n = a->n;
    coming.n_drafts = a->n_drafts;
    coming.n_before = a->n_before;
}

#define X(op)                                                           \
    static void run_##op(hd_stream *s, const void *args) {              \
        inner.op(s, args);                                              \
    }                                                                   \
    static void op##_taped(hd_stream *s, const hd_##op##_args *a) {     \
        note_shape(a, #op);                                             \
        note(s, run_##op, a, sizeof *a, strcmp(#op, "timestamp") == 0); \
    }
HD_COMMON_OP_LIST(X)
#undef X

void tape_open(hd_ops *t) {
    inner = *t;
    n_tapes = n_repeated = 0;
    in_step = false;
#define X(op) t->op = op##_taped;
    HD_COMMON_OP_LIST(X)
#undef X
}

int32_t tape_recorded(void) {
    return n_tapes;
}

int32_t tape_repeated(void) {
    return n_repeated;
}
