/* rounds.c - how many rows may arrive at a rank's experts at once, and in how many rounds the rows of
 * a layer come.
 *
 * Memory for every row of all ranks would be ep times what arrives on average. So a rank has room for
 * twice the mean, which is divided between the ranks that send by the rows that each has in the step:
 * each sends up to its part to every other rank, without knowing what the others send, and what is
 * left in further rounds. Results do not depend on the round. A GPU would have to be asked how many
 * rounds there are: it makes as many as there may be, the last of them mostly without rows. */
#include "model/rows_internal.h"

#include <stdlib.h>

#include "base/checked.h"

int64_t hd_model_most_expert_rows(const hd_parallel_config *l, int32_t rows, int32_t top_k) {
    return l->ep * l->etp * hd_ceil_div(rows, l->tp) * top_k;
}

int32_t hd_model_expert_rows_of(const hd_parallel_config *l, int32_t rows, int32_t top_k) {
    const int64_t most = hd_model_most_expert_rows(l, rows, top_k);
    const int64_t mean = hd_ceil_div(most, l->ep);
    const int64_t room = 2 * mean > HD_LEAST_EXPERT_ROWS ? 2 * mean : HD_LEAST_EXPERT_ROWS;
    return (int32_t)hd_min_i64(hd_min_i64(room, most), INT32_MAX);
}

/* What a micro-batch keeps while the rows of a layer travel. */
typedef struct rounds {
    int32_t most; /* rounds that there may be; 1: every row of every rank has room */
    int32_t arriving;
    int32_t rows[];
} rounds;

static rounds *rounds_of(const model_step *s) {
    return (void *)((char *)s->m->rounds + (size_t)s->t->micro * s->m->rounds_bytes);
}

hd_status model_open_rounds(hd_model *m, hd_err *err) {
    const int32_t ep = m->shard->parallel.ep;
    if (m->in_rows < ep) {
        return HD_FAIL(err, HD_EINVAL, "room for %d rows of %d ranks", m->in_rows, ep);
    }
    m->rounds_bytes = sizeof(rounds) + (size_t)ep * sizeof(int32_t);
    m->rounds = calloc(HD_MAX_MICRO, m->rounds_bytes);
    return m->rounds ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for rounds of rows");
}

/* Fills rows [ep]: of each rank that shares the experts. Returns their sum. */
static int64_t count_rows(const model_step *s, int32_t *rows) {
    const hd_shard *shard = s->m->shard;
    const hd_rank_group g = hd_parallel_group(&shard->parallel, shard->rank, HD_GROUP_EP);
    int64_t sum = 0;
    for (int32_t k = 0; k < g.n; k++) {
        rows[k] = model_rows_of_rank(s, HD_GROUP_ETP, g.first + k * g.stride);
        sum += rows[k];
    }
    return sum;
}

/* The part of the room that each rank with rows has is at least 1. */
void model_plan_rounds(const model_step *s, int32_t top_k) {
    const int32_t ep = s->m->shard->parallel.ep, room = s->m->in_rows;
    rounds *r = rounds_of(s);
    const int64_t sum = count_rows(s, r->rows);
    r->most = 1;
    r->arriving = (int32_t)hd_min_i64(room, sum * top_k);
    if (sum == 0 || sum * top_k <= room || s->m->env.comm->one_round) return;
    for (int32_t k = 0; k < ep; k++) {
        const int64_t choices = (int64_t)r->rows[k] * top_k;
        if (choices == 0) continue;
        const int64_t part = (int64_t)(room - ep) * r->rows[k] / sum;
        r->rows[k] = hd_max_i32(1, (int32_t)part);
        r->most = hd_max_i32(r->most, (int32_t)hd_ceil_div(choices, r->rows[k]));
    }
}

const int32_t *model_round_rows(const model_step *s) {
    const rounds *r = rounds_of(s);
    return r->most > 1 ? r->rows : NULL;
}

int32_t model_arriving_rows(const model_step *s) {
    return rounds_of(s)->arriving;
}

int32_t model_n_rounds(const model_step *s) {
    const int32_t most = rounds_of(s)->most;
    if (most == 1 || !hd_device_is_host(s->m->env.device)) return most;
    if (*s->t->n_rounds <= most) return *s->t->n_rounds;
    hd_stream_fail(s->stream, HD_EPEER, "another rank has more rows than its part of the step");
    return 1;
}
