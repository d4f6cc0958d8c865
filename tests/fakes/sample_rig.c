/* sample_rig.c - tables, streams and random steps of the sampler tests; see sample_rig.h. */
#include "fakes/sample_rig.h"

#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/philox.h"
#include "base/status.h"
#include "fakes/gpus.h"

/* ---- tables and streams ---- */

static hd_ops gpu_ops;
static hd_device *gpu; /* opened once, as memory outlives rigs; NULL without one */
static hd_stream *gpu_stream;

static void open_gpu(int32_t vocab) {
    static bool tried;
    const hd_ops_options options = {.cuda_path = gpus_path("cuda")};
    hd_err err = {0};
    if (!tried && hd_ops_open(&gpu_ops, &gpu, "cuda", &options, &err) != HD_OK) {
        print_message("[  SKIPPED ] choosing tokens on cuda: %s\n", err.msg);
    }
    tried = true;
    if (!gpu) return;
    if (!gpu_stream) assert_int_equal(hd_stream_open(&gpu_stream, gpu, NULL), HD_OK);
    assert_int_equal(hd_stream_reserve(gpu_stream, hd_ops_scratch_bytes(0, vocab), NULL),
                     HD_OK);
}

hd_stream *rig_stream(const hd_ops *ops, hd_stream *s) {
    return strncmp(ops->name, "cuda", 4) == 0 ? gpu_stream : s;
}

void open_rig(rig *r, int32_t vocab) {
    static const int32_t threads[RIG_STREAMS] = {1, 2, 5};
    const uint32_t have = hd_cpu_features();
    const uint32_t flags[] = {0, have & HD_CPU_AVX2, have & (HD_CPU_AVX2 | HD_CPU_AVX512)};
    memset(r, 0, sizeof *r);
    r->brief = is_brief();
    hd_ops_init_ref(&r->table[r->n_tables++], HD_EXACT);
    for (size_t i = 0; i < HD_LEN(flags); i++) {
        if (i == 0 || flags[i] != flags[i - 1]) {
            hd_ops_init_cpu(&r->table[r->n_tables++], flags[i], HD_EXACT);
        }
    }
    r->n_host_tables = r->n_tables;
    open_gpu(vocab);
    if (gpu) r->table[r->n_tables++] = gpu_ops;
    for (int i = 0; i < RIG_STREAMS; i++) {
        const hd_cpu_options options = {.n_threads = threads[i]};
        assert_int_equal(hd_device_open_cpu(&r->device[i], &options, NULL), HD_OK);
        assert_int_equal(hd_stream_open(&r->stream[i], r->device[i], NULL), HD_OK);
        assert_int_equal(hd_stream_reserve(r->stream[i], hd_ops_scratch_bytes(0, vocab), NULL),
                         HD_OK);
    }
}

void close_rig(rig *r) {
    for (int i = 0; i < RIG_STREAMS; i++) {
        hd_stream_close(r->stream[i]);
        hd_device_close(r->device[i]);
    }
}

/* ---- random inputs ---- */

static uint64_t chance;

uint32_t rig_word(void) {
    return hd_philox_at(77, 0, chance++).v[0];
}

int32_t rig_below(int32_t n) {
    return (int32_t)(rig_word() % (uint32_t)n);
}

void *rig_zeros(size_t bytes) {
    void *p = NULL;
    if (gpu) {
        assert_int_equal(hd_device_alloc_host(gpu, &p, bytes, "a test", NULL), HD_OK);
    } else {
        p = calloc(1, bytes ? bytes : 1);
    }
    assert_non_null(p);
    return p;
}

void *rig_copy(const void *from, size_t bytes) {
    return memcpy(rig_zeros(bytes), from, bytes);
}

void rig_free(void *p) {
    if (gpu) {
        hd_device_release(gpu, p);
    } else {
        free(p);
    }
}

/* ---- a step ---- */

void make_step(step *s, int32_t rows, int32_t vocab) {
    const size_t n = (size_t)vocab, words = (n + 31) / 32;
    s->logits = rig_zeros((size_t)rows * n * sizeof *s->logits);
    s->params = rig_zeros((size_t)rows * sizeof *s->params);
    s->slot = rig_zeros((size_t)rows * sizeof *s->slot);
    s->position = rig_zeros((size_t)rows * sizeof *s->position);
    s->mask_row = rig_zeros((size_t)rows * sizeof *s->mask_row);
    s->input = rig_zeros((size_t)rows * sizeof *s->input);
    s->n_drafted = rig_zeros((size_t)rows * sizeof *s->n_drafted);
    s->given = rig_zeros((size_t)rows * sizeof *s->given);
    s->draft = rig_zeros((size_t)rows * sizeof *s->draft);
    s->bias = rig_zeros(POOL * sizeof *s->bias);
    s->mask = rig_zeros(N_MASKS * words * sizeof *s->mask);
    s->counts = rig_zeros(N_COUNTS * n * sizeof *s->counts);
    for (int32_t r = 0; r < rows; r++) {
        s->slot[r] = r;
        s->position[r] = r;
        s->mask_row[r] = s->given[r] = s->draft[r] = -1;
    }
    s->a = (hd_sample_args){.logits = s->logits,
                            .params = s->params,
                            .slot = s->slot,
                            .position = s->position,
                            .bias = s->bias,
                            .mask = s->mask,
                            .mask_row = s->mask_row,
                            .counts = s->counts,
                            .input = s->input,
                            .n_drafted = s->n_drafted,
                            .given = s->given,
                            .draft = s->draft,
                            .rows = rows,
                            .vocab = vocab,
                            .n_ids = vocab,
                            .top_stride = HD_DEFAULT_LOGPROBS};
}

void free_step(step *s) {
    rig_free(s->logits);
    rig_free(s->params);
    rig_free(s->slot);
    rig_free(s->position);
    rig_free(s->mask_row);
    rig_free(s->input);
    rig_free(s->n_drafted);
    rig_free(s->given);
    rig_free(s->draft);
    rig_free(s->bias);
    rig_free(s->mask);
    rig_free(s->counts);
}

answer *rig_answer(void) {
    static answer here, *there;
    if (gpu && !there) there = rig_zeros(sizeof *there); /* until the process ends */
    return memset(there ? there : &here, 0x5a, sizeof here);
}

void run_sample(const hd_ops *ops, hd_stream *stream, const hd_sample_args *args, answer *out) {
    hd_sample_args a = *args;
    answer *to = rig_answer();
    a.token = to->token;
    a.logprob = to->logprob;
    a.top_id = to->top_id;
    a.top_logprob = to->top_logprob;
    ops->sample(rig_stream(ops, stream), &a);
    assert_int_equal(hd_stream_sync(rig_stream(ops, stream), NULL), HD_OK);
    *out = *to;
}
