/* rows_back_cuda.cu - gradients of operators on whole rows, of the router and of the combination, and
 * the loss. As in the reference, sums of a row are in float64. */
#include "ops/backward/row_sums_internal.cuh"
#include "ops/cuda/sample_internal.cuh"

/* ---- norms ---- */

static __device__ __forceinline__ double weighted(const hd_rms_norm_back_args &a, float g,
                                                  int32_t c) {
    return (double)g * (a.weight ? (double)a.weight[c] : 1.0);
}

/* 1 / rms of every row */
static __global__ void __launch_bounds__(BLOCK) norm_scales(hd_rms_norm_back_args a) {
    const float *x = floats(a.x) + blockIdx.x * stride_of(a.x, a.cols);
    double square = 0.0;
    for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) {
        square += (double)x[c] * (double)x[c];
    }
    square = block_sum<BLOCK>(square);
    if (threadIdx.x == 0) a.scale[blockIdx.x] = 1.0 / sqrt(square / a.cols + (double)a.eps);
}

struct norm_term : term_of_rows {
    hd_rms_norm_back_args a;

    __device__ float *to(int32_t col) const {
        return a.dweight + col;
    }

    __device__ float at(int64_t r, int32_t col, const row_chunk &) const {
        const double g = floats(a.g)[r * stride_of(a.g, a.cols) + col];
        return (float)(g * (double)floats(a.x)[r * stride_of(a.x, a.cols) + col] * a.scale[r]);
    }
};

static __global__ void __launch_bounds__(BLOCK) norm_rows(hd_rms_norm_back_args a) {
    const float *g = floats(a.g) + blockIdx.x * stride_of(a.g, a.cols);
    const float *x = floats(a.x) + blockIdx.x * stride_of(a.x, a.cols);
    float *dx = static_cast<float *>(a.dx.data) + blockIdx.x * stride_of(a.dx, a.cols);
    double square = 0.0, along = 0.0;
    for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) {
        square += (double)x[c] * (double)x[c];
        along += weighted(a, g[c], c) * (double)x[c];
    }
    square = block_sum<BLOCK>(square);
    along = block_sum<BLOCK>(along);
    const double inverse = 1.0 / sqrt(square / a.cols + (double)a.eps);
    const double pull = inverse * inverse * inverse * along / a.cols;
    for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) {
        dx[c] = (float)(inverse * weighted(a, g[c], c) - (double)x[c] * pull);
    }
}

void hd_rms_norm_back_cuda(hd_stream *s, const hd_rms_norm_back_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->rows == 0) return;
    if (a->dweight) { /* before dx, which may be g */
        norm_scales<<<(unsigned)a->rows, BLOCK, 0, queue>>>(*a);
        sum_columns(queue, norm_term{{}, *a}, a->sums, a->rows, a->cols);
    }
    norm_rows<<<(unsigned)a->rows, BLOCK, 0, queue>>>(*a);
    hd_cuda_check(s, "rms_norm_back");
}

/* ---- rows that go back to where they came from ---- */

static __device__ float copies_sum(const hd_embed_back_args &a, int32_t row, int32_t c) {
    double sum = 0.0;
    for (int32_t i = 0; i < a.copies; i++) {
        sum += (double)floats(a.g)[((int64_t)row * a.copies + i) * a.cols + c];
    }
    return (float)sum;
}

/* The block of a token's first row adds those of all of its rows. */
static __global__ void __launch_bounds__(BLOCK) embed_back(hd_embed_back_args a) {
    __shared__ uint32_t same[BLOCK / WARP];
    const int32_t first = (int32_t)blockIdx.x, token = a.tokens[first];
    float *to = a.dtable + (int64_t)token * a.cols;
    bool earlier = false;
    for (int32_t r = (int32_t)threadIdx.x; r < first; r += BLOCK) {
        earlier = earlier || a.tokens[r] == token;
    }
    if (__syncthreads_or(earlier)) return;
    for (int32_t begin = first; begin < a.rows; begin += BLOCK) {
        const int32_t r = begin + (int32_t)threadIdx.x;
        const uint32_t mine = __ballot_sync(ALL_LANES, r < a.rows && a.tokens[r] == token);
        if (threadIdx.x % WARP == 0) same[threadIdx.x / WARP] = mine;
        __syncthreads();
        for (int w = 0; w < BLOCK / WARP; w++) {
            for (uint32_t left = same[w]; left; left &= left - 1) {
                const int32_t row = begin + w * WARP + __ffs((int)left) - 1;
                for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) {
                    to[c] += copies_sum(a, row, c);
                }
            }
        }
        __syncthreads();
    }
}

void hd_embed_back_cuda(hd_stream *s, const hd_embed_back_args *a) {
    if (a->rows == 0) return;
    embed_back<<<(unsigned)a->rows, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "embed_back");
}

static __global__ void __launch_bounds__(BLOCK) gather_back(hd_gather_back_args a) {
    const float *from = floats(a.g) + (int64_t)blockIdx.x * a.cols;
    float *to = a.dx + (int64_t)a.index[blockIdx.x] * a.cols;
    for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) to[c] = from[c];
}

void hd_gather_back_cuda(hd_stream *s, const hd_gather_back_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    cudaMemsetAsync(a->dx, 0, (size_t)a->x_rows * (size_t)a->cols * sizeof(float), queue);
    if (a->rows) gather_back<<<(unsigned)a->rows, BLOCK, 0, queue>>>(*a);
    hd_cuda_check(s, "gather_back");
}

/* ---- feed-forward ---- */

static __global__ void __launch_bounds__(BLOCK) swiglu_back(hd_swiglu_back_args a) {
    const int64_t first = (int64_t)blockIdx.x * a.cols;
    const int32_t choice = a.assignment ? a.assignment[blockIdx.x] : (int32_t)blockIdx.x;
    const double weight = a.weight ? (double)a.weight[choice] : 1.0;
    const double limit = a.limit > 0.0f ? (double)a.limit : CUDART_INF;
    double along = 0.0;
    for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) {
        const int64_t at = first + c;
        const double gate = (double)floats(a.gate)[at], up = (double)floats(a.up)[at];
        const double x = fmin(gate, limit), u = fmax(-limit, fmin(up, limit));
        const double sg = 1.0 / (1.0 + exp(-x)), g = (double)floats(a.g)[at];
        along += g * x * sg * u;
        const double dx = g * weight * u * sg * (1.0 + x * (1.0 - sg));
        const double du = g * weight * x * sg;
        a.dgate[at] = gate <= limit ? (float)dx : 0.0f;
        a.dup[at] = fabs(up) <= limit ? (float)du : 0.0f;
    }
    if (!a.dweight) return;
    along = block_sum<BLOCK>(along);
    if (threadIdx.x == 0) a.dweight[choice] = (float)along;
}

void hd_swiglu_back_cuda(hd_stream *s, const hd_swiglu_back_args *a) {
    if (a->rows == 0) return;
    swiglu_back<<<(unsigned)a->rows, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "swiglu_back");
}

/* The score of logit l, and its derivative; the kernel has those of softmax. */
static __device__ double score_of(hd_score rule, double l, double *slope) {
    if (rule == HD_SCORE_SIGMOID) {
        const double s = 1.0 / (1.0 + exp(-l));
        *slope = s * (1.0 - s);
        return s;
    }
    const double s = sqrt(l > 20.0 ? l : log1p(exp(l)));
    *slope = s > 0.0 ? 1.0 / (1.0 + exp(-l)) / (2.0 * s) : 0.0;
    return s;
}

static __device__ double softmax_total(const float *l, int32_t n, double *top) {
    double most = -CUDART_INF, total = 0.0;
    for (int32_t e = 0; e < n; e++) most = fmax(most, (double)l[e]);
    for (int32_t e = (int32_t)threadIdx.x; e < n; e += WARP) total += exp((double)l[e] - most);
    *top = most;
    return warp_sum(total);
}

/* A warp per row; shared: scores, slopes and gradients of scores. */
static __global__ void __launch_bounds__(WARP) moe_topk_back(hd_moe_topk_back_args a) {
    extern __shared__ double scores[];
    const int32_t n = a.rule.n_experts, k = a.rule.top_k, lane = (int32_t)threadIdx.x;
    const float *l = a.logits + (int64_t)blockIdx.x * n;
    const float *dw = a.dweight + (int64_t)blockIdx.x * k;
    const int32_t *expert = a.expert + (int64_t)blockIdx.x * k;
    double *slope = scores + n, *ds = slope + n, top = 0.0, all = 0.0;
    const bool softmax = a.rule.score == HD_SCORE_SOFTMAX;
    if (softmax) all = softmax_total(l, n, &top);
    for (int32_t e = lane; e < n; e += WARP) {
        scores[e] = softmax ? exp((double)l[e] - top) / all
                            : score_of(a.rule.score, (double)l[e], &slope[e]);
        ds[e] = 0.0;
    }
    __syncwarp();
    if (lane == 0) {
        double total = 1e-20, along = 0.0;
        for (int32_t j = 0; j < k; j++) total += scores[expert[j]];
        for (int32_t j = 0; j < k; j++) along += (double)dw[j] * scores[expert[j]] / total;
        for (int32_t j = 0; j < k; j++) {
            const double d = a.rule.normalize ? ((double)dw[j] - along) / total : (double)dw[j];
            ds[expert[j]] += (double)a.rule.scale * d;
        }
    }
    __syncwarp();
    double along = 0.0;
    for (int32_t e = lane; e < n; e += WARP) along += ds[e] * scores[e];
    along = warp_sum(along);
    float *dlogits = a.dlogits + (int64_t)blockIdx.x * n;
    for (int32_t e = lane; e < n; e += WARP) {
        dlogits[e] = softmax        ? (float)(scores[e] * (ds[e] - along))
                     : ds[e] == 0.0 ? 0.0f
                                    : (float)(ds[e] * slope[e]);
    }
}

void hd_moe_topk_back_cuda(hd_stream *s, const hd_moe_topk_back_args *a) {
    const size_t bytes = 3 * (size_t)a->rule.n_experts * sizeof(double);
    if (a->rows == 0) return;
    moe_topk_back<<<(unsigned)a->rows, WARP, bytes, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "moe_topk_back");
}

static __global__ void __launch_bounds__(BLOCK) moe_combine_back(hd_moe_combine_back_args a) {
    const int32_t choice = (int32_t)blockIdx.x;
    const float *g = floats(a.g) + (int64_t)(choice / a.top_k) * a.cols;
    const int64_t at = (int64_t)a.place[choice] * a.cols;
    const float weight = a.weight ? a.weight[choice] : 1.0f;
    double along = 0.0;
    for (int32_t c = (int32_t)threadIdx.x; c < a.cols; c += BLOCK) {
        if (a.weight) along += (double)g[c] * (double)floats(a.y)[at + c];
        a.dy[at + c] = weight * g[c];
    }
    if (!a.dweight) return;
    along = block_sum<BLOCK>(along);
    if (threadIdx.x == 0) a.dweight[choice] = (float)along;
}

void hd_moe_combine_back_cuda(hd_stream *s, const hd_moe_combine_back_args *a) {
    if (a->rows == 0) return;
    moe_combine_back<<<(unsigned)(a->rows * a->top_k), BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "moe_combine_back");
}

/* ---- the loss ---- */

static __device__ float block_max(float x) {
    __shared__ float part[BLOCK / WARP];
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    float most = part[0];
    for (int w = 1; w < BLOCK / WARP; w++) most = fmaxf(most, part[w]);
    __syncthreads();
    return most;
}

/* The log-probability of id by the sampler's arithmetic; max: of the logits. */
static __device__ float sampled_logprob(const float *l, int32_t n, float max, float temperature,
                                        int32_t id) {
    const float inverse = inverse_temperature(temperature);
    whole total = 0;
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += BLOCK) {
        total += weight_of(scaled(l[i], max, inverse));
    }
    total = block_sum<BLOCK>(total);
    return logprob_at(l[id], inverse, log_total(max, inverse, total));
}

static __global__ void __launch_bounds__(BLOCK) cross_entropy(hd_cross_entropy_args a) {
    const int32_t r = (int32_t)blockIdx.x, target = a.target[r];
    float *l = a.logits + (int64_t)r * a.vocab, max = -CUDART_INF_F;
    const float temperature = a.temperature ? a.temperature[r] : 1.0f;
    const double inverse = 1.0 / (double)temperature;
    for (int32_t v = (int32_t)threadIdx.x; v < a.vocab; v += BLOCK) max = fmaxf(max, l[v]);
    max = block_max(max);
    const float logprob = sampled_logprob(l, a.vocab, max, temperature, target);
    const double top = (double)max * inverse;
    double total = 0.0, along = 0.0;
    for (int32_t v = (int32_t)threadIdx.x; v < a.vocab; v += BLOCK) {
        const double below = (double)l[v] * inverse - top, e = exp(below);
        total += e;
        if (e > 0.0) along += e * below;
    }
    total = block_sum<BLOCK>(total);
    along = block_sum<BLOCK>(along);
    const bool is_number = total > 0.0; /* NaN stays NaN */
    const double log_all = top + (is_number ? log(total) : total);
    const double entropy = is_number ? log(total) - along / total : 0.0;
    if (threadIdx.x == 0) {
        a.logprob[r] = logprob;
        a.entropy[r] = (float)entropy;
    }
    if (!a.factor) return;
    const double factor = (double)a.factor[r];
    const double more = a.entropy_factor ? (double)a.entropy_factor[r] : 0.0;
    for (int32_t v = (int32_t)threadIdx.x; v < a.vocab; v += BLOCK) {
        const double logp = (double)l[v] * inverse - log_all, p = exp(logp);
        double d = factor * (p - (v == target ? 1.0 : 0.0));
        if (more != 0.0 && p > 0.0) d += more * p * (logp + entropy);
        l[v] = (float)(d * inverse);
    }
}

void hd_cross_entropy_cuda(hd_stream *s, const hd_cross_entropy_args *a) {
    if (a->rows == 0) return;
    cross_entropy<<<(unsigned)a->rows, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "cross_entropy");
}
