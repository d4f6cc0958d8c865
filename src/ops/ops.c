/* ops.c - selects a backend's operator table ("ref", "cpu", "cuda", "auto") and opens its
 * device. */
#include "ops/ops.h"

#include <string.h>

#include "base/cpu.h"
#include "base/log.h"
#include "ops/check_internal.h"
#include "ops/cpu/cpu_internal.h"
#include "ops/ref/ref_internal.h"

static const ops_types ref_types = {1u << HD_F32, OPS_ENTRY_TYPES, OPS_ENTRY_TYPES};

#define X(op)                                                      \
    static void op##_ref(hd_stream *s, const hd_##op##_args *a) {  \
        if (ops_check_##op(s, &ref_types, a)) hd_##op##_ref(s, a); \
    }
HD_OP_LIST(X)
#undef X
#define X(op)                                                               \
    static void op##_ref_official(hd_stream *s, const hd_##op##_args *a) {  \
        if (ops_check_##op(s, &ref_types, a)) hd_##op##_ref_official(s, a); \
    }
REF_OFFICIAL_LIST(X)
#undef X

void hd_ops_init_ref(hd_ops *t, hd_precision precision) {
    *t = (hd_ops){.name = "ref",
                  .act_type = HD_F32,
                  .activations = "float32",
#define X(op) .op = op##_ref,
                  HD_OP_LIST(X)
#undef X
    };
    if (precision != HD_OFFICIAL) return;
    t->name = "ref, official";
    t->precision = precision;
    t->activations = "FP8, bfloat16 for NVFP4 and BF16 matrices";
#define X(op) t->op = op##_ref_official;
    REF_OFFICIAL_LIST(X)
#undef X
}

const char *const hd_precision_names[] = {"exact", "fast", "official", "auto", NULL};

hd_status hd_precision_of(hd_precision *out, const char *name, hd_err *err) {
    *out = HD_AUTO;
    if (!name) return HD_OK;
    for (int i = 0; i <= HD_AUTO; i++) {
        *out = (hd_precision)i;
        if (strcmp(name, hd_precision_names[i]) == 0) return HD_OK;
    }
    return HD_FAIL(err, HD_EINVAL, "precision '%s' is none of auto, exact, fast, official",
                   name);
}

const char *const hd_kv_type_names[] = {"auto", "float32", "bfloat16", "fp8", "fp4", NULL};
static const hd_dtype kv_types[] = {HD_NONE, HD_F32, HD_BF16, HD_E4M3, HD_E2M1};

hd_status hd_kv_type_of(hd_dtype *out, const char *name, hd_err *err) {
    *out = HD_NONE;
    if (!name) return HD_OK;
    for (size_t i = 0; i < HD_LEN(kv_types); i++) {
        *out = kv_types[i];
        if (strcmp(name, hd_kv_type_names[i]) == 0) return HD_OK;
    }
    return HD_FAIL(err, HD_EINVAL,
                   "kv_cache_dtype '%s' is none of auto, float32, bfloat16, fp8, fp4", name);
}

const char *hd_kv_type_name(hd_dtype type) {
    for (size_t i = 1; i < HD_LEN(kv_types); i++) {
        if (kv_types[i] == type) return hd_kv_type_names[i];
    }
    return "float32";
}

hd_status hd_mla_form_of(hd_mla_form *out, const char *name, hd_err *err) {
    *out = name && strcmp(name, "naive") == 0 ? HD_MLA_NAIVE : HD_MLA_ABSORBED;
    if (*out == HD_MLA_NAIVE || !name || strcmp(name, "absorbed") == 0) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "mla '%s' is neither absorbed nor naive", name);
}

static hd_precision precision_on(const char *backend, const hd_ops_options *o) {
    if (o->precision != HD_AUTO) return o->precision;
    const bool rounds =
        strcmp(backend, "cuda") == 0 && hd_cuda_has_kv_type(HD_OFFICIAL, o->kv_type);
    return rounds ? HD_OFFICIAL : HD_EXACT;
}

static hd_status check_options(const char *backend, const hd_ops_options *o, hd_err *err) {
    if (o->precision == HD_FAST && strcmp(backend, "ref") == 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "precision fast is for cpu and cuda, not for ref");
    }
    if (o->precision == HD_OFFICIAL && strcmp(backend, "cuda") != 0 &&
        strcmp(backend, "ref") != 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "precision official is for cuda and ref, not for %s", backend);
    }
    if (strcmp(backend, "cuda") == 0 && !hd_cuda_has_kv_type(o->precision, o->kv_type)) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "kv_cache_dtype %s is not for cuda: with this precision it caches %s",
                       hd_kv_type_name(o->kv_type), hd_cuda_kv_types(o->precision));
    }
    if (o->gpu != 0 && strcmp(backend, "cuda") != 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "gpu %d is for backend cuda, not for %s", o->gpu,
                       backend);
    }
    if (o->cuda_path && strcmp(backend, "cuda") != 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "cuda_path %s is for backend cuda, not for %s",
                       hd_cuda_path_names[o->cuda_path], backend);
    }
    if (!o->no_batch_invariance) return HD_OK;
    if (strcmp(backend, "cuda") != 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "no-batch-invariance is for backend cuda; backend '%s' has no products "
                       "that depend on the batch",
                       backend);
    }
    if (o->precision == HD_FAST) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "no-batch-invariance is for precision fast: its products round activations "
                   "to FP8 and bfloat16, and exact ones round nothing");
}

static hd_status open_cuda(hd_ops *t, hd_device **d, const hd_ops_options *o, hd_err *err) {
    HD_TRY(hd_device_open_cuda(d, o->gpu, o->cuda_path, err));
#ifdef HD_CUDA
    hd_ops_init_cuda(t, o->precision, o->no_batch_invariance, hd_device_cuda_path(*d));
    if (o->kv_type) t->kv_type = o->kv_type;
    if (o->no_batch_invariance) return hd_ops_open_cublaslt(*d, err);
#else
    (void)t;
    (void)o;
#endif
    return HD_OK;
}

/* "auto": a GPU if there is one that supports the options, else the CPU. If only the GPU
 * supports them, its error is returned. */
static hd_status open_auto(hd_ops *t, hd_device **d, const hd_ops_options *asked, hd_err *err) {
    hd_ops_options of_gpu = *asked, *o = &of_gpu;
    o->precision = precision_on("cuda", asked);
    const char *const gpus_alone = o->no_batch_invariance            ? "no-batch-invariance"
                                   : asked->precision == HD_OFFICIAL ? "precision official"
                                   : o->cuda_path                    ? "cuda_path"
                                                                     : NULL;
    hd_err why = {0};
    if (gpus_alone) HD_TRY(check_options("cuda", o, err));
    if (o->needs_cpu) {
        HD_FAIL(&why, HD_EUNSUPPORTED, "%s is for a CPU", o->needs_cpu);
    } else if (!hd_cuda_has_kv_type(o->precision, o->kv_type)) {
        HD_FAIL(&why, HD_EUNSUPPORTED, "kv_cache_dtype %s is for a CPU",
                hd_kv_type_name(o->kv_type));
    } else if (open_cuda(t, d, o, &why) == HD_OK) {
        return HD_OK;
    }
    if (gpus_alone) return HD_FAIL(err, why.status, "%s is for a GPU: %s", gpus_alone, why.msg);
    hd_device_close(*d);
    if (o->no_gpu) *o->no_gpu = why;
    return hd_ops_open(t, d, "cpu", asked, err);
}

static void warn_exact(void) {
    HD_LOG(
        HD_LOG_WARN, "computing_exactly",
        hd_log_text("why", "precision fast wants AVX2, and nothing else is faster than exact"));
}

hd_status hd_ops_open(hd_ops *t, hd_device **d, const char *backend,
                      const hd_ops_options *asked, hd_err *err) {
    hd_ops_options of_backend = *asked, *o = &of_backend;
    const hd_cpu_options one = {
        .n_threads = 1, .pin = o->cpu.pin, .untouched = o->cpu.untouched};
    *d = NULL;
    if (strcmp(backend, "auto") == 0 && o->gpu == 0) return open_auto(t, d, asked, err);
    if (strcmp(backend, "auto") == 0) backend = "cuda"; /* that GPU, and nothing else */
    o->precision = precision_on(backend, asked);
    HD_TRY(check_options(backend, o, err));
    if (strcmp(backend, "cuda") == 0) return open_cuda(t, d, o, err);
    if (strcmp(backend, "ref") == 0) {
        hd_ops_init_ref(t, o->precision);
        t->kv_type = o->kv_type;
        return hd_device_open_cpu(d, &one, err);
    }
    if (strcmp(backend, "cpu") == 0) {
        hd_ops_init_cpu(t, hd_cpu_features() & ~o->cpu.without, o->precision);
        t->kv_type = o->kv_type;
        if (t->precision != o->precision) warn_exact();
        return hd_device_open_cpu(d, &o->cpu, err);
    }
    return HD_FAIL(err, HD_EINVAL, "backend '%s' is none of auto, cpu, cuda, ref", backend);
}

const char *hd_ops_activations(const char *backend, hd_precision precision) {
    hd_ops t = {0};
    if (strcmp(backend, "cpu") == 0 && precision != HD_OFFICIAL) {
        hd_ops_init_cpu(&t, hd_cpu_features(), precision);
    }
#ifdef HD_CUDA
    if (strcmp(backend, "cuda") == 0) hd_ops_init_cuda(&t, precision, false, HD_CUDA_AUTO);
#endif
    return t.activations;
}

hd_acceptance hd_acceptance_of(float mean) {
    hd_acceptance a = {0};
    for (int32_t k = 0; k < HD_MAX_DRAFTS && mean > (float)k; k++) {
        const float left = mean - (float)k;
        a.least[k] = left < 1.0f ? left : 1.0f;
    }
    return a;
}

size_t hd_ops_scratch_bytes(int32_t max_keys, int32_t max_cols) {
    return (size_t)OPS_STATE_BYTES + 16 * ((size_t)max_keys + (size_t)max_cols);
}
