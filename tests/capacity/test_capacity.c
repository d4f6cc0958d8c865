/* test_capacity.c - predictions of memory by formulas (test_rank_memory.c: against ranks that are opened), of steps
 * against counts by hand, of exchanges and times against formulas; layouts and the best of them; refusals. */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "capacity/pools.h"
#include "capacity/traced_comm_internal.h"
#include "weights/configs.h"

static hd_gpu gpu_named(const char *name) {
    hd_gpu m;
    hd_err err = {0};
    if (hd_gpu_find(&m, name, &err) != HD_OK) fail_msg("%s", err.msg);
    return m;
}

static void assert_near(double a, double b, double most) {
    if (!(fabs(a - b) <= most * fabs(b))) fail_msg("%.9g instead of %.9g", a, b);
}

/* ---- memory ---- */

/* m: of ranks that are processes; NULL: threads. */
static hd_rank_memory memory_on(const hd_gpu *m, const hd_model_spec *spec,
                                const hd_parallel_config *l, int32_t chunk, int32_t n_micro) {
    const hd_engine_options o = {.max_running = 16, .chunk_tokens = chunk};
    const hd_engine_sizes sizes = hd_engine_sizes_of(spec, false, &o);
    const hd_rank_memory_args args = {.spec = spec,
                                      .parallel = l,
                                      .sizes = &sizes,
                                      .act_type = HD_F32,
                                      .kv_type = HD_BF16,
                                      .threads = 1,
                                      .n_micro = n_micro,
                                      .gpu = m};
    hd_rank_memory got;
    hd_err err = {0};
    if (hd_rank_memory_of(&got, &args, &err) != HD_OK) fail_msg("%s", err.msg);
    return got;
}

static hd_rank_memory memory_of(const hd_model_spec *spec, const hd_parallel_config *l,
                                int32_t chunk, int32_t n_micro) {
    return memory_on(NULL, spec, l, chunk, n_micro);
}

/* V3 in FP8: 58 layers of 256 experts of 44.05 MB; on 32 ranks with 32 spare slots 9 each, with
 * one more layer for MTP. */
static void spare_slots_are_counted(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("v3");
    const hd_parallel_config l = hd_parallel_expert(32, 32);
    const hd_rank_memory m = memory_of(spec, &l, 0, 1);
    const double experts = (double)m.weights[HD_PARAM_GROUP_EXPERTS];
    assert_near(experts, 59 * 9 * 44.05e6, 0.001);
    assert_near((double)m.spare, experts / 9, 0.001);
    hd_model_spec_close(spec);
}

/* V3 on 32 ranks, whose prompts have 16,384 tokens: of what an attention computes between its products,
 * (192 + 576 + 512 + 128) * 128 + 1536 + 576 numbers for each row, half is enough; but for 8 rows. */
static void micro_batches_share_scratch(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("v3");
    const hd_parallel_config l = hd_parallel_expert(32, 0);
    const hd_rank_memory one = memory_of(spec, &l, 16384, 1);
    const hd_rank_memory two = memory_of(spec, &l, 16384, 2);
    const double rows = 16384 + 16 * 8, row = ((192 + 576 + 512 + 128) * 128 + 2112) * 4.0;
    assert_near((double)(one.activations - two.activations), rows / 2 * row, 0.02);
    assert_true(two.activations < 0.77 * (double)one.activations);
    hd_model_spec_close(spec);
}

/* V4.1's Engram tables, 202.8 GB, are in host memory: 2 * (25600 * 6144 + 800 * 192) bytes of products
 * and 2 * 2 * 4 * 5120 numbers of 2 bytes are left for the device. */
static void tables_are_in_host_memory(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("v4_1_flash");
    const hd_parallel_config l = hd_parallel_expert(8, 0);
    const hd_rank_memory m = memory_of(spec, &l, 0, 1);
    assert_true(m.tables == 202758032400);
    assert_int_equal(m.weights[HD_PARAM_GROUP_ENGRAM], 2 * (25600 * 6144 + 800 * 192) + 163840);
    hd_model_spec_close(spec);
}

/* A rank has its rows once more as they travel: 4,096 codes and a float32 for each 128 of them. */
static void packed_rows_have_room(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("v4_flash");
    hd_parallel_config l = hd_parallel_expert(4, 0);
    const hd_rank_memory wide = memory_of(spec, &l, 2048, 1);
    l.fp8_rows = true;
    const hd_rank_memory packed = memory_of(spec, &l, 2048, 1);
    assert_int_equal(packed.activations - wide.activations, (2048 + 16 * 8) * (4096 + 32 * 4));
    hd_model_spec_close(spec);
}

/* Processes of one node share memory: commands of those on GPUs, rows too of those on CPUs. Threads have no messages, and
 * ranks of several nodes send them by UCX. */
static void processes_of_one_host_have_messages(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v4");
    const hd_parallel_config two = hd_parallel_tensor(2), one = hd_parallel_single();
    hd_gpu cpu = gpu_named("cpu"), gpu = gpu_named("h200");
    const comm_shm_most none = {0};
    const int64_t least = (int64_t)comm_shm_memory(&none, 2);
    assert_int_equal(memory_of(spec, &two, 256, 1).messages, 0);
    assert_int_equal(memory_on(&cpu, spec, &two, 256, 1).messages, 0); /* "node": 1 */
    gpu.node = 1;
    assert_int_equal(memory_on(&gpu, spec, &two, 256, 1).messages, 0);
    cpu.node = gpu.node = 2;
    assert_int_equal(memory_on(&cpu, spec, &one, 256, 1).messages, 0);
    const int64_t commands = memory_on(&gpu, spec, &two, 256, 1).messages;
    const int64_t all = memory_on(&cpu, spec, &two, 256, 1).messages;
    assert_true(least < commands && commands < least + (1 << 20) && commands < all);
    /* columns of a row's logits, of which each of 16 sequences has some: two rooms */
    assert_true(all - commands >= 2 * 16 * (int64_t)sizeof(float) * spec->vocab / 2);
    hd_model_spec_close(spec);
}

/* V4-Flash on 4 ranks with 2,064 rows each, of which all may go to each of the others: in four rooms, by turns. */
static void packed_rows_are_smaller_messages(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("v4_flash");
    hd_parallel_config l = hd_parallel_expert(4, 0);
    hd_gpu m = gpu_named("cpu");
    m.node = 4;
    const hd_rank_memory wide = memory_on(&m, spec, &l, 2048, 1);
    l.fp8_rows = true;
    const hd_rank_memory packed = memory_on(&m, spec, &l, 2048, 1);
    assert_near((double)(wide.messages - packed.messages),
                4 * 3 * 2064.0 * (4 * 4096 - 4096 - 32 * 4), 1e-4);
    hd_model_spec_close(spec);
}

/* ---- steps ---- */

static hd_traced_rank *open_rank(const hd_model_spec *spec, const hd_gpu *m,
                                 const hd_parallel_config *l, double balancedness) {
    const hd_traced_rank_options o = {.spec = spec,
                                      .parallel = l,
                                      .rank = l->tp - 1,
                                      .gpu = m,
                                      .act_type = HD_BF16,
                                      .kv_type = HD_BF16,
                                      .rows = 4096,
                                      .seqs = 256,
                                      .positions = 1 << 16,
                                      .balancedness = balancedness};
    hd_traced_rank *r;
    hd_err err = {0};
    if (hd_traced_rank_open(&r, &o, &err) != HD_OK) fail_msg("%s", err.msg);
    return r;
}

static void step(hd_traced_rank *r, hd_step_shape shape, hd_step_cost *out) {
    hd_err err = {0};
    if (hd_traced_rank_step(r, &shape, out, &err) != HD_OK) fail_msg("%s", err.msg);
}

static double bytes_of(const hd_step_cost *c, const char *op) {
    double bytes = 0;
    for (int32_t i = 0; i < c->n; i++) {
        if (strcmp(c->lines[i].op, op) == 0) bytes += c->lines[i].bytes + c->lines[i].outside;
    }
    return bytes;
}

static double flops_of(const hd_step_cost *c, const char *format) {
    double flops = 0;
    for (int32_t i = 0; i < c->n; i++) {
        if (strcmp(c->lines[i].format, format) == 0) flops += c->lines[i].flops;
    }
    return flops;
}

/* One row of V4-Flash over four ranks: 43 layers of 6 of 256 experts, of which each rank has a
 * quarter: 3 x 4096 x 2048 numbers of 4 bits, and a byte of scale for 32. */
static void a_row_reads_its_experts(void **state) {
    (void)state;
    static hd_step_cost c;
    const hd_gpu m = gpu_named("h200");
    hd_model_spec *spec = config_open("v4_flash");
    const hd_parallel_config l = hd_parallel_tensor(4);
    hd_traced_rank *r = open_rank(spec, &m, &l, 1);
    step(r, (hd_step_shape){.seqs = 1, .rows = 1, .start = 4096, .logits = 1}, &c);
    const double experts = 43 * 6 * 3 * 4096.0 * 2048 * (4 + 8 / 32.0) / 8 / 4;
    assert_near(bytes_of(&c, "grouped_swiglu") + bytes_of(&c, "grouped_gemm"), experts, 0.01);
    assert_near(c.bytes, 3.652e9, 0.06); /* all of it, counted by hand with narrower caches */
    assert_near(flops_of(&c, "F4_E2M1"), 2 * 43 * 6 * 3 * 4096.0 * 2048 / 4, 1e-9);
    hd_traced_rank_close(r);
    hd_model_spec_close(spec);
}

/* Twice the same step, with others between, costs the same; more rows cost more. */
static void steps_repeat(void **state) {
    (void)state;
    static hd_step_cost first, other, again;
    const hd_gpu m = gpu_named("h200");
    const char *const names[] = {"tiny_v2", "tiny_v3", "tiny_v32", "tiny_v4", "tiny_v4_dspark"};
    for (size_t i = 0; i < HD_LEN(names); i++) {
        hd_model_spec *spec = config_open(names[i]);
        const hd_parallel_config l = hd_parallel_common(1, 2, 2, spec);
        hd_traced_rank *r = open_rank(spec, &m, &l, 0.8);
        const int32_t drafts = spec->drafter == HD_DRAFTER_NONE ? 0 : 2;
        const hd_step_shape shape = {.seqs = 3,
                                     .rows = 1 + drafts,
                                     .start = 100,
                                     .logits = 1 + drafts,
                                     .drafts = drafts};
        step(r, shape, &first);
        step(r, (hd_step_shape){.seqs = 1, .rows = 700, .logits = 1}, &other);
        step(r, shape, &again);
        assert_true(first.n == again.n && first.kernels == again.kernels);
        assert_near(first.kernel_s + first.exchange_s, again.kernel_s + again.exchange_s, 0);
        assert_true(other.flops > first.flops && first.exchange_s > 0);
        hd_traced_rank_close(r);
        hd_model_spec_close(spec);
    }
}

/* With experts on two ranks half of the choices travel; if one rank gets 1 / 0.8 of its part, so
 * much more. */
static void unbalanced_experts_cost(void **state) {
    (void)state;
    static hd_step_cost c;
    const hd_gpu m = gpu_named("h200");
    hd_model_spec *spec = config_open("v4_flash");
    const hd_parallel_config l = hd_parallel_common(1, 2, 2, spec);
    const hd_step_shape shape = {.seqs = 100, .rows = 1, .start = 100, .logits = 1};
    const double sent = 43 * 100 * 6 / 2.0 * 4096 * 2;
    double flops[2];
    for (int i = 0; i < 2; i++) {
        const double balancedness = i ? 0.8 : 1;
        hd_traced_rank *r = open_rank(spec, &m, &l, balancedness);
        step(r, shape, &c);
        assert_near(bytes_of(&c, "dispatch"), sent / balancedness, 1e-9);
        assert_near(bytes_of(&c, "combine"), sent / balancedness, 1e-9);
        flops[i] = flops_of(&c, "F4_E2M1");
        hd_traced_rank_close(r);
    }
    assert_near(flops[0], 2 * 43 * 100 * 6 * 3 * 4096.0 * 2048, 1e-9);
    assert_near(flops[1], flops[0] / 0.8, 1e-9);
    hd_model_spec_close(spec);
}

/* Rows that are packed travel as they are, and packing them is a kernel of each layer; results are what they were. V4.1
 * has a scale for 32 columns. */
static void packed_rows_travel_as_they_are(void **state) {
    (void)state;
    static hd_step_cost wide, packed;
    static const struct {
        const char *name;
        double row, packed;
    } models[] = {
        {"v4_flash",   2 * 4096, 4096 + 32 * 4 },
        {"v3",         2 * 7168, 7168 + 56 * 4 },
        {"v4_1_flash", 2 * 5120, 5120 + 160 * 4},
    };
    const hd_gpu m = gpu_named("h200");
    for (size_t i = 0; i < HD_LEN(models); i++) {
        hd_model_spec *spec = config_open(models[i].name);
        hd_parallel_config l = hd_parallel_common(1, 4, 4, spec);
        const hd_step_shape shape = {.seqs = 100, .rows = 1, .start = 100, .logits = 1};
        hd_traced_rank *r = open_rank(spec, &m, &l, 1);
        step(r, shape, &wide);
        hd_traced_rank_close(r);
        l.fp8_rows = true;
        r = open_rank(spec, &m, &l, 1);
        step(r, shape, &packed);
        hd_traced_rank_close(r);
        const double before = bytes_of(&wide, "dispatch"),
                     after = bytes_of(&packed, "dispatch");
        assert_near(after, before / models[i].row * models[i].packed, 1e-9);
        assert_near(bytes_of(&packed, "combine"), bytes_of(&wide, "combine"), 0);
        assert_near(wide.exchange_s - packed.exchange_s, (before - after) / 395e9, 1e-6);
        assert_near(bytes_of(&packed, "pack_rows"),
                    before / (0.75 * models[i].row * spec->route.top_k) *
                        (models[i].row + models[i].packed),
                    1e-9);
        assert_near(bytes_of(&wide, "pack_rows"), 0, 0);
        hd_model_spec_close(spec);
    }
}

/* Each of 4 ranks has a quarter of a prompt's rows in attention and receives what the others made of theirs;
 * a step without a prompt costs what it costs without cp. */
static void rows_of_prompts_are_divided(void **state) {
    (void)state;
    static hd_step_cost with, without;
    const hd_gpu m = gpu_named("h200");
    hd_model_spec *spec = config_open("v4_flash");
    const hd_parallel_config cp = hd_parallel_context(1, 4, 1, 4, spec);
    const hd_parallel_config ep = hd_parallel_common(1, 1, 4, spec);
    hd_traced_rank *divided = open_rank(spec, &m, &cp, 1), *same = open_rank(spec, &m, &ep, 1);
    const hd_step_shape prompt = {.seqs = 1, .rows = 2048, .start = 2048, .logits = 1};
    const hd_step_shape decode = {.seqs = 8, .rows = 1, .start = 2048, .logits = 1};
    step(divided, prompt, &with);
    step(same, prompt, &without);
    /* the first of four parts of equal work has a little more than a quarter of the rows */
    const double quarters = 43 * 2048 * 4096.0 * 2 / 4;
    assert_near(with.sent - without.sent, 3 * quarters, 0.01);
    assert_true(with.sent - without.sent < 3 * quarters);
    assert_true(with.flops < 0.6 * without.flops && with.kernel_s < 0.6 * without.kernel_s);
    step(divided, decode, &with);
    step(same, decode, &without);
    assert_near(with.sent, without.sent, 1e-9);
    assert_near(with.flops, without.flops, 1e-9);
    hd_traced_rank_close(divided);
    hd_traced_rank_close(same);
    hd_model_spec_close(spec);
}

static void a_step_beyond_the_limits(void **state) {
    (void)state;
    static hd_step_cost c;
    const hd_gpu m = gpu_named("h200");
    hd_model_spec *spec = config_open("tiny_v4");
    const hd_parallel_config l = hd_parallel_single();
    hd_traced_rank *r = open_rank(spec, &m, &l, 1);
    const hd_step_shape shapes[] = {
        {.seqs = 257, .rows = 1,    .logits = 1},
        {.seqs = 2,   .rows = 3000, .logits = 1},
        {.seqs = 1,   .rows = 1,    .logits = 1, .start = (1 << 16)},
        {.seqs = 1,           .rows = 1,               .logits = 2      },
        {.seqs = 0,           .rows = 1,               .logits = 1},
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        hd_err err = {0};
        assert_int_equal(hd_traced_rank_step(r, &shapes[i], &c, &err), HD_EINVAL);
        assert_non_null(strstr(err.msg, "positions"));
    }
    hd_traced_rank_close(r);
    hd_model_spec_close(spec);
}

/* ---- exchanges and times ---- */

typedef struct sent {
    double inside, outside;
} sent;

static void keep_sent(void *ctx, const char *name, double inside, double outside) {
    (void)name;
    *(sent *)ctx = (sent){inside, outside};
}

/* 6 ranks on nodes of 4: rank 0 has 3 on its node and 2 elsewhere. */
static void nodes_divide_what_is_sent(void **state) {
    (void)state;
    sent got = {0};
    traced_comm c = {
        .report = keep_sent, .ctx = &got, .node = 4, .act_bytes = 2, .most = 1, .rows = 60};
    const hd_parallel_config tp = hd_parallel_tensor(6), ep = hd_parallel_expert(6, 0);
    traced_comm_init(&c, &tp, 0);
    hd_comm_all_reduce(&c.comm, NULL, &(hd_all_reduce_args){.group = HD_GROUP_TP, .n = 600});
    assert_near(got.inside, 2 * 3 * 100 * 2, 1e-12);
    assert_near(got.outside, 2 * 2 * 100 * 2, 1e-12);
    hd_comm_all_gather(&c.comm, NULL,
                       &(hd_all_gather_args){.group = HD_GROUP_TP, .rows = 5, .own = 7});
    assert_near(got.inside, 3 * 5 * 7 * 4, 1e-12);
    traced_comm_init(&c, &ep, 5); /* on the second node, with rank 4 */
    hd_comm_dispatch_send(&c.comm, NULL,
                          &(hd_dispatch_args){.rows = 10, .cols = 8, .top_k = 3});
    assert_near(got.inside, 60 * 3 / 36.0 * 8 * 2, 1e-12);
    assert_near(got.outside, 4 * 60 * 3 / 36.0 * 8 * 2, 1e-12);
}

static void few_choices_hit_few_slots(void **state) {
    (void)state;
    int32_t offset[65];
    for (int32_t choices = 0; choices < 2000; choices = 2 * choices + 1) {
        traced_spread(offset, 64, choices, choices, 64);
        int32_t used = 0;
        for (int32_t s = 0; s < 64; s++) {
            assert_true(offset[s] <= offset[s + 1]);
            used += offset[s] < offset[s + 1];
        }
        assert_int_equal(offset[0], 0);
        assert_int_equal(offset[64], choices);
        assert_true(fabs(used - 64 * (1 - pow(63.0 / 64, choices))) <= 1);
    }
}

static void times_by_hand(void **state) {
    (void)state;
    const hd_gpu m = {.memory_tb_s = 2,
                      .tflops_8bit = 100,
                      .tflops_16bit = 50,
                      .launch_us = 3,
                      .link_gb_s = 200,
                      .link_us = 5,
                      .network_gb_s = 10,
                      .network_us = 40};
    assert_near(hd_gpu_kernel_seconds(&m, 2, 2e6, 0, HD_F32), 6e-6 + 1e-6, 1e-12);
    assert_near(hd_gpu_kernel_seconds(&m, 1, 2e6, 5e8, HD_BF16), 3e-6 + 1e-5, 1e-12);
    assert_near(hd_gpu_kernel_seconds(&m, 1, 2e6, 5e8, HD_E4M3), 3e-6 + 5e-6, 1e-12);
    assert_near(hd_gpu_exchange_seconds(&m, 3, 2e6, 0), 15e-6 + 1e-5, 1e-12);
    assert_near(hd_gpu_exchange_seconds(&m, 1, 2e6, 2e6), 40e-6 + 2e-4, 1e-12);
}

/* ---- GPUs ---- */

static char gpu_file[64];

static void write_gpu(const char *text) {
    snprintf(gpu_file, sizeof gpu_file, "/tmp/hadal-gpu-%d.json", (int)getpid());
    FILE *f = fopen(gpu_file, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void gpus_from_files(void **state) {
    (void)state;
    hd_gpu m;
    write_gpu("{\"like\": \"h100\", \"memory_gb\": 40}");
    m = gpu_named(gpu_file);
    assert_near(m.memory_gb, 40, 0);
    assert_near(m.link_gb_s, gpu_named("h100").link_gb_s, 0);
    static const struct {
        const char *text, *why;
    } bad[] = {
        {"{\"memory_gb\": 40}",                      "reserved_gb is missing"},
        {"{\"like\": \"a100\"}",                     "like names no GPU"     },
        {"{\"like\": \"h100\", \"memory\": 1}",      "memory is no number"   },
        {"{\"like\": \"h100\", \"memory_tb_s\": 0}", "number of TB/s"        },
        {"{\"like\": \"h100\", \"node\": 1.5}",      "node must be a whole"  },
        {"{\"like\": \"h100\", \"link_us\": \"7\"}", "number of us"          },
        {"{\"like\": \"h100\", \"link_us\": -1}",    "number of us"          },
        {"[]",                                       "no JSON object"        },
    };
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        hd_err err = {0};
        write_gpu(bad[i].text);
        assert_int_not_equal(hd_gpu_find(&m, gpu_file, &err), HD_OK);
        if (!strstr(err.msg, bad[i].why)) fail_msg("%s: %s", bad[i].text, err.msg);
    }
    remove(gpu_file);
    hd_err err = {0};
    assert_int_equal(hd_gpu_find(&m, "a100", &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "h100, h200, b200"));
    for (size_t i = 0; hd_gpu_at(i); i++) {
        assert_true(hd_gpu_at(i)->source && hd_gpu_at(i)->memory_gb > 0);
    }
}

/* ---- layouts under a load ---- */

static const hd_load load = {
    .users = 8, .prompt = 300, .output = 100, .chunk = 256, .balancedness = 1};

static hd_status predict(hd_capacity *out, const hd_model_spec *spec, const hd_load *l,
                         const hd_parallel_config *parallel, hd_err *err) {
    const hd_gpu m = gpu_named("h200");
    const hd_capacity_args a = {.spec = spec, .gpu = &m, .load = *l};
    return hd_capacity_predict(out, &a, parallel, err);
}

static void a_load_takes_its_steps(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v4");
    hd_parallel_config all[16];
    const int32_t n = hd_capacity_layouts(all, HD_LEN(all), 4, spec);
    assert_int_equal(n, 3 + 1 + 1); /* one group with ep 1, 2, 4; two and four groups */
    for (int32_t i = 0; i < n; i++) {
        hd_capacity c;
        hd_err err = {0};
        if (predict(&c, spec, &load, &all[i], &err) != HD_OK) fail_msg("%s", err.msg);
        const double users = 8.0 / all[i].dp, cycle = users * c.prefill_s + 100 * c.step_s;
        assert_near(c.output_tokens_s, 800 / cycle, 1e-9);
        assert_near(c.input_tokens_s, 2400 / cycle, 1e-9);
        assert_near(c.user_tokens_s, 1 / c.step_s, 1e-9);
        assert_true(c.ttft_s > c.step_s / 2 && c.free > 0);
        hd_capacity_close(&c);
    }
    hd_model_spec_close(spec);
}

static void loads_that_are_none(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v4");
    const hd_parallel_config one = hd_parallel_single();
    hd_load bad[] = {load, load, load, load};
    bad[0].users = 0;
    bad[1].prompt = spec->max_positions;
    bad[2].balancedness = 0;
    bad[3].accepted = 1;
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        hd_capacity c;
        hd_err err = {0};
        assert_int_equal(predict(&c, spec, &bad[i], &one, &err), HD_EINVAL);
        assert_null(c.prefill);
    }
    hd_model_spec_close(spec);
}

static void the_front_by_hand(void **state) {
    (void)state;
    const hd_capacity all[] = {
        {.free = 1,  .user_tokens_s = 10, .output_tokens_s = 10},
        {.free = 1,  .user_tokens_s = 5,  .output_tokens_s = 20},
        {.free = 1,  .user_tokens_s = 5,  .output_tokens_s = 15},
        {.free = -1, .user_tokens_s = 99, .output_tokens_s = 99},
        {.free = 0,  .user_tokens_s = 5,  .output_tokens_s = 20},
    };
    const bool want[] = {true, true, false, false, true};
    bool best[HD_LEN(all)];
    assert_int_equal(hd_capacity_front(all, HD_LEN(all), best), 3);
    assert_memory_equal(best, want, sizeof want);
}

/* The report's two cases of V3: 2,048 tokens of a rank in prefill; 128 in decode, with three times as
 * much for graphs. */
static void dense_weights_against_hidden_states(void **state) {
    (void)state;
    const double weights = 18432.0 * 7168, row = 7168;
    assert_near(hd_capacity_dense_tp(weights, 2048 * row), 3, 1e-12);
    assert_near(hd_capacity_dense_tp(weights, (1 + 3) * 128 * row), 6, 1e-12);
}

/* V4-Flash on four GPUs: each lacks 192 experts of 43 layers, of 3 x 4096 x 2048 numbers of 4 bits and a
 * byte of scale for 32. */
static void experts_of_other_ranks_are_fetched(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("v4_flash");
    const hd_gpu m = gpu_named("h200");
    const hd_parallel_config one = hd_parallel_single();
    const hd_load l = {
        .users = 64, .prompt = 8192, .output = 100, .chunk = 16384, .balancedness = 1};
    hd_capacity_args a = {.spec = spec, .gpu = &m, .load = l, .dwdp = 4};
    const double layer = 192 * 3 * 4096.0 * 2048 * (4 + 8 / 32.0) / 8;
    hd_capacity c, alone;
    hd_err err = {0};
    if (hd_capacity_predict(&c, &a, &one, &err) != HD_OK) fail_msg("%s", err.msg);
    assert_near(c.decode->fetch_bytes, 43 * layer, 1e-3);
    assert_near(c.decode->fetch_s, 43 * (7.6e-6 + layer / 395e9), 1e-3);
    assert_near((double)c.memory.staged, 2 * layer, 1e-3);
    assert_near((double)c.memory.weights[HD_PARAM_GROUP_EXPERTS] * 3, 44 * layer, 1e-3);
    assert_near(c.step_s, c.decode->fetch_s, 0); /* few rows do not hide it */
    assert_near(c.output_tokens_s * (16 * c.prefill_s + 100 * c.step_s), 6400, 1e-9);
    a.dwdp = 0;
    a.load.users = 16;
    if (hd_capacity_predict(&alone, &a, &one, &err) != HD_OK) fail_msg("%s", err.msg);
    assert_near(c.prefill->kernel_s, alone.prefill->kernel_s, 0);
    assert_near(c.prefill_s * 2, fmax(c.prefill->kernel_s, c.decode->fetch_s), 1e-9);
    hd_capacity_close(&alone);
    a.dwdp = 4;
    const hd_parallel_config two = hd_parallel_tensor(2);
    assert_int_equal(hd_capacity_predict(&alone, &a, &two, &err), HD_EUNSUPPORTED);
    hd_capacity_close(&c);
    hd_model_spec_close(spec);
}

static void pools_by_hand(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v4");
    const hd_gpu m = {.network_gb_s = 10, .network_us = 40};
    const hd_capacity_args a = {
        .spec = spec, .gpu = &m, .load = {.users = 8, .prompt = 300, .output = 100}
    };
    const hd_capacity fast = {.parallel = hd_parallel_single(), .free = 1, .ttft_s = 0.5};
    hd_capacity slow = fast, full = fast;
    slow.ttft_s = 1;
    full.free = -1;
    const hd_server_pool prefill[] = {
        {2, fast, 10},
        {2, slow, 20},
        {2, slow, 9 },
        {2, full, 99}
    };
    const bool want[] = {true, true, false, false};
    bool best[HD_LEN(prefill)];
    assert_int_equal(hd_server_pool_front(prefill, HD_LEN(prefill), HD_POOL_PREFILL, best), 2);
    assert_memory_equal(best, want, sizeof want);
    const hd_server_pool decode = {
        .servers = 6,
        .each = {.parallel = fast.parallel, .user_tokens_s = 50},
        .requests_s = 15
    };
    const hd_server_pool_pair p = hd_server_pool_join(&prefill[1], &decode, &a);
    assert_near(p.requests_s, 15, 0);
    assert_near(p.output_tokens_s, 1500, 0);
    assert_near(p.input_tokens_s, 4500, 0);
    assert_near(p.even_share, 15 / 6.0 / (20 / 2.0 + 15 / 6.0), 1e-12);
    assert_near(p.transfer_s, 40e-6 + p.kv_bytes / 10e9, 1e-12);
    assert_near(p.ttft_s, 1 + p.transfer_s, 0);
    assert_near(p.user_tokens_s, 50, 0);
    /* as many bytes as the pages that a sequence of the engine takes */
    const hd_kv_shape shape = hd_kv_shape_of(spec);
    const size_t page = hd_kv_page_bytes(spec, spec->n_layers + spec->n_mtp, HD_KV_FULL,
                                         hd_cuda_kv_type(a.precision), 0);
    assert_true(p.kv_bytes >= (double)page * 300 / shape.page_tokens);
    assert_near(hd_server_pool_join(&prefill[0], &decode, &a).requests_s, 10, 0);
    hd_model_spec_close(spec);
}

/* A decode pool is a server of the same layout and load; a prefill server is filled with prompts. */
static void pools_are_servers(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v4");
    const hd_gpu m = gpu_named("h200");
    const hd_capacity_args a = {.spec = spec, .gpu = &m, .load = load};
    const hd_parallel_config l = hd_parallel_common(1, 2, 2, spec);
    hd_capacity_args half = a;
    half.load.users = load.users / 2;
    hd_server_pool pools[2];
    hd_capacity c;
    hd_err err = {0};
    for (int i = 0; i < 2; i++) {
        if (hd_server_pool_predict(&pools[i], &a, (hd_server_pool_role)i, &l, 2, &err) !=
            HD_OK) {
            fail_msg("%s", err.msg);
        }
    }
    assert_int_equal(hd_capacity_predict(&c, &half, &l, &err), HD_OK);
    assert_near(pools[1].each.step_s, c.step_s, 0);
    assert_near(pools[1].requests_s, load.users / c.step_s / load.output, 1e-9);
    assert_near(pools[0].each.ttft_s, c.ttft_s, 1e-9);
    assert_near(pools[0].requests_s, 2 * 2 / c.ttft_s, 1e-9); /* a prompt of two chunks */
    hd_capacity_close(&c);
    for (int i = 0; i < 2; i++) hd_server_pool_close(&pools[i]);
    hd_model_spec_close(spec);
}

int test_capacity(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(spare_slots_are_counted),
        cmocka_unit_test(micro_batches_share_scratch),
        cmocka_unit_test(packed_rows_have_room),
        cmocka_unit_test(processes_of_one_host_have_messages),
        cmocka_unit_test(packed_rows_are_smaller_messages),
        cmocka_unit_test(tables_are_in_host_memory),
        cmocka_unit_test(a_row_reads_its_experts),
        cmocka_unit_test(steps_repeat),
        cmocka_unit_test(unbalanced_experts_cost),
        cmocka_unit_test(packed_rows_travel_as_they_are),
        cmocka_unit_test(rows_of_prompts_are_divided),
        cmocka_unit_test(a_step_beyond_the_limits),
        cmocka_unit_test(nodes_divide_what_is_sent),
        cmocka_unit_test(few_choices_hit_few_slots),
        cmocka_unit_test(times_by_hand),
        cmocka_unit_test(gpus_from_files),
        cmocka_unit_test(a_load_takes_its_steps),
        cmocka_unit_test(loads_that_are_none),
        cmocka_unit_test(the_front_by_hand),
        cmocka_unit_test(dense_weights_against_hidden_states),
        cmocka_unit_test(experts_of_other_ranks_are_fetched),
        cmocka_unit_test(pools_by_hand),
        cmocka_unit_test(pools_are_servers),
    };
    return cmocka_run_group_tests_name("capacity", tests, NULL, NULL);
}
