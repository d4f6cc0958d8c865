/* kernels_avx512.c - AVX-512: the two main loops of GEMMs, with all 16 lanes of a sum in one
 * register and 16 sums at once. It takes the same steps in the same order as AVX2, so the
 * bits are the same. */
#include "ops/cpu/lanes_avx512_internal.h"
#include "ops/cpu/accumulators_internal.h"

enum { X_ROWS = 4, MIX_OUT = 4, MIX_COLS = 4 * OPS_LANES };

/* Lanes [at, at + OPS_LANES) of four rows; the last ones under a mask. */
static inline four load_rows(const float *const *row, int64_t at) {
    return (four){_mm512_loadu_ps(row[0] + at), _mm512_loadu_ps(row[1] + at),
                  _mm512_loadu_ps(row[2] + at), _mm512_loadu_ps(row[3] + at)};
}

static inline four load_ends(const float *const *row, int64_t at, __mmask16 live) {
    return (four){
        _mm512_maskz_loadu_ps(live, row[0] + at), _mm512_maskz_loadu_ps(live, row[1] + at),
        _mm512_maskz_loadu_ps(live, row[2] + at), _mm512_maskz_loadu_ps(live, row[3] + at)};
}

/* Sums of four rows of x. */
typedef struct block {
    four a, b, c, d;
} block;

static inline block add_blocks(block sum, four x, four w) {
    return (block){add_products(sum.a, x.a, w), add_products(sum.b, x.b, w),
                   add_products(sum.c, x.c, w), add_products(sum.d, x.d, w)};
}

static void dots_four(float *acc, const float *const *x, int64_t at, const float *const *w,
                      int32_t n) {
    const int32_t each = OPS_TILE_ROWS * OPS_LANES;
    block sum = {load_sums(acc), load_sums(acc + each), load_sums(acc + 2 * each),
                 load_sums(acc + 3 * each)};
    const float *const x_at[X_ROWS] = {x[0] + at, x[1] + at, x[2] + at, x[3] + at};
    int32_t c = 0;
    for (; c + OPS_LANES <= n; c += OPS_LANES) {
        sum = add_blocks(sum, load_rows(x_at, c), load_rows(w, c));
    }
    if (c < n) {
        const __mmask16 live = first_lanes(n - c);
        sum = add_blocks(sum, load_ends(x_at, c, live), load_ends(w, c, live));
    }
    store_sums(acc, sum.a);
    store_sums(acc + each, sum.b);
    store_sums(acc + 2 * each, sum.c);
    store_sums(acc + 3 * each, sum.d);
}

static void dots_one(float *acc, const float *x, const float *const *w, int32_t n) {
    four sum = load_sums(acc);
    int32_t c = 0;
    for (; c + OPS_LANES <= n; c += OPS_LANES) {
        sum = add_products(sum, _mm512_loadu_ps(x + c), load_rows(w, c));
    }
    if (c < n) {
        const __mmask16 live = first_lanes(n - c);
        sum = add_products(sum, _mm512_maskz_loadu_ps(live, x + c), load_ends(w, c, live));
    }
    store_sums(acc, sum);
}

static void dots(float *acc, const float *const *x, int32_t n_x, int64_t at,
                 const float *const *w, int32_t n) {
    const int32_t each = OPS_TILE_ROWS * OPS_LANES;
    int32_t i = 0;
    for (; i + X_ROWS <= n_x; i += X_ROWS) dots_four(acc + i * each, x + i, at, w, n);
    for (; i < n_x; i++) dots_one(acc + i * each, x[i] + at, w, n);
}

/* Each reduces two vectors to one: sums of the upper and the lower half of their lanes, of both halves,
 * of all quarters and of pairs; those of p and of q take turns. A blend runs where a shuffle cannot. */
static inline __m512 reduce_across(__m512 p, __m512 q) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, p, q), _mm512_shuffle_f32x4(p, q, 0x4e));
}

static inline __m512 reduce_quarters(__m512 p, __m512 q) {
    const __m512 rest = _mm512_mask_blend_ps(0x0f0f, p, q);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, p, q),
                         _mm512_shuffle_f32x4(rest, rest, 0xb1));
}

static inline __m512 reduce_pairs(__m512 p, __m512 q) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, p, q), _mm512_shuffle_ps(p, q, 0x4e));
}

static inline __m512 reduce_lanes(__m512 p, __m512 q) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xaaaa, p, q),
                         _mm512_permute_ps(_mm512_mask_blend_ps(0x5555, p, q), 0xb1));
}

/* Sums of four rows of x and one row of w: lanes 4 h .. 4 h + 3 hold the rest of row h. */
static inline __m512 reduce_rows(__m512 a, __m512 b, __m512 c, __m512 d) {
    return reduce_quarters(reduce_across(a, c), reduce_across(b, d));
}

/* Lane 4 h + j: the dot product of rows h and j, by the tree of reduce. */
static inline __m512 reduce_block(block s) {
    const __m512 a = reduce_rows(s.a.a, s.b.a, s.c.a, s.d.a),
                 b = reduce_rows(s.a.b, s.b.b, s.c.b, s.d.b),
                 c = reduce_rows(s.a.c, s.b.c, s.c.c, s.d.c),
                 d = reduce_rows(s.a.d, s.b.d, s.c.d, s.d.d);
    return reduce_lanes(reduce_pairs(a, c), reduce_pairs(b, d));
}

static inline void store_scores(const ops_scores *s, int32_t first, int32_t n_q, block sum) {
    const __mmask8 live = (__mmask8)first_lanes(s->n_keys);
    const __m512 score = reduce_block(sum);
    float *out = s->out + first * s->out_stride;
    _mm_mask_storeu_ps(out, live, _mm512_castps512_ps128(score));
    if (n_q > 1) {
        _mm_mask_storeu_ps(out + s->out_stride, live, _mm512_extractf32x4_ps(score, 1));
    }
    if (n_q > 2) {
        _mm_mask_storeu_ps(out + 2 * s->out_stride, live, _mm512_extractf32x4_ps(score, 2));
    }
    if (n_q > 3) {
        _mm_mask_storeu_ps(out + 3 * s->out_stride, live, _mm512_extractf32x4_ps(score, 3));
    }
}

/* Scores one or two queries, as score_four() does. */
static void score_two(const ops_scores *s) {
    const four none = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                       _mm512_setzero_ps()};
    const float *q0 = s->q[0], *q1 = s->q[s->n_q - 1];
    block sum = {none, none, none, none};
    int32_t c = 0;
    for (; c + OPS_LANES <= s->cols; c += OPS_LANES) {
        const four key = load_rows(s->key, c);
        for (int32_t i = 0; s->next && i < OPS_TILE_ROWS; i++) {
            _mm_prefetch((const char *)(s->next[i] + c), _MM_HINT_T0);
        }
        sum.a = add_products(sum.a, _mm512_loadu_ps(q0 + c), key);
        sum.b = add_products(sum.b, _mm512_loadu_ps(q1 + c), key);
    }
    if (c < s->cols) {
        const __mmask16 live = first_lanes(s->cols - c);
        const four key = load_ends(s->key, c, live);
        sum.a = add_products(sum.a, _mm512_maskz_loadu_ps(live, q0 + c), key);
        sum.b = add_products(sum.b, _mm512_maskz_loadu_ps(live, q1 + c), key);
    }
    store_scores(s, 0, s->n_q, sum);
}

/* Scores four queries from the first on, while `n_next` keys are prefetched: one line of
 * each per step, because many at once would stall. */
static void score_four(const ops_scores *s, int32_t first, const float *const *next,
                       int32_t n_next) {
    const float *q[X_ROWS];
    const int32_t n_q = s->n_q - first < X_ROWS ? s->n_q - first : X_ROWS;
    for (int32_t i = 0; i < X_ROWS; i++) q[i] = s->q[first + (i < n_q ? i : 0)];
    const four none = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                       _mm512_setzero_ps()};
    block sum = {none, none, none, none};
    int32_t c = 0;
    for (; c + OPS_LANES <= s->cols; c += OPS_LANES) {
        for (int32_t i = 0; i < n_next; i++) {
            _mm_prefetch((const char *)(next[i] + c), _MM_HINT_T0);
        }
        sum = add_blocks(sum, load_rows(q, c), load_rows(s->key, c));
    }
    if (c < s->cols) {
        const __mmask16 live = first_lanes(s->cols - c);
        sum = add_blocks(sum, load_ends(q, c, live), load_ends(s->key, c, live));
    }
    store_scores(s, first, n_q, sum);
}

static void score(const ops_scores *s) {
    if (s->n_q <= 2) {
        score_two(s);
        return;
    }
    const int32_t passes = (s->n_q + X_ROWS - 1) / X_ROWS;
    const int32_t each = (OPS_TILE_ROWS + passes - 1) / passes;
    int32_t fetched = s->next ? 0 : OPS_TILE_ROWS;
    for (int32_t i = 0; i < s->n_q; i += X_ROWS, fetched += each) {
        const int32_t left = fetched < OPS_TILE_ROWS ? OPS_TILE_ROWS - fetched : 0;
        score_four(s, i, s->next + fetched, left < each ? left : each);
    }
}

/* The columns of a mix in one pass: MIX_COLS, or those left. */
typedef struct columns {
    __mmask16 a, b, c, d;
} columns;

static inline columns live_columns(int32_t n) {
    return (columns){first_lanes(n), first_lanes(n - OPS_LANES), first_lanes(n - 2 * OPS_LANES),
                     first_lanes(n - 3 * OPS_LANES)};
}

static inline four load_columns(const float *at, columns live) {
    return (four){_mm512_maskz_loadu_ps(live.a, at),
                  _mm512_maskz_loadu_ps(live.b, at + OPS_LANES),
                  _mm512_maskz_loadu_ps(live.c, at + 2 * OPS_LANES),
                  _mm512_maskz_loadu_ps(live.d, at + 3 * OPS_LANES)};
}

static inline void store_columns(float *at, columns live, four s) {
    _mm512_mask_storeu_ps(at, live.a, s.a);
    _mm512_mask_storeu_ps(at + OPS_LANES, live.b, s.b);
    _mm512_mask_storeu_ps(at + 2 * OPS_LANES, live.c, s.c);
    _mm512_mask_storeu_ps(at + 3 * OPS_LANES, live.d, s.d);
}

static void mix_four(const ops_mix *m, int32_t first, int32_t col) {
    const columns live = live_columns(m->cols - col);
    float *o0 = m->out + first * m->out_stride + col, *o1 = o0 + m->out_stride,
          *o2 = o1 + m->out_stride, *o3 = o2 + m->out_stride;
    const float *c0 = m->coef + first * m->coef_stride, *c1 = c0 + m->coef_stride,
                *c2 = c1 + m->coef_stride, *c3 = c2 + m->coef_stride;
    four s0 = load_columns(o0, live), s1 = load_columns(o1, live), s2 = load_columns(o2, live),
         s3 = load_columns(o3, live);
    for (int32_t i = 0; i < m->n_rows; i++) {
        const four x = load_columns(m->row[i] + m->at + col, live);
        s0 = add_products(s0, _mm512_set1_ps(c0[i]), x);
        s1 = add_products(s1, _mm512_set1_ps(c1[i]), x);
        s2 = add_products(s2, _mm512_set1_ps(c2[i]), x);
        s3 = add_products(s3, _mm512_set1_ps(c3[i]), x);
    }
    store_columns(o0, live, s0);
    store_columns(o1, live, s1);
    store_columns(o2, live, s2);
    store_columns(o3, live, s3);
}

static void mix_two(const ops_mix *m, int32_t first, int32_t col) {
    const columns live = live_columns(m->cols - col);
    float *o0 = m->out + first * m->out_stride + col, *o1 = o0 + m->out_stride;
    const float *c0 = m->coef + first * m->coef_stride, *c1 = c0 + m->coef_stride;
    four s0 = load_columns(o0, live), s1 = load_columns(o1, live);
    for (int32_t i = 0; i < m->n_rows; i++) {
        const four x = load_columns(m->row[i] + m->at + col, live);
        s0 = add_products(s0, _mm512_set1_ps(c0[i]), x);
        s1 = add_products(s1, _mm512_set1_ps(c1[i]), x);
    }
    store_columns(o0, live, s0);
    store_columns(o1, live, s1);
}

static void mix_one(const ops_mix *m, int32_t first, int32_t col) {
    const columns live = live_columns(m->cols - col);
    float *out = m->out + first * m->out_stride + col;
    const float *coef = m->coef + first * m->coef_stride;
    four sum = load_columns(out, live);
    for (int32_t i = 0; i < m->n_rows; i++) {
        sum = add_products(sum, _mm512_set1_ps(coef[i]),
                           load_columns(m->row[i] + m->at + col, live));
    }
    store_columns(out, live, sum);
}

static void mix(const ops_mix *m) {
    for (int32_t col = 0; col < m->cols; col += MIX_COLS) {
        int32_t j = 0;
        for (; j + MIX_OUT <= m->n_out; j += MIX_OUT) mix_four(m, j, col);
        for (; j + 2 <= m->n_out; j += 2) mix_two(m, j, col);
        for (; j < m->n_out; j++) mix_one(m, j, col);
    }
}

/* Rows of scales have any length; their ends are loaded under a mask. */
static void decode_e8m0(float *out, const uint8_t *src, int32_t n, const float *scale,
                        int32_t each) {
    /* value of code 0, and the bit that makes a NaN */
    const __m512i half = _mm512_set1_epi32(0x00400000);
    __m512 by = _mm512_setzero_ps();
    for (int32_t i = 0, end = 0; i < n; i += OPS_LANES) {
        if (i == end) {
            end = n - i < each ? n : i + each;
            by = _mm512_set1_ps(*scale++);
        }
        const __mmask16 live = first_lanes(n - i);
        const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(live, src + i));
        const __mmask16 odd = _mm512_testn_epi32_mask(code, code) |
                              _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(255));
        const __m512i power = _mm512_slli_epi32(code, 23);
        const __m512i bits = _mm512_mask_or_epi32(power, odd, power, half);
        _mm512_mask_storeu_ps(out + i, live, _mm512_mul_ps(_mm512_castsi512_ps(bits), by));
    }
}

/* All kernels but the stored formats that byte lookups dequantize faster. */
#define SHARED(e4m3)                                                                        \
    .square_sum = ops_square_sum_avx2, .dots = dots, .reduce = ops_reduce_avx2, .mix = mix, \
    .score = score, .max = ops_max_avx2, .exp_sum = ops_exp_sum_avx512,                     \
    .blend = ops_blend_avx512, .transpose = ops_transpose_avx2,                             \
    .index_scores = ops_index_scores_avx512, .weigh = ops_weigh_avx512,                     \
    .dequantize = {[HD_F32] = ops_dequantize_f32_avx2,                                      \
                   [HD_F16] = ops_dequantize_f16_avx2,                                      \
                   [HD_BF16] = ops_dequantize_bf16_avx2,                                    \
                   [HD_E4M3] = e4m3,                                                        \
                   [HD_E8M0] = decode_e8m0,                                                 \
                   [HD_E2M1] = ops_dequantize_e2m1_avx2}
#define SMALL_M(e4m3, e2m1)                          \
    .small_m = {[HD_F32] = ops_small_m_f32_avx512,   \
                [HD_BF16] = ops_small_m_bf16_avx512, \
                [HD_E4M3] = e4m3,                    \
                [HD_E2M1] = e2m1},                   \
    .small_m_rows = 16, .small_m_near = 65536, .near_rows = 12
#define AVX512 \
    SHARED(ops_dequantize_e4m3_avx2), SMALL_M(ops_small_m_e4m3_avx512, ops_small_m_e2m1_avx512)
#define VBMI \
    SHARED(ops_dequantize_e4m3_vbmi), SMALL_M(ops_small_m_e4m3_vbmi, ops_small_m_e2m1_vbmi)

const ops_kernels ops_kernels_avx512 = {AVX512};
const ops_kernels ops_kernels_vbmi = {VBMI};
const ops_kernels ops_kernels_vnni = {AVX512, .fast = &fast_int16_vnni};
const ops_kernels ops_kernels_bf16 = {VBMI, .fast = &fast_bf16,
                                      .fast_attention = &fast_attention_bf16};
