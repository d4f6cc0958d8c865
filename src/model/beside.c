/* beside.c - parts of a block on a stream of their own, beside the stages that come next: short
 * kernels of few rows leave most of a GPU idle. */
#include "model/beside_internal.h"

/* More rows fill the device by themselves. */
enum { MOST_ROWS_BESIDE = 64 };

bool model_runs_beside(const model_step *s) {
    const hd_model_env *env = &s->m->env;
    if (!env->beside_stream || s->b->n_rows > MOST_ROWS_BESIDE) return false;
    return !env->probe || hd_stream_captures(env->stream);
}

static void follow(hd_stream *s, hd_stream *from, hd_device_event *event) {
    hd_stream_record_event(from, event);
    hd_stream_wait_event(s, event);
}

void model_fork(const model_step *s) {
    if (model_runs_beside(s)) follow(s->m->env.beside_stream, s->stream, s->fork);
}

model_step model_beside(const model_step *s) {
    model_step beside = *s;
    if (model_runs_beside(s)) beside.stream = s->m->env.beside_stream;
    return beside;
}

void model_join(const model_step *s) {
    if (model_runs_beside(s)) follow(s->stream, s->m->env.beside_stream, s->join);
}
