/* official_cuda.cu - --precision official: GEMMs with the activation quantization of the published
 * inference programs.
 *
 * FP8 matrices, and FP4 ones with a power of two per 32 columns, are multiplied by activations in
 * E4M3; all others by bfloat16, by the kernels of --precision fast. Where Hopper's kernels do not take
 * a matrix, rows are rounded to the same numbers and multiplied exactly. Rows lie in the stream's
 * scratch, as many at a time as fit. */
#include "ops/cuda/fused_internal.cuh"
#include "ops/cuda/official_internal.cuh"
#include "ops/cuda/sm90_internal.cuh"
#include "ops/fused_internal.h"

namespace {

constexpr float E4M3_MAX = 448.0f, LEAST_SIZE = 1e-4f;
constexpr size_t PLACE = 1024; /* bytes that parts of the scratch are multiples of */

struct rows_job {
    const cuda_act *x;
    int64_t x_stride;
    const int32_t *assignment, *offset; /* of experts, or NULL */
    int32_t n_experts, top_k, from, rows, spans;
    bool powers; /* scales are powers of two */
    bool parted; /* even columns of every 32 first */
};

/* The least power of two that is not below s, a positive number. */
__device__ __forceinline__ float power_from(float s) {
    const uint32_t bits = __float_as_uint(s);
    return __uint_as_float((bits + 0x007fffff) & 0x7f800000);
}

/* Four columns of 128 of a row in each lane, and the scale that all share. */
struct span_part {
    float4 v;
    float scale;
};

__device__ span_part read_span(const rows_job &j, int32_t row, int32_t span, int lane) {
    const int32_t place = j.from + row;
    const int64_t from = j.assignment ? j.assignment[place] / j.top_k : place;
    const cuda_act *x = j.x + from * j.x_stride + span * QUANTISED + 4 * lane;
    span_part p;
    if ((uintptr_t)x % 16 == 0) {
        p.v = *reinterpret_cast<const float4 *>(x);
    } else {
        p.v = {x[0], x[1], x[2], x[3]};
    }
    const float most =
        warp_max(fmaxf(fmaxf(fabsf(p.v.x), fabsf(p.v.y)), fmaxf(fabsf(p.v.z), fabsf(p.v.w))));
    p.scale = fmaxf(most, LEAST_SIZE) / E4M3_MAX;
    if (j.powers) p.scale = power_from(p.scale);
    return p;
}

__device__ __forceinline__ uint32_t narrow_part(const span_part &p) {
    const uint32_t low =
        __nv_cvt_float2_to_fp8x2({p.v.x / p.scale, p.v.y / p.scale}, __NV_SATFINITE, __NV_E4M3);
    const uint32_t high =
        __nv_cvt_float2_to_fp8x2({p.v.z / p.scale, p.v.w / p.scale}, __NV_SATFINITE, __NV_E4M3);
    return high << 16 | low;
}

/* A warp's row and span; false: none, or no expert's. */
__device__ bool own_span(const rows_job &j, int32_t *row, int32_t *span) {
    const int64_t warp = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) / WARP;
    *row = (int32_t)(warp / j.spans);
    *span = (int32_t)(warp % j.spans);
    if (*row >= j.rows) return false;
    const int32_t place = j.from + *row;
    return !j.offset || (place >= j.offset[0] && place < j.offset[j.n_experts]);
}

__global__ void __launch_bounds__(BLOCK) quantise(quantised to, rows_job j) {
    if (j.offset) { /* experts' products wait for these rows alone, and read what kernels before wrote */
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    } else {
        begin_kernel();
    }
    const int lane = threadIdx.x % WARP;
    int32_t row, span;
    if (!own_span(j, &row, &span)) return;
    const span_part p = read_span(j, row, span, lane);
    uint8_t *out = to.x + ((int64_t)row * j.spans + span) * QUANTISED;
    const uint32_t codes = narrow_part(p);
    if (j.parted) {
        uint16_t *even = reinterpret_cast<uint16_t *>(out + lane / 8 * 32) + lane % 8;
        even[0] = (uint16_t)__byte_perm(codes, 0, 0x4420);
        even[8] = (uint16_t)__byte_perm(codes, 0, 0x4431);
    } else {
        reinterpret_cast<uint32_t *>(out)[lane] = codes;
    }
    if (lane == 0) to.scale[(int64_t)span * to.pitch + row] = p.scale;
}

/* The same numbers as float32. */
__global__ void __launch_bounds__(BLOCK) round_rows(float *to, rows_job j) {
    begin_kernel();
    const int lane = threadIdx.x % WARP;
    int32_t row, span;
    if (!own_span(j, &row, &span)) return;
    const span_part p = read_span(j, row, span, lane);
    const uint32_t codes = narrow_part(p);
    float4 v;
    v.x = e4m3_to_f32((uint8_t)codes) * p.scale;
    v.y = e4m3_to_f32((uint8_t)(codes >> 8)) * p.scale;
    v.z = e4m3_to_f32((uint8_t)(codes >> 16)) * p.scale;
    v.w = e4m3_to_f32((uint8_t)(codes >> 24)) * p.scale;
    const int64_t at = ((int64_t)row * j.spans + span) * QUANTISED;
    reinterpret_cast<float4 *>(to + at)[lane] = v;
}

unsigned grid_of(const rows_job &j) {
    return blocks_for((int64_t)j.rows * j.spans * WARP, BLOCK);
}

inline size_t placed(size_t bytes) {
    return (bytes + PLACE - 1) / PLACE * PLACE;
}

/* The scratch as `rows` rows. */
quantised place_rows(hd_stream *s, int32_t rows, int32_t cols) {
    quantised q;
    q.x = static_cast<uint8_t *>(hd_stream_scratch(s, 0, 0));
    q.rows = rows;
    q.pitch = (rows + 3) / 4 * 4;
    q.scale = reinterpret_cast<float *>(q.x + placed((size_t)rows * (size_t)cols));
    return q;
}

/* How many rows of `each` bytes the scratch has room for, at most `rows`. */
int32_t rows_that_fit(hd_stream *s, size_t each, int32_t rows) {
    const size_t all = (size_t)hd_stream_workers(s) * hd_stream_scratch_bytes(s);
    const size_t fit = all > 4 * PLACE ? (all - 4 * PLACE) / each : 0;
    return fit < (size_t)rows ? (int32_t)(fit / 128 * 128) : rows;
}

/* Whether rows are multiplied with the matrix in E4M3. */
bool is_quantised(const hd_weight *w) {
    if (!w->scale || w->cols % QUANTISED) return false;
    return w->type == HD_E4M3 || (w->type == HD_E2M1 && w->scale_type == HD_E8M0);
}

rows_job rows_of(const hd_rows &x, const hd_weight *w, int32_t rows) {
    rows_job j = {};
    j.x = acts(x);
    j.x_stride = stride_of(x, w->cols);
    j.rows = rows;
    j.spans = w->cols / QUANTISED;
    j.powers = w->power_scales || w->scale_type == HD_E8M0;
    return j;
}

fp8_product product_of(const hd_weight *w, const hd_rows &out, int32_t rows) {
    fp8_product p = {};
    p.x.rows = rows;
    p.w = w;
    p.out = acts(out);
    p.out_stride = stride_of(out, w->rows);
    p.n_experts = 1;
    return p;
}

fp8_product product_of(const hd_expert_table *table, const hd_rows &out, const int32_t *offset,
                       int32_t places) {
    fp8_product p = product_of(&table->shape, out, places);
    p.offset = offset;
    p.n_experts = table->n;
    p.table = table;
    return p;
}

/* n products of the same j.rows rows: as many rows at a time as fit. */
void multiply_fp8(hd_stream *s, rows_job j, fp8_product *p, int32_t n) {
    const int32_t cols = p->w->cols, rows = j.rows;
    const int32_t fit = rows_that_fit(s, (size_t)cols + (size_t)j.spans * sizeof(float), rows);
    if (fit == 0) return hd_stream_fail(s, HD_ENOMEM, "no scratch for rows in FP8");
    for (int32_t done = 0; done < rows; done += fit) {
        j.from = done;
        j.rows = rows - done < fit ? rows - done : fit;
        const quantised x = place_rows(s, j.rows, cols);
        launch_kernel(hd_cuda_stream(s), quantise, dim3(grid_of(j)), BLOCK, 0, 1, x, j);
        for (int32_t i = 0; i < n; i++) {
            p[i].x = x;
            p[i].from = done;
            if (j.parted) {
                launch_grouped_fp4(s, p[i]);
            } else {
                launch_fp8(s, p[i]);
            }
            p[i].out += fit * p[i].out_stride;
            p[i].other_out += fit * p[i].other_stride;
        }
    }
}

void multiply_fp8(hd_stream *s, const rows_job &j, fp8_product p) {
    multiply_fp8(s, j, &p, 1);
}

/* Rows as they are multiplied, in the scratch; without data: they do not fit. */
hd_rows rounded(hd_stream *s, const rows_job &j) {
    const size_t each = (size_t)j.spans * QUANTISED * sizeof(float);
    float *to = static_cast<float *>(hd_stream_scratch(s, 0, 0));
    if (rows_that_fit(s, each, j.rows) < j.rows) {
        hd_stream_fail(s, HD_ENOMEM, "no scratch for rounded rows");
        return {};
    }
    launch_kernel(hd_cuda_stream(s), round_rows, dim3(grid_of(j)), BLOCK, 0, 1, to, j);
    return hd_f32(to);
}

} // namespace

void hd_linear_cuda_official(hd_stream *s, const hd_linear_args *a) {
    const hd_weight *w = a->w;
    if (a->rows == 0) return;
    if (!is_quantised(w)) return hd_linear_cuda_fast(s, a);
    const rows_job j = rows_of(a->x, w, a->rows);
    if (fp8_fits(w, nullptr)) {
        multiply_fp8(s, j, product_of(w, a->out, a->rows));
    } else {
        hd_linear_args exact = *a;
        exact.x = rounded(s, j);
        if (exact.x.data) hd_linear_cuda(s, &exact);
    }
    hd_cuda_check(s, "linear");
}

void hd_grouped_gemm_cuda_official(hd_stream *s, const hd_grouped_gemm_args *a) {
    const hd_weight *w = &a->w->shape;
    if (a->n_places == 0) return;
    if (!is_quantised(w)) return hd_grouped_gemm_cuda_fast(s, a);
    rows_job j = rows_of(a->x, w, a->n_places);
    if (fp8_fits(w, a->w) || fp4_fits(a->w)) {
        j.parted = w->type == HD_E2M1;
        j.assignment = a->assignment;
        j.offset = a->offset;
        j.n_experts = a->w->n;
        j.top_k = a->top_k;
        multiply_fp8(s, j, product_of(a->w, a->out, a->offset, a->n_places));
    } else {
        hd_grouped_gemm_args exact = *a;
        if (a->assignment) j.rows = a->n_places / a->top_k;
        exact.x = rounded(s, j);
        if (exact.x.data) hd_grouped_gemm_cuda(s, &exact);
    }
    hd_cuda_check(s, "grouped_gemm");
}

/* ---- two matrices at once ---- */

namespace {

/* Whether both are multiplied with the same rows in E4M3. */
bool share_rows(const hd_weight *w, const hd_weight *other) {
    return is_quantised(w) && is_quantised(other) && w->cols == other->cols &&
           rows_of({}, w, 0).powers == rows_of({}, other, 0).powers;
}

/* Products i and k of a set, in one launch if there are few rows. */
bool multiply_pair(hd_stream *s, const hd_linear_set_args *a, int32_t i, int32_t k) {
    const hd_weight *w = a->w[i], *other = a->w[k];
    fp8_product p = product_of(w, a->out[i], a->rows);
    p.other = other;
    p.other_out = acts(a->out[k]);
    p.other_stride = stride_of(a->out[k], other->rows);
    if (!share_rows(w, other) || !fp8_fits(w, nullptr) || !fp8_fits(other, nullptr) ||
        !fp8_takes_two(p)) {
        return false;
    }
    multiply_fp8(s, rows_of(a->x, w, a->rows), p);
    return true;
}

/* Product i and those behind it, of those left, that have the same rows in E4M3; returns them as bits. */
uint32_t multiply_sharing(hd_stream *s, const hd_linear_set_args *a, int32_t i, uint32_t left) {
    fp8_product p[HD_MAX_SET];
    uint32_t taken = 0;
    int32_t n = 0;
    for (int32_t k = i; k < a->n; k++) {
        const bool shares = left >> k & 1 && share_rows(a->w[i], a->w[k]);
        if (!shares || !fp8_fits(a->w[k], nullptr)) continue;
        p[n++] = product_of(a->w[k], a->out[k], a->rows);
        taken |= 1u << k;
    }
    if (n > 0) multiply_fp8(s, rows_of(a->x, a->w[i], a->rows), p, n);
    return taken;
}

} // namespace

/* Pairs of FP8 matrices, then what else few rows have in common, then those that share rows in E4M3, then
 * one by one. */
void hd_linear_set_cuda_official(hd_stream *s, const hd_linear_set_args *a) {
    uint32_t left = (1u << a->n) - 1;
    if (a->rows == 0) return;
    for (int32_t i = 0; i < a->n; i++) {
        for (int32_t k = i + 1; k < a->n && left >> i & 1; k++) {
            if (left >> k & 1 && multiply_pair(s, a, i, k)) left &= ~(1u << i | 1u << k);
        }
    }
    uint32_t rest = left;
    for (int32_t i = 0; i < a->n; i++) rest &= ~((uint32_t)is_quantised(a->w[i]) << i);
    left &= ~multiply_several(s, a, rest, FAST);
    for (int32_t i = 0; i < a->n; i++) {
        if (left >> i & 1) left &= ~multiply_sharing(s, a, i, left);
        const hd_linear_args one = ops_set_linear(a, i);
        if (left >> i & 1) hd_linear_cuda_official(s, &one);
    }
    hd_cuda_check(s, "linear_set");
}

void hd_linear_swiglu_cuda_official(hd_stream *s, const hd_linear_swiglu_args *a) {
    const hd_weight *w = a->gate_w;
    if (a->rows == 0) return;
    fp8_product p = product_of(w, a->out, a->rows);
    p.other = a->up_w;
    p.swiglu = {true, a->limit, nullptr, nullptr};
    if (share_rows(w, a->up_w) && w->rows == a->up_w->rows && fp8_fits(w, nullptr) &&
        fp8_fits(a->up_w, nullptr) && fp8_takes_two(p)) {
        multiply_fp8(s, rows_of(a->x, w, a->rows), p);
        hd_cuda_check(s, "linear_swiglu");
        return;
    }
    multiply_gated(s, a, hd_linear_set_cuda_official);
}

void hd_grouped_swiglu_cuda_official(hd_stream *s, const hd_grouped_swiglu_args *a) {
    const hd_weight *w = &a->gate_w->shape, *up_w = &a->up_w->shape;
    if (a->n_places == 0) return;
    const bool fp4 = fp4_fits(a->gate_w) && fp4_fits(a->up_w);
    const bool fp8 = fp8_fits(w, a->gate_w) && fp8_fits(up_w, a->up_w);
    fp8_product p = product_of(a->gate_w, a->out, a->offset, a->n_places);
    p.other = up_w;
    p.other_table = a->up_w;
    p.swiglu = {true, a->limit, a->weight, a->assignment};
    if ((fp4 || fp8) && share_rows(w, up_w) && w->rows == up_w->rows &&
        (fp4 ? fp4_takes_two(p) : fp8_takes_two(p))) {
        rows_job j = rows_of(a->x, w, a->n_places);
        j.parted = fp4;
        j.assignment = a->assignment;
        j.offset = a->offset;
        j.n_experts = a->gate_w->n;
        j.top_k = a->top_k;
        multiply_fp8(s, j, p);
        hd_cuda_check(s, "grouped_swiglu");
        return;
    }
    multiply_gated_experts(s, a, hd_grouped_gemm_cuda_official);
}
