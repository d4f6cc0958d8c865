/* host_experts.c - see host_experts.h. */
#include "model/host_experts.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/progress.h"
#include "ops/x_format.h"

enum {
    ROLES = HD_EXPERT_MATRICES,
    MEASURED_ROWS = 8, /* of the second measurement; the first is of one */
    MEASURED_EXPERTS = 4,
    SPIN_NS = 1000000,   /* behind the last rows, the thread looks without a pause, */
    NAP_NS = 50000,      /* then with short ones, */
    IDLE_NS = 200000000, /* and behind so much time */
    SLEEP_NS = 5000000   /* with these */
};

static const int64_t FORGET_NS =
    INT64_C(1000000000); /* without rows: what was measured at first holds */
static const double LEAST_SCALE = 1.0 / 16, MOST_SCALE = 64;

struct hd_host_experts {
    const hd_model_spec *spec;
    hd_host_experts_options o;
    int32_t cols, inter;
    hd_ops ops; /* of the CPU */
    hd_device *device;
    hd_stream *stream;
    hd_host_mail *mail; /* host memory that the asking device reaches, as x, weight and y */
    float *x, *weight, *y;
    float *gate, *up;         /* [rows, inter] */
    hd_weight *matrix[ROLES]; /* [n_experts] of the experts that are computed */
    hd_expert_table table[ROLES];
    int64_t expert_ns, row_ns; /* as measured at first */
    double scale;              /* of these, lately */
    _Atomic int64_t computed_ns;
    _Atomic bool closing;
    hd_err failure; /* of the thread; read once the mail says that it ended */
    bool started;
    pthread_t thread;
};

static hd_role role_of(int32_t role) {
    return (hd_role)((int32_t)HD_EXPERT_GATE + role);
}

/* ---- rows ---- */

/* The numbers to which the device rounds rows for a matrix; without columns: it does not. */
static hd_group_format format_of_rows(const hd_host_experts *h, const hd_weight *w) {
    const bool narrow = !hd_device_is_host(h->o.device) && h->o.precision == HD_FAST;
    if (h->o.precision == HD_OFFICIAL) return hd_x_format(w);
    return (hd_group_format){.plain = narrow && hd_narrows_x(w) ? w->cols : 0};
}

static void round_rows(const hd_host_experts *h, float *x, int32_t rows, const hd_weight *w) {
    const hd_group_format f = format_of_rows(h, w);
    if (f.group == 0 && f.plain == 0) return;
    h->ops.round_rows(
        h->stream,
        &(hd_round_rows_args){.x = hd_f32(x), .format = f, .rows = rows, .cols = w->cols});
}

static void list_experts(hd_host_experts *h) {
    const hd_host_mail *m = h->mail;
    for (int32_t r = 0; r < ROLES; r++) {
        for (int32_t i = 0; i < m->n; i++) {
            h->matrix[r][i] =
                *hd_weights_held_expert(h->o.whole, m->layer, role_of(r), m->expert[i]);
        }
        hd_expert_table_init(&h->table[r], h->matrix[r], m->n);
    }
}

/* Computes what the mail asks for. */
static void compute(hd_host_experts *h) {
    const hd_host_mail *m = h->mail;
    const int32_t rows = m->first[m->n];
    list_experts(h);
    round_rows(h, h->x, rows, h->matrix[0]);
    h->ops.grouped_swiglu(
        h->stream, &(hd_grouped_swiglu_args){.out = hd_f32(h->gate),
                                             .gate = hd_f32(h->gate),
                                             .up = hd_f32(h->up),
                                             .x = hd_f32(h->x),
                                             .gate_w = &h->table[0],
                                             .up_w = &h->table[1],
                                             .offset = m->first,
                                             .weight = hd_is_hybrid(h->spec) ? h->weight : NULL,
                                             .top_k = 1,
                                             .n_places = rows,
                                             .limit = h->spec->swiglu_limit});
    round_rows(h, h->gate, rows, h->matrix[2]);
    h->ops.grouped_gemm(h->stream, &(hd_grouped_gemm_args){.out = hd_f32(h->y),
                                                           .x = hd_f32(h->gate),
                                                           .w = &h->table[2],
                                                           .offset = m->first,
                                                           .top_k = 1,
                                                           .n_places = rows});
}

/* Tells operators what experts and rows take. */
static void publish(const hd_host_experts *h) {
    const int64_t expert_ns = hd_max_i64(1, (int64_t)((double)h->expert_ns * h->scale));
    const int64_t row_ns = hd_max_i64(1, (int64_t)((double)h->row_ns * h->scale));
    __atomic_store_n(&h->mail->expert_ns, expert_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&h->mail->row_ns, row_ns, __ATOMIC_RELAXED);
}

/* Follows with an eighth of what a layer took. */
static void follow(hd_host_experts *h, int64_t ns) {
    const hd_host_mail *m = h->mail;
    const double predicted =
        (double)m->n * (double)h->expert_ns + (double)m->first[m->n] * (double)h->row_ns;
    const double scale = h->scale + ((double)ns / predicted - h->scale) / 8;
    h->scale = fmax(LEAST_SCALE, fmin(scale, MOST_SCALE));
    atomic_fetch_add_explicit(&h->computed_ns, ns, memory_order_relaxed);
    publish(h);
}

/* Runs when the asking stream is synchronized. */
static void check(void *ctx, hd_stream *s) {
    hd_host_experts *h = ctx;
    if (__atomic_load_n(&h->mail->ended, __ATOMIC_ACQUIRE)) {
        hd_stream_fail(s, h->failure.status, h->failure.msg);
    } else if (__atomic_exchange_n(&h->mail->late, 0, __ATOMIC_RELAXED)) {
        hd_stream_fail(s, HD_EDEVICE, "the host did not compute rows of experts in time");
    }
}

static void pause_for(int64_t idle_ns) {
    struct timespec t = {0, idle_ns < IDLE_NS ? NAP_NS : SLEEP_NS};
    if (idle_ns > SPIN_NS) {
        nanosleep(&t, NULL);
    } else {
        hd_cpu_relax();
    }
}

static void *work(void *arg) {
    hd_host_experts *h = arg;
    hd_host_mail *m = h->mail;
    int64_t since = hd_now_ns();
    hd_device_bind_thread(h->device);
    while (!atomic_load_explicit(&h->closing, memory_order_relaxed)) {
        const int64_t now = hd_now_ns();
        const uint32_t asked = __atomic_load_n(&m->asked, __ATOMIC_ACQUIRE);
        if (asked == m->done) {
            if (now - since > FORGET_NS && h->scale != 1.0) {
                h->scale = 1.0;
                publish(h);
            }
            pause_for(now - since);
            continue;
        }
        compute(h);
        if (hd_stream_sync(h->stream, &h->failure) != HD_OK) break;
        since = hd_now_ns();
        follow(h, since - now);
        __atomic_store_n(&m->done, asked, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&m->ended, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* ---- opening ---- */

static int32_t first_layer(const hd_host_experts *h) {
    for (int32_t l = 0; l < h->o.held; l++) {
        if (hd_weights_expert_map(h->o.whole, l) &&
            hd_weights_held_expert(h->o.whole, l, HD_EXPERT_GATE, 0)) {
            return l;
        }
    }
    return -1;
}

static hd_status take_shared(const hd_host_experts *h, void *out, size_t bytes, hd_err *err) {
    return hd_device_alloc_host(h->o.device, out, bytes, "rows of experts", err);
}

static hd_status take_memory(hd_host_experts *h, hd_err *err) {
    const size_t rows = (size_t)h->o.rows, n = (size_t)h->spec->route.n_experts;
    const size_t row = (size_t)h->cols * sizeof(float);
    void *mail, *x, *weight, *y;
    HD_TRY(take_shared(h, &mail, sizeof *h->mail, err));
    h->mail = mail;
    HD_TRY(take_shared(h, &x, rows * row, err));
    h->x = x;
    HD_TRY(take_shared(h, &weight, rows * sizeof *h->weight, err));
    h->weight = weight;
    HD_TRY(take_shared(h, &y, rows * row, err));
    h->y = y;
    h->gate = calloc(rows * (size_t)h->inter, sizeof *h->gate);
    h->up = calloc(rows * (size_t)h->inter, sizeof *h->up);
    bool all = h->gate && h->up;
    for (int32_t r = 0; r < ROLES; r++) {
        h->matrix[r] = calloc(n, sizeof *h->matrix[r]);
        all = all && h->matrix[r];
    }
    return all ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for rows of experts on the host");
}

/* The time of MEASURED_EXPERTS experts with so many rows each, once they are in memory. */
static hd_status measure(hd_host_experts *h, int32_t layer, int32_t rows, int64_t *ns,
                         hd_err *err) {
    hd_host_mail *m = h->mail;
    m->layer = layer;
    m->n = hd_min_i32(MEASURED_EXPERTS, h->spec->route.n_experts);
    for (int32_t i = 0; i < m->n; i++) {
        m->expert[i] = i;
        m->first[i + 1] = (i + 1) * rows;
    }
    for (int32_t i = 0; i < 2; i++) {
        const int64_t begun = hd_now_ns();
        compute(h);
        *ns = (hd_now_ns() - begun) / m->n;
    }
    return hd_stream_sync(h->stream, err);
}

static hd_status measure_all(hd_host_experts *h, int32_t layer, hd_err *err) {
    int64_t one, more;
    HD_TRY(measure(h, layer, 1, &one, err));
    HD_TRY(measure(h, layer, MEASURED_ROWS, &more, err));
    h->row_ns = hd_max_i64(1, (more - one) / (MEASURED_ROWS - 1));
    h->expert_ns = hd_max_i64(1, one - h->row_ns);
    h->scale = 1.0;
    h->mail->n = 0;
    publish(h);
    return HD_OK;
}

static hd_status open_parts(hd_host_experts *h, hd_err *err) {
    const int32_t layer = first_layer(h);
    const bool fast = hd_device_is_host(h->o.device) && h->o.precision == HD_FAST;
    const hd_ops_options ops = {.cpu = h->o.cpu, .precision = fast ? HD_FAST : HD_EXACT};
    if (layer < 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "no layer has experts in host memory");
    }
    h->cols = hd_weights_held_expert(h->o.whole, layer, HD_EXPERT_GATE, 0)->cols;
    h->inter = hd_weights_held_expert(h->o.whole, layer, HD_EXPERT_GATE, 0)->rows;
    HD_TRY(hd_ops_open(&h->ops, &h->device, "cpu", &ops, err));
    HD_TRY(hd_stream_open(&h->stream, h->device, err));
    HD_TRY(hd_stream_reserve(h->stream, hd_ops_scratch_bytes(1, hd_max_i32(h->cols, h->inter)),
                             err));
    HD_TRY(take_memory(h, err));
    HD_TRY(measure_all(h, layer, err));
    h->started = pthread_create(&h->thread, NULL, work, h) == 0;
    if (h->started) hd_stream_set_check(h->o.stream, check, h);
    return h->started ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no thread for rows of experts");
}

hd_status hd_host_experts_open(hd_host_experts **out, const hd_model_spec *spec,
                               const hd_host_experts_options *o, hd_err *err) {
    hd_host_experts *h = calloc(1, sizeof *h);
    *out = NULL;
    if (!h) return HD_FAIL(err, HD_ENOMEM, "no memory for experts on the host");
    h->spec = spec;
    h->o = *o;
    h->o.rows = hd_max_i32(o->rows, MEASURED_EXPERTS * MEASURED_ROWS);
    const hd_status st = open_parts(h, err);
    if (st == HD_OK) {
        *out = h;
    } else {
        hd_host_experts_close(h);
    }
    return st;
}

void hd_host_experts_close(hd_host_experts *h) {
    if (!h) return;
    atomic_store_explicit(&h->closing, true, memory_order_relaxed);
    if (h->started) {
        pthread_join(h->thread, NULL);
        hd_stream_set_check(h->o.stream, NULL, NULL);
    }
    for (int32_t r = 0; r < ROLES; r++) free(h->matrix[r]);
    free(h->gate);
    free(h->up);
    hd_device_release(h->o.device, h->mail);
    hd_device_release(h->o.device, h->x);
    hd_device_release(h->o.device, h->weight);
    hd_device_release(h->o.device, h->y);
    hd_stream_close(h->stream);
    hd_device_close(h->device);
    free(h);
}

hd_host_rows hd_host_experts_rows(const hd_host_experts *h) {
    return (hd_host_rows){.mail = h->mail,
                          .x = h->x,
                          .weight = h->weight,
                          .y = h->y,
                          .most = h->o.rows,
                          .cols = h->cols,
                          .always = h->o.always};
}

int64_t hd_host_experts_ns(const hd_host_experts *h) {
    return atomic_load_explicit(&h->computed_ns, memory_order_relaxed);
}
