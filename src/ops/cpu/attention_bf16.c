/* attention_bf16.c - attention with bfloat16 products (queries with keys, weights with
 * values), by AVX-512's dot products of pairs. Keys are stored in float32: those of a block
 * are rounded once for all heads. */
#include "base/checked.h"
#include "ops/cpu/kernels_internal.h"
#include "ops/cpu/dot_bf16_internal.h"

enum { COLS = 64 /* columns of a mix at once */ };

static void narrow(uint16_t *to, const float *from, int32_t n) {
    for (int32_t c = 0; c < n; c += PART) {
        _mm512_storeu_si512(to + c, round_part(from + c, n - c));
    }
}

/* ---- scores ---- */

/* Scores four queries from the i-th on with the four keys in n->key, while `n_next` keys are
 * prefetched: a few cache lines per step, because many at once would stall. */
static void score_four(const ops_scores *s, const fast_narrow *n, int32_t i,
                       const float *const *next, int32_t n_next) {
    const int32_t n_q = hd_min_i32(FAST_KEYS, s->n_q - i);
    const uint16_t *q[FAST_KEYS];
    __m512 sum[FAST_KEYS * FAST_KEYS];
    UNROLL for (int32_t a = 0; a < FAST_KEYS; a++) {
        q[a] = n->q + (i + (a < n_q ? a : 0)) * n->stride;
    }
    UNROLL for (int32_t a = 0; a < FAST_KEYS * FAST_KEYS; a++) sum[a] = _mm512_setzero_ps();
    for (int32_t c = 0; c < s->cols; c += PART) {
        __m512i key[FAST_KEYS];
        for (int32_t b = 0; b < n_next; b++) {
            _mm_prefetch((const char *)(next[b] + c), _MM_HINT_T0);
            _mm_prefetch((const char *)(next[b] + c + PART / 2), _MM_HINT_T0);
        }
        UNROLL for (int32_t b = 0; b < FAST_KEYS; b++) {
            key[b] = _mm512_loadu_si512(n->key + b * n->stride + c);
        }
        UNROLL for (int32_t a = 0; a < FAST_KEYS; a++) {
            const __m512i query = _mm512_loadu_si512(q[a] + c);
            UNROLL for (int32_t b = 0; b < FAST_KEYS; b++) {
                sum[FAST_KEYS * a + b] = add_pairs(sum[FAST_KEYS * a + b], query, key[b]);
            }
        }
    }
    float score[FAST_KEYS * FAST_KEYS];
    _mm512_storeu_ps(score, reduce_sums(sum));
    for (int32_t a = 0; a < n_q; a++) {
        _mm_mask_storeu_ps(s->out + (i + a) * s->out_stride, (__mmask8)first_lanes(s->n_keys),
                           _mm_loadu_ps(score + FAST_KEYS * a));
    }
}

static void score(const ops_scores *s, const fast_narrow *n) {
    const int32_t passes = (int32_t)hd_ceil_div(s->n_q, FAST_KEYS);
    const int32_t each = (int32_t)hd_ceil_div(FAST_KEYS, passes);
    for (int32_t b = 0; b < FAST_KEYS; b++) {
        narrow(n->key + b * n->stride, s->key[b], s->cols);
    }
    for (int32_t i = 0, fetched = 0; i < s->n_q; i += FAST_KEYS, fetched += each) {
        const int32_t left = hd_max_i32(0, FAST_KEYS - fetched);
        score_four(s, n, i, s->next + fetched, hd_min_i32(left, each));
    }
}

/* ---- values ---- */

/* Stores rows in pairs: element 2 c of a pair is column c of its first row, 2 c + 1 of its
 * second. */
static void pair_rows(const ops_mix *m, uint16_t *to) {
    const __m512i transpose =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int32_t i = 0; i < m->n_rows; i += 2, to += 2 * FAST_MIX_COLS) {
        const float *first = m->row[i] + m->at;
        const float *second = i + 1 < m->n_rows ? m->row[i + 1] + m->at : first;
        for (int32_t c = 0; c < m->cols; c += 16) {
            const __mmask16 live = first_lanes(m->cols - c);
            const __m512i both =
                (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(live, second + c),
                                             _mm512_maskz_loadu_ps(live, first + c));
            _mm512_storeu_si512(to + 2 * c, _mm512_permutexvar_epi16(transpose, both));
        }
    }
}

/* Computes n_out outputs from the j-th on, columns [c, c + COLS); n_out is a compile-time
 * constant. */
INLINE void mix_block(const ops_mix *m, const fast_narrow *n, int32_t j, int32_t n_out,
                      int32_t c) {
    const uint16_t *pair = n->pairs + 2 * c;
    const uint16_t *weight = n->weights + j * FAST_MIX_ROWS;
    __m512 sum[4][COLS / 16];
    UNROLL for (int32_t a = 0; a < n_out; a++) {
        const float *out = m->out + (j + a) * m->out_stride + c;
        UNROLL for (int32_t b = 0; b < COLS / 16; b++) {
            sum[a][b] = _mm512_maskz_loadu_ps(first_lanes(m->cols - c - 16 * b), out + 16 * b);
        }
    }
    for (int32_t i = 0; i < m->n_rows; i += 2, pair += 2 * FAST_MIX_COLS, weight += 2) {
        __m512i value[COLS / 16];
        UNROLL for (int32_t b = 0; b < COLS / 16; b++) {
            value[b] = _mm512_loadu_si512(pair + PART * b);
        }
        UNROLL for (int32_t a = 0; a < n_out; a++) {
            int32_t two;
            __builtin_memcpy(&two, weight + a * FAST_MIX_ROWS, sizeof two);
            UNROLL for (int32_t b = 0; b < COLS / 16; b++) {
                sum[a][b] = add_pairs(sum[a][b], value[b], _mm512_set1_epi32(two));
            }
        }
    }
    UNROLL for (int32_t a = 0; a < n_out; a++) {
        float *out = m->out + (j + a) * m->out_stride + c;
        UNROLL for (int32_t b = 0; b < COLS / 16; b++) {
            _mm512_mask_storeu_ps(out + 16 * b, first_lanes(m->cols - c - 16 * b), sum[a][b]);
        }
    }
}

static void mix(const ops_mix *m, const fast_narrow *n) {
    pair_rows(m, n->pairs);
    for (int32_t j = 0; j < m->n_out; j++) {
        uint16_t *to = n->weights + j * FAST_MIX_ROWS;
        narrow(to, m->coef + j * m->coef_stride, m->n_rows);
    }
    for (int32_t c = 0; c < m->cols; c += COLS) {
        int32_t j = 0;
        for (; j + 4 <= m->n_out; j += 4) mix_block(m, n, j, 4, c);
        if (m->n_out - j >= 2) {
            mix_block(m, n, j, 2, c);
            j += 2;
        }
        if (j < m->n_out) mix_block(m, n, j, 1, c);
    }
}

const fast_attention_kernels fast_attention_bf16 = {
    .narrow = narrow, .score = score, .mix = mix};
