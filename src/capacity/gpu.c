/* gpu.c - the table of GPUs, GPUs from JSON files, and the times of kernels and
 * exchanges. */
#include "capacity/gpu.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"

enum { MAX_FILE_BYTES = 1 << 16 };

/* The H200's numbers are measured. Of others the datasheet says peaks; they are taken times what
 * the H200 reached of its own: 4.3 of 4.8 TB/s, 1500 of 1979 and 814 of 989 TFLOP/s, 395 of
 * 450 GB/s. */
#define DATASHEET "peaks of NVIDIA's datasheet, times what the H200 reached of its own"

/* What all GPUs share: the memory that drivers take, nodes of 8, and times of launches and latencies
 * and the rate of the host link, which are the H200's. */
#define SHARED                                                                         \
    .reserved_gb = 2, .launch_us = 1.5, .node = 8, .link_us = 7.6, .network_gb_s = 50, \
    .network_us = 25, .host_gb_s = 55.4, .disk_gb_s = 3

#define OF_A_CPU                                                             \
    .cpu = true, .reserved_gb = 2, .launch_us = 2, .node = 1, .link_us = 10, \
    .network_gb_s = 1, .network_us = 25, .host_gb_s = 45, .disk_gb_s = 3

static const hd_gpu gpus[] = {
    {.name = "h100",
     .source = DATASHEET,
     .memory_gb = 85.5,
     .memory_tb_s = 3.0,
     .tflops_8bit = 1500,
     .tflops_16bit = 814,
     .link_gb_s = 395,
     SHARED  },
    {.name = "h200",
     .source = "measured on an H200; the network is assumed",
     .memory_gb = 150.75,
     .memory_tb_s = 4.3,
     .tflops_8bit = 1500,
     .tflops_16bit = 814,
     .link_gb_s = 395,
     SHARED  },
    {.name = "b200",
     .source = DATASHEET,
     .memory_gb = 180,
     .memory_tb_s = 7.17,
     .tflops_8bit = 3410,
     .tflops_16bit = 1850,
     .link_gb_s = 790,
     SHARED  },
    {.name = "cpu",
     .source =
         "two Zen 5 cores: DRAM and float32 products measured, 32 GB and the disk assumed", .memory_gb = 32,
     .memory_tb_s = 0.045,
     .tflops_8bit = 0.3,
     .tflops_16bit = 0.3,
     .link_gb_s = 10,
     OF_A_CPU},
};

typedef struct number {
    const char *name, *unit;
    size_t at; /* offset in hd_gpu */
} number;

static const number numbers[] = {
#define X(field, unit, what) {#field, unit, offsetof(hd_gpu, field)},
    HD_GPU_NUMBERS(X)
#undef X
};

static double *number_in(hd_gpu *m, const number *n) {
    return (double *)(void *)((char *)m + n->at);
}

const hd_gpu *hd_gpu_at(size_t i) {
    return i < HD_LEN(gpus) ? &gpus[i] : NULL;
}

static const hd_gpu *row_named(const char *name) {
    for (size_t i = 0; i < HD_LEN(gpus); i++) {
        if (strcmp(gpus[i].name, name) == 0) return &gpus[i];
    }
    return NULL;
}

/* ---- files ---- */

static const number *number_named(const char *name) {
    for (size_t i = 0; i < HD_LEN(numbers); i++) {
        if (strcmp(numbers[i].name, name) == 0) return &numbers[i];
    }
    return NULL;
}

static hd_status start_like(hd_gpu *out, const json_t *like, const char *path, hd_err *err) {
    if (!like) return HD_OK;
    const hd_gpu *row = json_is_string(like) ? row_named(json_string_value(like)) : NULL;
    if (!row) return HD_FAIL(err, HD_EINVAL, "%s: like names no GPU that is known", path);
    *out = *row;
    return HD_OK;
}

static hd_status read_numbers(hd_gpu *out, json_t *all, const char *path, hd_err *err) {
    const char *key;
    json_t *value;
    json_object_foreach(all, key, value) {
        const number *n = number_named(key);
        const double v = json_number_value(value);
        if (strcmp(key, "like") == 0) continue;
        if (!n) return HD_FAIL(err, HD_EINVAL, "%s: %s is no number of a GPU", path, key);
        const bool may_be_0 = strcmp(n->unit, "us") == 0 || strcmp(key, "reserved_gb") == 0;
        if (!json_is_number(value) || !(v >= 0 && v < 1e9) || (v <= 0 && !may_be_0)) {
            return HD_FAIL(err, HD_EINVAL, "%s: %s must be a number of %s", path, key, n->unit);
        }
        *number_in(out, n) = v;
    }
    if (out->node == floor(out->node)) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "%s: node must be a whole number", path);
}

static hd_status check_complete(const json_t *all, const char *path, hd_err *err) {
    if (json_object_get(all, "like")) return HD_OK;
    for (size_t i = 0; i < HD_LEN(numbers); i++) {
        if (json_object_get(all, numbers[i].name)) continue;
        return HD_FAIL(err, HD_EINVAL, "%s: %s is missing, and no GPU to be like", path,
                       numbers[i].name);
    }
    return HD_OK;
}

static hd_status read_file(hd_gpu *out, const char *path, hd_err *err) {
    json_t *all;
    HD_TRY(hd_json_load(&all, path, MAX_FILE_BYTES, err));
    hd_status st = json_is_object(all) ? check_complete(all, path, err)
                                       : HD_FAIL(err, HD_EINVAL, "%s is no JSON object", path);
    if (st == HD_OK) st = start_like(out, json_object_get(all, "like"), path, err);
    if (st == HD_OK) st = read_numbers(out, all, path, err);
    json_decref(all);
    out->source = "a file";
    snprintf(out->name, sizeof out->name, "%s", path);
    return st;
}

static hd_status unknown(const char *name, hd_err *err) {
    char names[200] = "";
    for (size_t i = 0, at = 0; i < HD_LEN(gpus) && at < sizeof names; i++) {
        at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", i ? ", " : "",
                               gpus[i].name);
    }
    return HD_FAIL(err, HD_EINVAL, "'%s' is no GPU (%s), and no .json file of one", name,
                   names);
}

hd_status hd_gpu_find(hd_gpu *out, const char *name, hd_err *err) {
    *out = (hd_gpu){0};
    const hd_gpu *row = row_named(name);
    const char *end = strrchr(name, '.');
    if (!row && end && strcmp(end, ".json") == 0) return read_file(out, name, err);
    if (!row) return unknown(name, err);
    *out = *row;
    return HD_OK;
}

/* ---- times ---- */

double hd_gpu_kernel_seconds(const hd_gpu *m, double calls, double bytes, double flops,
                             hd_dtype type) {
    const bool narrow = type != HD_NONE && hd_dtype_bits(type) <= 8;
    const double flops_s = (narrow ? m->tflops_8bit : m->tflops_16bit) * 1e12;
    return calls * m->launch_us * 1e-6 + fmax(bytes / (m->memory_tb_s * 1e12), flops / flops_s);
}

double hd_gpu_exchange_seconds(const hd_gpu *m, double calls, double inside, double outside) {
    const double latency = outside > 0 ? m->network_us : m->link_us;
    return calls * latency * 1e-6 +
           fmax(inside / (m->link_gb_s * 1e9), outside / (m->network_gb_s * 1e9));
}
