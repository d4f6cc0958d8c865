/* bench_step.c - what a step costs on the host: scheduler, prefix cache, and filling the block
 * that goes to the device.
 *
 *     build/bench_step [CONFIG]      default: tests/configs/v4_flash.json
 *
 * The runner behind the scheduler answers at once. A step's time is the scheduler's and the
 * cache's; the batch's is that of filling an hd_batch as the model runner does. Both are medians
 * over the steps of a run, and the median run of several is printed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "model/batch.h"
#include "sched/sched.h"
#include "weights/spec.h"

enum {
    RUNS = 5,
    STEPS = 1000,     /* timed steps of a run */
    COLD_STEPS = 100, /* where each costs a sweep through memory */
    RUNNING = 256,
    PROMPT = 1000,
    CHUNK = 512,
    DRAFTS = 3,
    STEP_ROWS = RUNNING * HD_MAX_STEP_TOKENS + CHUNK,
    SWEEP = 64 << 20, /* bytes that push everything else out of the caches */
    LIMIT_ONE = 20,   /* microseconds, at batch 1 and 256 */
    LIMIT_ALL = 150
};

typedef struct scenario {
    const char *name;
    int32_t batch;   /* running requests, the prefilling one included */
    int32_t drafts;  /* of each step; all but one are accepted */
    int32_t waiting; /* requests that find no slot */
    int32_t context; /* the longest sequence allowed */
    bool prefilling; /* one of the batch is always a prompt in chunks */
    bool coming;     /* short answers: requests end and begin all the time */
    bool cold;       /* the step in between leaves nothing in the processor's caches */
} scenario;

typedef struct bench {
    const scenario *what;
    hd_sched *sched;
    hd_batch batch;
    hd_device *device;
    int32_t *prompt;
    uint64_t next_id;
    int32_t n_living, n_prefilling; /* by the events */
    uint64_t prefilling;            /* id of the request whose prompt never seems to end */
    uint8_t *sweep;                 /* [SWEEP] */
    int64_t runner_ns, fill_ns;     /* of this step */
    double step_us[STEPS], fill_us[STEPS];
} bench;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- the null device ---- */

static void fill_batch(bench *b, const hd_seq_input *inputs, int32_t n) {
    hd_batch_reset(&b->batch);
    for (int32_t i = 0; i < n; i++) {
        const hd_seq_input *w = &inputs[i];
        hd_batch_add(&b->batch, &(hd_batch_seq){
                                    .tokens = w->tokens,
                                    .n = w->n,
                                    .start = w->start,
                                    .after = w->after,
                                    .n_logits = w->n_sample,
                                    .pages = {w->pages[0], w->pages[1]},
                                    .n_pages = w->n_pages
        });
    }
}

static hd_status run(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                     const hd_seq_input *inputs, int32_t n, hd_seq_output *outputs,
                     hd_err *err) {
    bench *b = ctx;
    (void)copies;
    (void)n_copies;
    (void)err;
    const int64_t start = now_ns();
    fill_batch(b, inputs, n);
    const int64_t filled = now_ns();
    for (int32_t i = 0; i < n; i++) {
        hd_seq_output *c = &outputs[i];
        c->status = HD_OK;
        c->step.n_tokens = inputs[i].n_sample ? hd_max_i32(1, inputs[i].n_sample - 1) : 0;
        c->n_drafts = c->step.n_tokens ? inputs[i].want_drafts : 0;
        for (int32_t k = 0; k < HD_MAX_STEP_TOKENS; k++) c->step.tokens[k] = 100 + k;
        for (int32_t k = 0; k < HD_MAX_DRAFTS; k++) c->drafts[k] = 100 + k;
    }
    for (int32_t i = 0; b->what->cold && i < SWEEP; i += 64) b->sweep[i]++;
    b->fill_ns = filled - start;
    b->runner_ns = now_ns() - start;
    return HD_OK;
}

static void on_enter(void *ctx, uint64_t id, int32_t slot, const int32_t *tokens, int32_t n) {
    (void)ctx;
    (void)id;
    (void)slot;
    (void)tokens;
    (void)n;
}

static void on_leave(void *ctx, uint64_t id, int32_t slot) {
    (void)ctx;
    (void)id;
    (void)slot;
}

static void on_event(void *ctx, const hd_sched_event *e) {
    bench *b = ctx;
    if (e->step.finish_reason == HD_FINISH_NONE) return;
    b->n_living--;
    if (e->id == b->prefilling) b->prefilling = 0;
}

/* ---- requests ---- */

static hd_status submit(bench *b, int32_t n_prompt, int32_t max_new, hd_err *err) {
    const int32_t stop = 1;
    const uint64_t id = ++b->next_id;
    for (int32_t i = 0; i < n_prompt; i++)
        b->prompt[i] = (int32_t)((id * 31 + (uint64_t)i) & 0xffff);
    b->n_living++;
    return hd_sched_submit(b->sched,
                           &(hd_sched_request){.id = id,
                                               .prompt = b->prompt,
                                               .n_prompt = n_prompt,
                                               .max_new = max_new,
                                               .draft_tokens = b->what->drafts,
                                               .salt = 1,
                                               .queue_until_ns = INT64_MAX,
                                               .stop_ids = &stop,
                                               .n_stop = 1},
                           err);
}

/* Keeps the scenario's numbers up; outside the timed part. */
static hd_status refill(bench *b, hd_err *err) {
    const scenario *w = b->what;
    const int32_t most = 8192 - PROMPT - HD_MAX_DRAFTS;
    while (b->n_living < w->batch + w->waiting - (w->prefilling && !b->prefilling)) {
        const int32_t spread = (int32_t)(b->next_id % 64);
        HD_TRY(submit(b, PROMPT, w->coming ? 32 + spread : most, err));
    }
    if (w->prefilling && !b->prefilling) {
        HD_TRY(submit(b, 7000, 1, err));
        b->prefilling = b->next_id;
    }
    return HD_OK;
}

static hd_status step(bench *b, double *step_us, double *fill_us, hd_err *err) {
    HD_TRY(refill(b, err));
    const int64_t start = now_ns();
    HD_TRY(hd_sched_step(b->sched, start, err));
    *step_us = (double)(now_ns() - start - b->runner_ns) * 1e-3;
    *fill_us = (double)b->fill_ns * 1e-3;
    return HD_OK;
}

static int32_t turns_of(const scenario *s) {
    return s->cold ? COLD_STEPS : STEPS;
}

static hd_status measure(bench *b, hd_err *err) {
    double ignored, also;
    const int32_t prompts = b->what->batch * PROMPT / CHUNK + 300; /* steps until all decode */
    for (int32_t i = 0; i < prompts; i++) HD_TRY(step(b, &ignored, &also, err));
    for (int32_t i = 0; i < turns_of(b->what); i++) {
        HD_TRY(step(b, &b->step_us[i], &b->fill_us[i], err));
        const int32_t running = hd_sched_read_stats(b->sched).running;
        if (!b->what->coming && running + b->what->prefilling < b->what->batch) {
            return HD_FAIL(err, HD_EINVAL, "%d requests run instead of %d", running,
                           b->what->batch);
        }
    }
    return HD_OK;
}

static hd_status open_and_measure(bench *b, const hd_kv_shape *shape, hd_err *err) {
    const int32_t seq_pages =
        (int32_t)hd_ceil_div(b->what->context + HD_MAX_DRAFTS, shape->page_tokens);
    const int32_t used_pages = (int32_t)hd_ceil_div(8192, shape->page_tokens);
    const int32_t window = (shape->lookback + CHUNK) / shape->page_tokens + 2;
    const hd_sched_options o = {
        .cache = {.page_tokens = shape->page_tokens,
                  .lookback = shape->lookback,
                  .n_pages = {hd_max_i32(RUNNING * used_pages, seq_pages),
                              shape->lookback ? 4 * RUNNING + window : 0},
                  .max_seqs = RUNNING,
                  .seq_pages = seq_pages},
        .step_rows = STEP_ROWS,
        .chunk_rows = CHUNK,
        .queue_limit = 4096,
        .max_positions = b->what->context
    };
    const hd_batch_limits limits = {STEP_ROWS, RUNNING, seq_pages};
    const hd_sched_hooks hooks = {
        .ctx = b, .slot_assigned = on_enter, .slot_released = on_leave, .event = on_event};
    hd_status st = hd_sched_open(&b->sched, &o, &(hd_runner){b, run}, &hooks, err);
    if (st == HD_OK) st = hd_batch_open(&b->batch, &limits, b->device, err);
    if (st == HD_OK) st = measure(b, err);
    hd_sched_close(b->sched);
    hd_batch_close(&b->batch);
    return st;
}

/* ---- figures ---- */

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(double *x, int32_t n, double q) {
    qsort(x, (size_t)n, sizeof *x, ascending);
    return x[(int32_t)((n - 1) * q)];
}

static hd_status report(bench *b, const scenario *what, const hd_kv_shape *shape, hd_err *err) {
    double steps[RUNS], late[RUNS], fills[RUNS];
    const int32_t n = turns_of(what);
    for (int r = 0; r < RUNS; r++) {
        *b = (bench){.what = what, .device = b->device, .prompt = b->prompt, .sweep = b->sweep};
        HD_TRY(open_and_measure(b, shape, err));
        steps[r] = quantile(b->step_us, n, 0.5);
        late[r] = quantile(b->step_us, n, 0.99);
        fills[r] = quantile(b->fill_us, n, 0.5);
    }
    const double step_us = quantile(steps, RUNS, 0.5), fill_us = quantile(fills, RUNS, 0.5);
    printf("%-28s %5d %9.2f %9.2f %9.2f %9.2f", what->name, what->batch, step_us,
           quantile(late, RUNS, 0.5), fill_us, step_us + fill_us);
    if (what->batch == 1 || what->batch == RUNNING) {
        const int limit = what->batch == 1 ? LIMIT_ONE : LIMIT_ALL;
        printf(" %6d %6.2f", limit, (step_us + fill_us) / limit);
    }
    putchar('\n');
    return HD_OK;
}

static hd_status run_all(bench *b, const hd_kv_shape *shape, hd_err *err) {
    static const int32_t batches[] = {1, 16, 64, RUNNING};
    const scenario kinds[] = {
        {.name = "decode",            .context = 8192 },
        {.name = "decode, 3 drafts",  .drafts = DRAFTS, .context = 8192},
        {.name = "decode, one prompt in chunks",                           .prefilling = true,      .context = 8192},
        {.name = "short answers",            .coming = true,                       .context = 8192},
        {.name = "decode, 1000 wait",  .waiting = 1000,.context = 8192},
        {.name = "decode, cold caches", .cold = true, .context = 8192},
        {.name = "1000 wait, cold caches",                           .waiting = 1000,               .cold = true, .context = 8192},
        {.name = "decode, context 128k",            .context = 131072                           },
    };
    printf("%-28s %5s %9s %9s %9s %9s %6s %6s\n", "microseconds", "batch", "step", "99 %",
           "fill", "sum", "limit", "ratio");
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        for (size_t i = 0; i < sizeof batches / sizeof batches[0]; i++) {
            scenario s = kinds[k];
            s.batch = batches[i];
            if (s.waiting && s.batch != RUNNING) continue; /* nobody waits beside free slots */
            HD_TRY(report(b, &s, shape, err));
        }
    }
    return HD_OK;
}

int main(int argc, char **argv) {
    const char *config = argc > 1 ? argv[1] : "tests/configs/v4_flash.json";
    hd_err err = {0};
    hd_model_spec *spec = NULL;
    bench *b = calloc(1, sizeof *b);
    int32_t *prompt = calloc(8192, sizeof *prompt);
    uint8_t *sweep = calloc(SWEEP, 1);
    hd_device *device = NULL;
    hd_status st = b && prompt && sweep ? hd_model_spec_open(&spec, config, &err) : HD_ENOMEM;
    if (st == HD_OK) st = hd_device_open_cpu(&device, &(hd_cpu_options){.n_threads = 1}, &err);
    if (st == HD_OK) {
        const hd_kv_shape shape = hd_kv_shape_of(spec);
        printf("%s: pages of %d tokens, a window looks back %d; %d slots, medians of %d "
               "steps and %d runs\n",
               config, shape.page_tokens, shape.lookback, RUNNING, STEPS, RUNS);
        b->device = device;
        b->prompt = prompt;
        b->sweep = sweep;
        st = run_all(b, &shape, &err);
    }
    if (st != HD_OK) fprintf(stderr, "error: %s\n", err.msg);
    hd_device_close(device);
    hd_model_spec_close(spec);
    free(prompt);
    free(sweep);
    free(b);
    return st == HD_OK ? 0 : 1;
}
