/* official_cuda.cu - --precision official: GEMMs with the activation quantization of the published
 * inference programs.
 *
 * FP8 matrices, and FP4 ones with a power of two per 32 columns, are multiplied by activations in
 * E4M3; all others by bfloat16, by the kernels of --precision fast. Where Hopper's kernels do not take
 * a matrix, rows are rounded to the same numbers and multiplied exactly: if scales are powers of two, a
 * bfloat16 holds a rounded number, and the kernels of `fast` are exact. Rows lie in the stream's scratch,
 * as many at a time as fit. */
#include "ops/cuda/fused_internal.cuh"
#include "ops/cuda/official_internal.cuh"
#include "ops/cuda/sm90_internal.cuh"
#include "ops/fused_internal.h"

namespace {

constexpr size_t PLACE = 1024; /* bytes that parts of the scratch are multiples of */

struct rows_job {
    const cuda_act *x;
    int64_t x_stride;
    const int32_t *assignment, *offset; /* of experts, or NULL */
    int32_t n_experts, top_k, from, rows, cols, spans;
    hd_group_format format;
    bool parted; /* even columns of every 32 first */
};

/* Four columns of 128 of a row in each lane, and the scale of their group. */
struct span_part {
    float4 v;
    float scale;
};

__device__ const cuda_act *row_of_x(const rows_job &j, int32_t row) {
    const int32_t place = j.from + row;
    return j.x + (j.assignment ? j.assignment[place] / j.top_k : place) * j.x_stride;
}

/* Four columns of a row; zeros behind the last. */
__device__ float4 read_four(const rows_job &j, const cuda_act *x, int32_t span, int lane) {
    const int32_t col = span * QUANTISED + 4 * lane;
    x += col;
    if (col >= j.cols) return {};
    if ((uintptr_t)x % 16 == 0) return *reinterpret_cast<const float4 *>(x);
    return {x[0], x[1], x[2], x[3]};
}

/* All lanes of a span. */
__device__ span_part part_of(const rows_job &j, float4 v) {
    span_part p = {v, 0.0f};
    float most = fmaxf(fmaxf(fabsf(p.v.x), fabsf(p.v.y)), fmaxf(fabsf(p.v.z), fabsf(p.v.w)));
    for (int other = j.format.group / 8; other > 0; other /= 2) {
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, other));
    }
    p.scale = hd_group_scale(j.format, most);
    return p;
}

__device__ __forceinline__ uint32_t narrow_part(const span_part &p) {
    const uint32_t low =
        __nv_cvt_float2_to_fp8x2({p.v.x / p.scale, p.v.y / p.scale}, __NV_SATFINITE, __NV_E4M3);
    const uint32_t high =
        __nv_cvt_float2_to_fp8x2({p.v.z / p.scale, p.v.w / p.scale}, __NV_SATFINITE, __NV_E4M3);
    return high << 16 | low;
}

/* A warp's row and first of EACH spans; false: none, or no expert's. */
template <int EACH>
__device__ bool own_span(const rows_job &j, int32_t *row, int32_t *span) {
    const int64_t warp = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) / WARP;
    const int32_t warps = (j.spans + EACH - 1) / EACH; /* of a row */
    *row = (int32_t)(warp / warps);
    *span = (int32_t)(warp % warps) * EACH;
    if (*row >= j.rows) return false;
    const int32_t place = j.from + *row;
    return !j.offset || (place >= j.offset[0] && place < j.offset[j.n_experts]);
}

/* A warp has EACH spans of a row, which are on their way at once. */
template <int EACH>
__global__ void __launch_bounds__(BLOCK) quantise(quantised to, rows_job j) {
    if (j.offset) { /* experts' products wait for these rows alone, and read what kernels before wrote */
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    } else {
        begin_kernel();
    }
    const int lane = threadIdx.x % WARP, lanes = j.format.group / 4; /* of a group */
    int32_t row, first;
    float4 v[EACH];
    if (!own_span<EACH>(j, &row, &first)) return;
    const cuda_act *x = row_of_x(j, row);
#pragma unroll
    for (int i = 0; i < EACH; i++) v[i] = read_four(j, x, first + i, lane);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t span = first + i;
        if (span >= j.spans) break;
        const span_part p = part_of(j, v[i]);
        uint8_t *out = to.x + ((int64_t)row * j.spans + span) * QUANTISED;
        const uint32_t codes = narrow_part(p);
        if (j.parted) {
            uint16_t *even = reinterpret_cast<uint16_t *>(out + lane / 8 * 32) + lane % 8;
            even[0] = (uint16_t)__byte_perm(codes, 0, 0x4420);
            even[8] = (uint16_t)__byte_perm(codes, 0, 0x4431);
        } else {
            reinterpret_cast<uint32_t *>(out)[lane] = codes;
        }
        if (lane % lanes) continue;
        const int64_t group = (int64_t)span * (WARP / lanes) + lane / lanes;
        to.scale[group * to.pitch + row] = p.scale;
    }
}

/* The same numbers as float32. */
__global__ void __launch_bounds__(BLOCK) round_x(float *to, rows_job j) {
    begin_kernel();
    const int lane = threadIdx.x % WARP;
    int32_t row, span;
    if (!own_span<1>(j, &row, &span)) return;
    const span_part p = part_of(j, read_four(j, row_of_x(j, row), span, lane));
    const int32_t col = span * QUANTISED + 4 * lane;
    const uint32_t codes = narrow_part(p);
    float4 v;
    v.x = e4m3_to_f32((uint8_t)codes) * p.scale;
    v.y = e4m3_to_f32((uint8_t)(codes >> 8)) * p.scale;
    v.z = e4m3_to_f32((uint8_t)(codes >> 16)) * p.scale;
    v.w = e4m3_to_f32((uint8_t)(codes >> 24)) * p.scale;
    if (col < j.cols) *reinterpret_cast<float4 *>(to + (int64_t)row * j.cols + col) = v;
}

/* Offsets of the slots in places `from` to from + rows - 1. */
__global__ void __launch_bounds__(BLOCK) clamp_offsets(int32_t *to, rows_job j) {
    begin_kernel();
    for (int32_t e = threadIdx.x; e <= j.n_experts; e += BLOCK) {
        to[e] = min(max(j.offset[e] - j.from, 0), j.rows);
    }
}

/* each: spans of a warp. */
unsigned grid_of(const rows_job &j, int32_t each) {
    return blocks_for((int64_t)j.rows * blocks_for(j.spans, each) * WARP, BLOCK);
}

void launch_quantise(hd_stream *s, const quantised &to, const rows_job &j) {
    constexpr int MANY = 4;
    if (grid_of(j, MANY) < 4u * (unsigned)hd_stream_workers(s)) {
        launch_kernel(hd_cuda_stream(s), quantise<1>, dim3(grid_of(j, 1)), BLOCK, 0, 1, to, j);
    } else {
        launch_kernel(hd_cuda_stream(s), quantise<MANY>, dim3(grid_of(j, MANY)), BLOCK, 0, 1,
                      to, j);
    }
}

inline size_t placed(size_t bytes) {
    return (bytes + PLACE - 1) / PLACE * PLACE;
}

/* The scratch as `rows` rows. */
quantised place_rows(hd_stream *s, int32_t rows, int32_t cols, int32_t group) {
    quantised q;
    q.x = static_cast<uint8_t *>(hd_stream_scratch(s, 0, 0));
    q.rows = rows;
    q.pitch = (rows + 3) / 4 * 4;
    q.group = group;
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
    return hd_format_of_x(w).code != HD_NONE;
}

/* Whether Hopper's kernels take them; table: of experts, or NULL. */
bool by_fp8(const hd_weight *w, const hd_expert_table *table) {
    return hd_format_of_x(w).group == QUANTISED && fp8_fits(w, table);
}

bool by_fp4(const hd_expert_table *table) {
    return is_quantised(&table->shape) && fp4_fits(table);
}

rows_job rows_of(const hd_rows &x, const hd_weight *w, int32_t rows) {
    rows_job j = {};
    j.x = acts(x);
    j.x_stride = stride_of(x, w->cols);
    j.rows = rows;
    j.cols = w->cols;
    j.spans = (w->cols + QUANTISED - 1) / QUANTISED;
    j.format = hd_format_of_x(w);
    return j;
}

rows_job places_of_x(const hd_rows &x, const hd_expert_table *w,
                     const hd_grouped_gemm_args *a) {
    rows_job j = rows_of(x, &w->shape, a->n_places);
    j.assignment = a->assignment;
    j.offset = a->offset;
    j.n_experts = w->n;
    j.top_k = a->top_k;
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
    const size_t scales = (size_t)(cols / j.format.group) * sizeof(float);
    const int32_t fit = rows_that_fit(s, (size_t)cols + scales, rows);
    if (fit == 0) return hd_stream_fail(s, HD_ENOMEM, "no scratch for rows in FP8");
    for (int32_t done = 0; done < rows; done += fit) {
        j.from = done;
        j.rows = rows - done < fit ? rows - done : fit;
        const quantised x = place_rows(s, j.rows, cols, j.format.group);
        launch_quantise(s, x, j);
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

/* product(x, first, n) of rows `first` to first + n - 1 as they are multiplied, which lie in the scratch from
 * byte `at` on: as many at a time as fit. */
template <typename F>
void multiply_rounded(hd_stream *s, rows_job j, size_t at, F product) {
    const int32_t rows = j.rows;
    uint8_t *to = static_cast<uint8_t *>(hd_stream_scratch(s, 0, 0)) + at;
    const int32_t fit = rows_that_fit(s, (size_t)j.cols * sizeof(float), rows);
    if (fit == 0) return hd_stream_fail(s, HD_ENOMEM, "no scratch for rounded rows");
    for (int32_t done = 0; done < rows; done += fit) {
        j.from = done;
        j.rows = rows - done < fit ? rows - done : fit;
        const hd_rows x = hd_f32(reinterpret_cast<float *>(to));
        launch_kernel(hd_cuda_stream(s), round_x, dim3(grid_of(j, 1)), BLOCK, 0, 1,
                      static_cast<float *>(x.data), j);
        product(x, done, j.rows);
    }
}

/* Whether bfloat16 holds the rounded numbers. */
bool is_exact_in_bf16(const hd_weight *w) {
    return hd_format_of_x(w).scale_type == HD_E8M0;
}

/* Experts' products with rounded rows: of all tokens, or of some places at a time. */
void multiply_experts(hd_stream *s, const hd_grouped_gemm_args *a) {
    const hd_weight *w = &a->w->shape;
    hd_grouped_gemm_fn *grouped =
        is_exact_in_bf16(w) ? hd_grouped_gemm_cuda_fast : hd_grouped_gemm_cuda;
    const int32_t tokens = a->assignment ? a->n_places / a->top_k : a->n_places;
    if (rows_that_fit(s, (size_t)w->cols * sizeof(float), tokens) == tokens) {
        multiply_rounded(s, rows_of(a->x, w, tokens), 0,
                         [&](const hd_rows &x, int32_t, int32_t) {
                             hd_grouped_gemm_args all = *a;
                             all.x = x;
                             grouped(s, &all);
                         });
        return;
    }
    const rows_job j = places_of_x(a->x, a->w, a);
    int32_t *offset = static_cast<int32_t *>(hd_stream_scratch(s, 0, 0));
    const size_t at = placed((size_t)(j.n_experts + 1) * sizeof *offset);
    multiply_rounded(s, j, at, [&](const hd_rows &x, int32_t first, int32_t n) {
        hd_grouped_gemm_args some = *a;
        rows_job part = j;
        part.from = first;
        part.rows = n;
        launch_kernel(hd_cuda_stream(s), clamp_offsets, dim3(1), BLOCK, 0, 1, offset, part);
        some.out = hd_rows_at(a->out, (int64_t)first * w->rows);
        some.x = x;
        some.offset = offset;
        some.assignment = nullptr;
        some.top_k = 1;
        some.n_places = n;
        grouped(s, &some);
    });
}

/* Products i of `taken`, bits, which all have the same rounded rows. */
void multiply_rounded_set(hd_stream *s, const hd_linear_set_args *a, uint32_t taken) {
    const hd_weight *w = nullptr;
    for (int32_t i = a->n; i-- > 0;) w = taken >> i & 1 ? a->w[i] : w;
    multiply_rounded(
        s, rows_of(a->x, w, a->rows), 0, [&](const hd_rows &x, int32_t first, int32_t n) {
            hd_linear_set_args set = {};
            set.x = x;
            set.rows = n;
            for (int32_t i = 0; i < a->n; i++) {
                if (!(taken >> i & 1)) continue;
                const int64_t stride = stride_of(a->out[i], a->w[i]->rows);
                set.out[set.n] = hd_rows_at(a->out[i], first * stride);
                set.w[set.n++] = a->w[i];
            }
            (is_exact_in_bf16(w) ? hd_linear_set_cuda_fast : hd_linear_set_cuda)(s, &set);
        });
}

} // namespace

void hd_linear_cuda_official(hd_stream *s, const hd_linear_args *a) {
    const hd_weight *w = a->w;
    if (a->rows == 0) return;
    if (!is_quantised(w)) return hd_linear_cuda_fast(s, a);
    if (by_fp8(w, nullptr)) {
        multiply_fp8(s, rows_of(a->x, w, a->rows), product_of(w, a->out, a->rows));
    } else {
        hd_linear_set_args one = {};
        one.x = a->x;
        one.out[0] = a->out;
        one.w[0] = w;
        one.n = 1;
        one.rows = a->rows;
        multiply_rounded_set(s, &one, 1);
    }
    hd_cuda_check(s, "linear");
}

void hd_grouped_gemm_cuda_official(hd_stream *s, const hd_grouped_gemm_args *a) {
    const hd_weight *w = &a->w->shape;
    if (a->n_places == 0) return;
    if (!is_quantised(w)) return hd_grouped_gemm_cuda_fast(s, a);
    if (by_fp8(w, a->w) || by_fp4(a->w)) {
        rows_job j = places_of_x(a->x, a->w, a);
        j.parted = w->type == HD_E2M1;
        multiply_fp8(s, j, product_of(a->w, a->out, a->offset, a->n_places));
    } else {
        multiply_experts(s, a);
    }
    hd_cuda_check(s, "grouped_gemm");
}

/* ---- two matrices at once ---- */

namespace {

/* Whether both are multiplied with the same rows in E4M3. */
bool share_rows(const hd_weight *w, const hd_weight *other) {
    const hd_group_format a = hd_format_of_x(w), b = hd_format_of_x(other);
    return a.code && a.code == b.code && a.scale_type == b.scale_type && a.group == b.group &&
           w->cols == other->cols;
}

/* Products i and k of a set, in one launch if there are few rows. */
bool multiply_pair(hd_stream *s, const hd_linear_set_args *a, int32_t i, int32_t k) {
    const hd_weight *w = a->w[i], *other = a->w[k];
    fp8_product p = product_of(w, a->out[i], a->rows);
    p.other = other;
    p.other_out = acts(a->out[k]);
    p.other_stride = stride_of(a->out[k], other->rows);
    if (!share_rows(w, other) || !by_fp8(w, nullptr) || !by_fp8(other, nullptr) ||
        !fp8_takes_two(s, p)) {
        return false;
    }
    multiply_fp8(s, rows_of(a->x, w, a->rows), p);
    return true;
}

/* Product i and those behind it, of those left, that have the same rows in E4M3; returns them as bits. */
uint32_t multiply_sharing(hd_stream *s, const hd_linear_set_args *a, int32_t i, uint32_t left) {
    fp8_product p[HD_MAX_SET];
    uint32_t taken = 0, rounded = 0;
    int32_t n = 0;
    for (int32_t k = i; k < a->n; k++) {
        if (!(left >> k & 1) || !share_rows(a->w[i], a->w[k])) continue;
        if (by_fp8(a->w[k], nullptr)) {
            p[n++] = product_of(a->w[k], a->out[k], a->rows);
        } else {
            rounded |= 1u << k;
        }
        taken |= 1u << k;
    }
    if (n > 0) multiply_fp8(s, rows_of(a->x, a->w[i], a->rows), p, n);
    if (rounded) multiply_rounded_set(s, a, rounded);
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
        if (left >> i & 1) hd_linear_cuda_fast(s, &one);
    }
    hd_cuda_check(s, "linear_set");
}

void hd_linear_swiglu_cuda_official(hd_stream *s, const hd_linear_swiglu_args *a) {
    const hd_weight *w = a->gate_w;
    if (a->rows == 0) return;
    fp8_product p = product_of(w, a->out, a->rows);
    p.other = a->up_w;
    p.swiglu = {true, a->limit, nullptr, nullptr};
    if (share_rows(w, a->up_w) && w->rows == a->up_w->rows && by_fp8(w, nullptr) &&
        by_fp8(a->up_w, nullptr) && fp8_takes_two(s, p)) {
        multiply_fp8(s, rows_of(a->x, w, a->rows), p);
        hd_cuda_check(s, "linear_swiglu");
        return;
    }
    multiply_gated(s, a, hd_linear_set_cuda_official);
}

void hd_grouped_swiglu_cuda_official(hd_stream *s, const hd_grouped_swiglu_args *a) {
    const hd_weight *w = &a->gate_w->shape, *up_w = &a->up_w->shape;
    if (a->n_places == 0) return;
    const bool fp4 = by_fp4(a->gate_w) && by_fp4(a->up_w);
    const bool fp8 = by_fp8(w, a->gate_w) && by_fp8(up_w, a->up_w);
    fp8_product p = product_of(a->gate_w, a->out, a->offset, a->n_places);
    p.other = up_w;
    p.other_table = a->up_w;
    p.swiglu = {true, a->limit, a->weight, a->assignment};
    if ((fp4 || fp8) && share_rows(w, up_w) && w->rows == up_w->rows &&
        (fp4 ? fp4_takes_two(p) : fp8_takes_two(s, p))) {
        const hd_grouped_gemm_args gate = ops_gate_grouped(a, false);
        rows_job j = places_of_x(a->x, a->gate_w, &gate);
        j.parted = fp4;
        multiply_fp8(s, j, p);
        hd_cuda_check(s, "grouped_swiglu");
        return;
    }
    multiply_gated_experts(s, a, hd_grouped_gemm_cuda_official, is_quantised(w) ? 0 : FAST);
}
