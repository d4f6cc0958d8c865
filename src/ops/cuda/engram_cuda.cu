/* engram_cuda.cu - V4.1's Engram: classes of the last tokens, the rows of a table that they choose, and
 * the gate; models.md 2.20. A table may lie in host memory: its rows come over the bus, four bytes
 * at a time of a thread where their format lets them. */
#include "ops/cuda/weight_internal.cuh"

constexpr int SEQ_BLOCKS = 64; /* that stride through the rows of a sequence */

/* ---- classes of the last tokens ---- */

static __device__ __forceinline__ int32_t token_at(const hd_ngram_classes_args &a, int32_t seq,
                                                   int32_t pos) {
    if (pos < 0) return a.pad;
    const int32_t row = row_at(a.seqs, seq, pos);
    if (row >= 0) return a.tokens[row];
    return static_cast<const int32_t *>(a.history.rows.data)[paged_at(a.history, seq, pos)];
}

/* Places that are read are not in the step, and those that are written are. */
static __global__ void __launch_bounds__(BLOCK) ngram_classes(hd_ngram_classes_args a) {
    begin_kernel();
    const int32_t seq = (int32_t)blockIdx.y, first = a.seqs.first_row[seq];
    const int32_t n = (a.seqs.first_row[seq + 1] - first) * a.n;
    for (int32_t i = (int32_t)(blockIdx.x * BLOCK + threadIdx.x); i < n;
         i += (int32_t)gridDim.x * BLOCK) {
        const int32_t r = first + i / a.n, back = i % a.n, pos = a.seqs.pos[r];
        a.out[(int64_t)r * a.n + back] = a.class_of[token_at(a, seq, pos - back)];
        if (back == 0) {
            static_cast<int32_t *>(a.history.rows.data)[paged_at(a.history, seq, pos)] =
                a.tokens[r];
        }
    }
}

void hd_ngram_classes_cuda(hd_stream *s, const hd_ngram_classes_args *a) {
    const int32_t most = a->seqs.most_rows;
    const unsigned each = most > 0 ? blocks_for((int64_t)most * a->n, BLOCK) : SEQ_BLOCKS;
    const dim3 grid(each < SEQ_BLOCKS ? each : SEQ_BLOCKS, (unsigned)a->seqs.n);
    if (a->seqs.n == 0) return;
    launch_kernel(hd_cuda_stream(s), ngram_classes, grid, BLOCK, 0, 1, *a);
    hd_cuda_check(s, "ngram_classes");
}

/* ---- rows of the table ---- */

/* The four elements from column c on, which are 4 bytes, and their scale's. */
static __device__ __forceinline__ void read_four(float *out, const hd_weight &w, int64_t row,
                                                 int32_t c) {
    const uint32_t codes = *reinterpret_cast<const uint32_t *>(
        static_cast<const uint8_t *>(w.data) + row * w.cols + c);
    const float scale = w.scale ? scale_at(w, (int32_t)row, c) : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float x = e4m3_to_f32((uint8_t)(codes >> 8 * i));
        out[i] = w.scale ? x * scale : x;
    }
}

/* A block per row and column of the result. */
template <bool FOURS>
static __global__ void __launch_bounds__(BLOCK)
    engram_embed(hd_engram_embed_args a, hd_weight w) {
    begin_kernel();
    const int64_t r = blockIdx.x;
    const int32_t column = (int32_t)blockIdx.y, columns = (int32_t)gridDim.y;
    const int32_t row = hd_engram_row(&a, a.classes + r * a.max_ngram, column);
    float *out = a.out + (r * columns + column) * w.cols;
    for (int32_t i = threadIdx.x; i * (FOURS ? 4 : 1) < w.cols; i += (int32_t)blockDim.x) {
        if (FOURS) {
            read_four(out + 4 * i, w, row, 4 * i);
        } else {
            out[i] = weight_at(w, row, i);
        }
    }
}

void hd_engram_embed_cuda(hd_stream *s, const hd_engram_embed_args *a) {
    const hd_weight *w = a->table;
    const dim3 grid((unsigned)a->rows, (unsigned)(a->heads * (a->max_ngram - 1)));
    const bool fours = w->type == HD_E4M3 && w->cols % 4 == 0 && (uintptr_t)w->data % 4 == 0 &&
                       (!w->scale || w->block_cols % 4 == 0);
    const int32_t wanted = fours ? w->cols / 4 : w->cols;
    const int threads = wanted > BLOCK / 2 ? BLOCK : wanted > WARP ? BLOCK / 4 : WARP;
    if (a->rows == 0) return;
    if (fours) {
        launch_kernel(hd_cuda_stream(s), engram_embed<true>, grid, threads, 0, 1, *a, *w);
    } else {
        launch_kernel(hd_cuda_stream(s), engram_embed<false>, grid, threads, 0, 1, *a, *w);
    }
    hd_cuda_check(s, "engram_embed");
}

/* ---- the gate ---- */

/* A block per stream of a row. */
static __global__ void __launch_bounds__(BLOCK) engram_gate(hd_engram_gate_args a) {
    begin_kernel();
    const int64_t r = blockIdx.x, i = blockIdx.y;
    const float *kv = a.kv + r * (a.hc + 1) * a.cols, *key = kv + i * a.cols;
    const float *value = kv + (int64_t)a.hc * a.cols;
    const float *q = a.q_weight + i * a.cols, *k = a.k_weight + i * a.cols;
    cuda_act *x = acts(a.x) + (r * a.hc + i) * a.cols;
    double product = 0.0, x_square = 0.0, key_square = 0.0;
    for (int32_t c = threadIdx.x; c < a.cols; c += BLOCK) {
        const double own = (double)wide(x[c]), other = (double)key[c];
        product = fma(own * (double)q[c], (double)k[c] * other, product);
        x_square = fma(own, own, x_square);
        key_square = fma(other, other, key_square);
    }
    product = block_sum<BLOCK>(product);
    x_square = block_sum<BLOCK>(x_square) / a.cols + (double)a.eps;
    key_square = block_sum<BLOCK>(key_square) / a.cols + (double)a.eps;
    const double score = product / (sqrt(x_square) * sqrt(key_square) * sqrt((double)a.cols));
    const double root = copysign(sqrt(fmax(fabs(score), 1e-6)), score);
    const double gate = 1.0 / (1.0 + exp(-root));
    for (int32_t c = threadIdx.x; c < a.cols; c += BLOCK) {
        x[c] = narrow((float)fma(gate, (double)value[c], (double)wide(x[c])));
    }
}

void hd_engram_gate_cuda(hd_stream *s, const hd_engram_gate_args *a) {
    const dim3 grid((unsigned)a->rows, (unsigned)a->hc);
    if (a->rows == 0) return;
    launch_kernel(hd_cuda_stream(s), engram_gate, grid, BLOCK, 0, 1, *a);
    hd_cuda_check(s, "engram_gate");
}
