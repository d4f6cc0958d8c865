/* cublaslt_cuda.cu - many rows times large stored matrices by cuBLASLt: --no-batch-invariance.
 *
 * The library chooses tiles and splits of the sums by the number of rows, so what a row becomes depends
 * on the others: design D8 does not hold here. Two kinds of product are asked of it, those known to
 * work on this GPU, and never any other: asking for one that it lacks may abort the process.
 *     FP8 with scales per 128 x 128, on Hopper: x as FP8 too, with a float32 scale per 128 columns of a row
 *     BF16:                          x rounded to bfloat16
 * Sums and results are float32. A product's algorithm is what the library's heuristic gives for its
 * shape when it is first met; nothing is tried out. x and the scales of W are laid as the library wants
 * them in the stream's scratch, as many rows at a time as fit beside the library's own. The library is
 * loaded when the mode is asked for, so that programs run without it; only its header is built with. */
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <dlfcn.h>
#include <stdlib.h>

#include "base/log.h"
#include "ops/cuda/gemm_transposed_internal.cuh"

#define QUOTED(x)     #x
#define VALUE_OF(x)   QUOTED(x)
#define CUBLASLT_FILE "libcublasLt.so." VALUE_OF(CUBLAS_VER_MAJOR)

#define CUBLASLT_CALLS(X)            \
    X(Create)                        \
    X(Destroy)                       \
    X(GetVersion)                    \
    X(Matmul)                        \
    X(MatmulAlgoGetHeuristic)        \
    X(MatmulDescInit_internal)       \
    X(MatmulDescSetAttribute)        \
    X(MatrixLayoutInit_internal)     \
    X(MatmulPreferenceInit_internal) \
    X(MatmulPreferenceSetAttribute)

namespace {

/* Fewer rows, and fewer products of one of several heads, are left to our own kernels: here every head
 * is a call of its own, whose tiles do not shrink (measured: docs/perf/log). */
constexpr int32_t LEAST_ROWS = 64;
constexpr int64_t LEAST_OF_HEAD = 1 << 30;
constexpr int32_t SCALED = 128;  /* columns, and rows of W, that share a scale */
constexpr int32_t ROWS_STEP = 4; /* of x in FP8; and scales of a row of W */
constexpr uint32_t ALIGNED = 16; /* bytes, all operands */
constexpr size_t PLACE = 256;    /* bytes that parts of the scratch are multiples of */
constexpr size_t MAX_WORKSPACE = 32 << 20;
constexpr int MAX_PLANS = 512;
constexpr float E4M3_MAX = 448.0f, LEAST_SIZE = 1e-30f;

static_assert(sizeof(cuda_act) == sizeof(float), "x and results are float32");

/* out [rows, n] = x [rows, k] times W [n, k] transposed. */
struct product {
    hd_dtype type;
    int32_t rows, n, k;
    int64_t out_stride;
    size_t workspace;

    bool operator==(const product &) const = default;
};

struct plan {
    product of;
    cublasLtMatmulAlgo_t algo;
    bool fits; /* the library has one */
};

struct cublaslt {
    cublasLtHandle_t handle;
#define X(name) decltype(&cublasLt##name) name;
    CUBLASLT_CALLS(X)
#undef X
    plan plans[MAX_PLANS]; /* of the products met so far, the oldest forgotten first */
    int64_t n_plans;       /* ever made */
};

/* ---- operands ---- */

/* Where x and the scales of W go. */
struct operands {
    uint8_t *x;     /* [rows, k] FP8 or BF16 */
    float *x_scale; /* [k / 128, rows] */
    float *w_scale; /* [n / 128 upwards, w_pitch] */
    int32_t w_pitch;
};

__host__ __device__ inline int32_t up_to(int32_t n, int32_t step) {
    return (n + step - 1) / step * step;
}

inline size_t placed(size_t bytes) {
    return (bytes + PLACE - 1) / PLACE * PLACE;
}

inline size_t w_scale_bytes(const product &p) {
    const int32_t pitch = up_to(p.k / SCALED, ROWS_STEP);
    return p.type == HD_E4M3 ? placed(sizeof(float) * (size_t)pitch * blocks_for(p.n, SCALED))
                             : 0;
}

inline size_t row_bytes(const product &p) {
    return p.type == HD_E4M3 ? (size_t)p.k + (size_t)p.k / SCALED * sizeof(float)
                             : (size_t)p.k * sizeof(__nv_bfloat16);
}

/* A warp: 128 columns of a row. */
__device__ void narrow_span(const operands &to, const cuda_act *x, int64_t x_stride,
                            const product &p, int32_t row, int32_t span, int lane) {
    const float4 v =
        *reinterpret_cast<const float4 *>(x + row * x_stride + span * SCALED + 4 * lane);
    const float size = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    const float most = fmaxf(warp_max(size), LEAST_SIZE); /* zeros have a scale too */
    const float times = E4M3_MAX / most;
    const uint32_t low =
        __nv_cvt_float2_to_fp8x2({v.x * times, v.y * times}, __NV_SATFINITE, __NV_E4M3);
    const uint32_t high =
        __nv_cvt_float2_to_fp8x2({v.z * times, v.w * times}, __NV_SATFINITE, __NV_E4M3);
    reinterpret_cast<uint32_t *>(to.x + (int64_t)row * p.k + span * SCALED)[lane] =
        high << 16 | low;
    if (lane == 0) to.x_scale[(int64_t)span * p.rows + row] = most / E4M3_MAX;
}

/* x in warps of 128 columns, and behind them the scales of W, one a thread. */
__global__ void __launch_bounds__(BLOCK)
    describe_fp8(operands to, const cuda_act *x, int64_t x_stride, const uint8_t *scale,
                 int32_t scale_type, product p) {
    const int64_t warp = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    const int32_t spans = p.k / SCALED;
    const int64_t x_warps = (int64_t)p.rows * spans;
    if (warp < x_warps) {
        narrow_span(to, x, x_stride, p, (int32_t)(warp / spans), (int32_t)(warp % spans), lane);
        return;
    }
    const int64_t i = (warp - x_warps) * WARP + lane;
    const int64_t row = i / to.w_pitch, col = i % to.w_pitch;
    if (row >= (p.n + SCALED - 1) / SCALED) return;
    to.w_scale[i] = col < spans ? number_at(scale, scale_type, row * spans + col) : 0.0f;
}

/* Four columns a thread. */
__global__ void __launch_bounds__(BLOCK)
    describe_bf16(operands to, const cuda_act *x, int64_t x_stride, product p) {
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    const int32_t quads = p.k / 4;
    const int64_t row = i / quads, quad = i % quads;
    if (row >= p.rows) return;
    const float4 v = reinterpret_cast<const float4 *>(x + row * x_stride)[quad];
    __nv_bfloat162 *out = reinterpret_cast<__nv_bfloat162 *>(to.x) + 2 * i;
    out[0] = __floats2bfloat162_rn(v.x, v.y);
    out[1] = __floats2bfloat162_rn(v.z, v.w);
}

/* scale: of the first row of W. */
void set_layout(hd_stream *s, const operands &to, const cuda_act *x, int64_t x_stride,
                const uint8_t *scale, int32_t scale_type, const product &p) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (p.type == HD_BF16) {
        const int64_t quads = (int64_t)p.rows * (p.k / 4);
        describe_bf16<<<blocks_for(quads, BLOCK), BLOCK, 0, queue>>>(to, x, x_stride, p);
        return;
    }
    const int64_t x_threads = (int64_t)p.rows * (p.k / SCALED) * WARP;
    const int64_t scales = (int64_t)to.w_pitch * blocks_for(p.n, SCALED);
    describe_fp8<<<blocks_for(x_threads + scales, BLOCK), BLOCK, 0, queue>>>(
        to, x, x_stride, scale, scale_type, p);
}

/* ---- what the library is told ---- */

struct description {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t w, x, out; /* column-major: W and x are seen transposed */
};

template <typename T>
bool set(const cublaslt *l, description *d, cublasLtMatmulDescAttributes_t what, T value) {
    return l->MatmulDescSetAttribute(&d->op, what, &value, sizeof value) ==
           CUBLAS_STATUS_SUCCESS;
}

bool place_tiles(const cublaslt *l, cublasLtMatrixLayoutOpaque_t *to, cudaDataType_t type,
                 int32_t rows, int32_t cols, int64_t stride) {
    return l->MatrixLayoutInit_internal(to, sizeof *to, type, (uint64_t)rows, (uint64_t)cols,
                                        stride) == CUBLAS_STATUS_SUCCESS;
}

bool describe(const cublaslt *l, const product &p, const void *w_scale, const void *x_scale,
              description *d) {
    const bool fp8 = p.type == HD_E4M3;
    const cudaDataType_t type = fp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
    if (l->MatmulDescInit_internal(&d->op, sizeof d->op, CUBLAS_COMPUTE_32F, CUDA_R_32F) !=
            CUBLAS_STATUS_SUCCESS ||
        !set(l, d, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T) ||
        !place_tiles(l, &d->w, type, p.k, p.n, p.k) ||
        !place_tiles(l, &d->x, type, p.k, p.rows, p.k) ||
        !place_tiles(l, &d->out, CUDA_R_32F, p.n, p.rows, p.out_stride)) {
        return false;
    }
    return !fp8 || (set(l, d, CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
                        CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F) &&
                    set(l, d, CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
                        CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F) &&
                    set(l, d, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, w_scale) &&
                    set(l, d, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x_scale));
}

/* ---- algorithms ---- */

bool choose(const cublaslt *l, description *d, plan *to) {
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const size_t workspace = to->of.workspace;
    cublasLtMatmulPreferenceOpaque_t wish;
    cublasLtMatmulHeuristicResult_t found;
    int n = 0;
    bool ok =
        l->MatmulPreferenceInit_internal(&wish, sizeof wish) == CUBLAS_STATUS_SUCCESS &&
        l->MatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                        &workspace, sizeof workspace) == CUBLAS_STATUS_SUCCESS;
    for (const auto &a : alignments) {
        ok = ok && l->MatmulPreferenceSetAttribute(&wish, a, &ALIGNED, sizeof ALIGNED) ==
                       CUBLAS_STATUS_SUCCESS;
    }
    ok = ok && l->MatmulAlgoGetHeuristic(l->handle, &d->op, &d->w, &d->x, &d->out, &d->out,
                                         &wish, 1, &found, &n) == CUBLAS_STATUS_SUCCESS;
    if (!ok || n == 0 || found.state != CUBLAS_STATUS_SUCCESS) return false;
    to->algo = found.algo;
    return true;
}

int64_t n_known(const cublaslt *l) {
    return l->n_plans < MAX_PLANS ? l->n_plans : MAX_PLANS;
}

/* The product goes to our own kernels from now on, which is said once of a matrix. */
void give_up(const cublaslt *l, plan *p) {
    bool failed_before = false;
    for (int64_t i = 0; i < n_known(l); i++) {
        const product &of = l->plans[i].of;
        failed_before =
            failed_before || (!l->plans[i].fits && of.n == p->of.n && of.k == p->of.k);
    }
    p->fits = false;
    if (failed_before) return;
    const hd_log_field fields[] = {hd_log_text("weights", hd_dtype_name(p->of.type)),
                                   hd_log_int("rows", p->of.rows), hd_log_int("outs", p->of.n),
                                   hd_log_int("cols", p->of.k)};
    hd_log_write(HD_LOG_WARN, "no_library_product", fields, HD_LEN(fields));
}

plan *plan_of(cublaslt *l, const product &p, description *d) {
    for (int64_t i = 0; i < n_known(l); i++) {
        if (l->plans[i].of == p) return &l->plans[i];
    }
    plan *made = &l->plans[l->n_plans++ % MAX_PLANS];
    *made = {p, {}, true};
    if (!choose(l, d, made)) give_up(l, made);
    return made;
}

/* ---- products ---- */

bool suits(const heads_job &h, const hd_weight *w) {
    const cuda_act *out = static_cast<const cuda_act *>(h.out);
    const bool aligned = x_fits(h.x, h.x_stride, h.x_head) &&
                         x_fits(out, h.out_stride, h.out_head) &&
                         (uintptr_t)w->data % ALIGNED == 0;
    if (!aligned || h.rows < LEAST_ROWS) return false;
    const int64_t of_head = (int64_t)h.rows * h.n_rows * w->cols;
    if (h.heads > 1 && of_head <= LEAST_OF_HEAD) return false;
    if (w->type == HD_BF16) return !w->scale && w->cols % 8 == 0;
    return hd_cuda_is_sm90() && w->type == HD_E4M3 && w->scale && w->block_rows == SCALED &&
           w->block_cols == SCALED && w->cols % SCALED == 0 && h.first_row % SCALED == 0 &&
           h.head_rows % SCALED == 0;
}

/* Where the operands of p lie in the scratch, behind the library's own. */
operands place(hd_stream *s, const product &p) {
    operands o;
    uint8_t *at = static_cast<uint8_t *>(hd_stream_scratch(s, 0, 0)) + p.workspace;
    o.w_pitch = up_to(p.k / SCALED, ROWS_STEP);
    o.w_scale = reinterpret_cast<float *>(at);
    o.x = at + w_scale_bytes(p);
    o.x_scale = reinterpret_cast<float *>(o.x + placed((size_t)p.rows * (size_t)p.k));
    return o;
}

/* How many rows of x fit into the scratch, and how much of it is the library's. */
size_t share_out(hd_stream *s, product *p) {
    const size_t all = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const size_t half = all / 2 / PLACE * PLACE;
    p->workspace = half < MAX_WORKSPACE ? half : MAX_WORKSPACE;
    const size_t taken = p->workspace + w_scale_bytes(*p) + PLACE;
    return all > taken ? (all - taken) / row_bytes(*p) : 0;
}

/* p.rows rows of every head, from row `first` on. False: not all of it was done. */
bool multiply(hd_stream *s, cublaslt *l, const product &p, const heads_job &h,
              const hd_weight *w, int32_t first) {
    const operands o = place(s, p);
    const float one = w->global, zero = 0.0f;
    description d;
    if (!describe(l, p, o.w_scale, o.x_scale, &d)) return false;
    plan *how = plan_of(l, p, &d);
    for (int32_t head = 0; head < h.heads && how->fits; head++) {
        const int64_t row = h.first_row + (int64_t)head * h.head_rows;
        const uint8_t *data =
            static_cast<const uint8_t *>(w->data) + row * w->cols * hd_dtype_bits(w->type) / 8;
        const int64_t scales = row / SCALED * (w->cols / SCALED);
        const uint8_t *scale = static_cast<const uint8_t *>(w->scale) +
                               (w->scale ? scales * hd_dtype_bits(w->scale_type) / 8 : 0);
        float *out = static_cast<float *>(h.out) + first * h.out_stride + head * h.out_head;
        set_layout(s, o, h.x + first * h.x_stride + head * h.x_head, h.x_stride, scale,
                   w->scale_type, p);
        if (l->Matmul(l->handle, &d.op, &one, data, &d.w, o.x, &d.x, &zero, out, &d.out, out,
                      &d.out, &how->algo, hd_stream_scratch(s, 0, 0), p.workspace,
                      hd_cuda_stream(s)) != CUBLAS_STATUS_SUCCESS) {
            give_up(l, how);
        }
    }
    return how->fits;
}

/* ---- opening ---- */

void close_cublaslt(void *what) {
    cublaslt *l = static_cast<cublaslt *>(what);
    if (l->handle) l->Destroy(l->handle);
    free(l); /* the file stays: its kernels are known to the driver */
}

hd_status find_calls(cublaslt *l, hd_err *err) {
    void *file = dlopen(CUBLASLT_FILE, RTLD_NOW | RTLD_LOCAL);
    if (!file) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "no-batch-invariance multiplies by cuBLASLt: %s",
                       dlerror());
    }
#define X(name)                                                                          \
    l->name = reinterpret_cast<decltype(l->name)>(dlsym(file, "cublasLt" #name));        \
    if (!l->name) {                                                                      \
        return HD_FAIL(err, HD_EUNSUPPORTED, "%s has no cublasLt" #name, CUBLASLT_FILE); \
    }
    CUBLASLT_CALLS(X)
#undef X
    return HD_OK;
}

/* Whether it has both kinds of product, asked for a layer of a real model. */
hd_status try_out(const cublaslt *l, hd_err *err) {
    for (const hd_dtype type : {HD_E4M3, HD_BF16}) {
        const void *const aligned = l; /* looked at, not read */
        description d;
        plan unused = {
            {type,  LEAST_ROWS, 2048, 7168, 2048, MAX_WORKSPACE},
            {},
            true
        };
        if (!describe(l, unused.of, aligned, aligned, &d) || !choose(l, &d, &unused)) {
            return HD_FAIL(err, HD_EUNSUPPORTED,
                           "no-batch-invariance: version %zu of %s has no product of %s%s for "
                           "this GPU",
                           l->GetVersion(), CUBLASLT_FILE, hd_dtype_name(type),
                           type == HD_E4M3 ? " with scales per 128 x 128" : "");
        }
    }
    return HD_OK;
}

hd_status open_cublaslt(cublaslt *l, hd_err *err) {
    HD_TRY(find_calls(l, err));
    const cublasStatus_t status = l->Create(&l->handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return HD_FAIL(err, HD_EDEVICE, "%s does not open: status %d", CUBLASLT_FILE,
                       (int)status);
    }
    return try_out(l, err);
}

} // namespace

extern "C" hd_status hd_ops_open_cublaslt(hd_device *d, hd_err *err) {
    cublaslt *l = static_cast<cublaslt *>(calloc(1, sizeof *l));
    if (!l) return HD_FAIL(err, HD_ENOMEM, "no memory for cuBLASLt's plans");
    const hd_status st = open_cublaslt(l, err);
    if (st != HD_OK) {
        close_cublaslt(l);
        return st;
    }
    hd_cuda_attach(d, l, close_cublaslt);
    return HD_OK;
}

int32_t cublaslt_multiply(hd_stream *s, const heads_job &h, const hd_weight *w) {
    if (!suits(h, w)) return 0;
    cublaslt *l = static_cast<cublaslt *>(hd_cuda_attached(s));
    product p = {w->type, 0, h.n_rows, w->cols, h.out_stride, 0};
    const int32_t step = w->type == HD_E4M3 ? ROWS_STEP : 1;
    const size_t fit = share_out(s, &p);
    if (fit < LEAST_ROWS) return 0;
    int32_t done = 0;
    while (h.rows - done >= step) {
        const int32_t left = h.rows - done;
        p.rows = ((size_t)left < fit ? left : (int32_t)fit) / step * step;
        if (!multiply(s, l, p, h, w, done)) break;
        done += p.rows;
    }
    return done;
}
