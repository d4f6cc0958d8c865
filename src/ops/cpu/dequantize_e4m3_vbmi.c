/* dequantize_e4m3_vbmi.c - AVX-512 VBMI: dequantizes FP8, or multiplies it with few rows of
 * x (small-M GEMM), 64 columns at a time. Byte lookups turn codes into bf16, which
 * represents all their values, and a bf16 is the upper half of a float. It takes the same
 * steps in the same order as decode and dots, so the bits are the same. */
#include "ops/cpu/e4m3_vbmi_internal.h"
#include "ops/cpu/lanes_avx512_internal.h"
#include "ops/cpu/small_m_gemm_internal.h"
#include "ops/cpu/accumulators_internal.h"

enum { STEP = 64, X_ROWS = 4 };

/* 64 columns of a row: 0-15, 16-31, 32-47, 48-63. */
typedef struct quad {
    __m512 a, b, c, d;
} quad;

/* Even 16-bit values of `first` are columns 0-15, odd ones 16-31, and so on for `second`. */
static inline quad dequantize_pairs(__m512i first, __m512i second) {
    const __m512i odd = _mm512_set1_epi32((int32_t)0xffff0000u);
    return (quad){_mm512_castsi512_ps(_mm512_slli_epi32(first, 16)),
                  _mm512_castsi512_ps(_mm512_and_si512(first, odd)),
                  _mm512_castsi512_ps(_mm512_slli_epi32(second, 16)),
                  _mm512_castsi512_ps(_mm512_and_si512(second, odd))};
}

/* Loads codes of columns [c, c + n) of a row, n <= STEP; nothing beyond is read. */
static inline __m512i load_bytes(const uint8_t *src, int32_t n) {
    if (n == STEP) return _mm512_loadu_si512(src);
    return _mm512_maskz_loadu_epi8(((__mmask64)1 << n) - 1, src);
}

/* Order of the 64 codes such that unpacking bytes to pairs leaves columns as dequantize_pairs
 * needs them: lane 4 q + i gets columns 4 q + i + {0, 16, 32, 48}. */
static const uint8_t e4m3_order[STEP] = {
    0,  16, 1,  17, 2,  18, 3,  19, 32, 48, 33, 49, 34, 50, 35, 51, 4,  20, 5,  21, 6,  22,
    7,  23, 36, 52, 37, 53, 38, 54, 39, 55, 8,  24, 9,  25, 10, 26, 11, 27, 40, 56, 41, 57,
    42, 58, 43, 59, 12, 28, 13, 29, 14, 30, 15, 31, 44, 60, 45, 61, 46, 62, 47, 63};

static inline quad dequantize_e4m3(const e4m3_table *t, const uint8_t *src, int32_t n,
                                   float scale) {
    const __m512i order = _mm512_loadu_si512(e4m3_order);
    const e4m3_pairs h = bf16_of_e4m3(t, _mm512_permutexvar_epi8(order, load_bytes(src, n)));
    const quad q = dequantize_pairs(h.first, h.second);
    const __m512 by = _mm512_set1_ps(scale);
    return (quad){_mm512_mul_ps(q.a, by), _mm512_mul_ps(q.b, by), _mm512_mul_ps(q.c, by),
                  _mm512_mul_ps(q.d, by)};
}

static inline void store_quad(float *out, quad q, int32_t n) {
    if (n == STEP) {
        _mm512_storeu_ps(out, q.a);
        _mm512_storeu_ps(out + 16, q.b);
        _mm512_storeu_ps(out + 32, q.c);
        _mm512_storeu_ps(out + 48, q.d);
        return;
    }
    const __mmask64 live = ((__mmask64)1 << n) - 1;
    _mm512_mask_storeu_ps(out, (__mmask16)live, q.a);
    _mm512_mask_storeu_ps(out + 16, (__mmask16)(live >> 16), q.b);
    _mm512_mask_storeu_ps(out + 32, (__mmask16)(live >> 32), q.c);
    _mm512_mask_storeu_ps(out + 48, (__mmask16)(live >> 48), q.d);
}

void ops_dequantize_e4m3_vbmi(float *out, const uint8_t *src, int32_t n, const float *scale,
                              int32_t block) {
    const e4m3_table table = make_e4m3_table();
    for (int32_t i = 0; i < n; scale++) {
        const int32_t end = n - i < block ? n : i + block;
        for (; i + STEP <= end; i += STEP) {
            store_quad(out + i, dequantize_e4m3(&table, src + i, STEP, *scale), STEP);
        }
        if (i < end)
            store_quad(out + i, dequantize_e4m3(&table, src + i, end - i, *scale), end - i);
        i = end;
    }
}

/* Adds the first n of 64 columns; n is a multiple of 16. */
static inline __attribute__((always_inline)) __m512 add_quad(__m512 sum, quad w, const float *x,
                                                             int32_t n) {
    sum = _mm512_fmadd_ps(_mm512_loadu_ps(x), w.a, sum);
    if (n > 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + 16), w.b, sum);
    if (n > 32) sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + 32), w.c, sum);
    if (n > 48) sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + 48), w.d, sum);
    return sum;
}

/* Multiplies rows of x at columns c to c + n, which lie in one block; n_x and mostly n are
 * compile-time constants. */
static inline __attribute__((always_inline)) void step(four *sum, const e4m3_table *t,
                                                       const ops_small_m_args *m,
                                                       const float *const *x, int32_t n_x,
                                                       int32_t c, int32_t n, int32_t block) {
    const quad w0 = dequantize_e4m3(t, m->src[0] + c, n, m->scale[0][block]);
    for (int32_t i = 0; i < n_x; i++) sum[i].a = add_quad(sum[i].a, w0, x[i] + c, n);
    const quad w1 = dequantize_e4m3(t, m->src[1] + c, n, m->scale[1][block]);
    for (int32_t i = 0; i < n_x; i++) sum[i].b = add_quad(sum[i].b, w1, x[i] + c, n);
    const quad w2 = dequantize_e4m3(t, m->src[2] + c, n, m->scale[2][block]);
    for (int32_t i = 0; i < n_x; i++) sum[i].c = add_quad(sum[i].c, w2, x[i] + c, n);
    const quad w3 = dequantize_e4m3(t, m->src[3] + c, n, m->scale[3][block]);
    for (int32_t i = 0; i < n_x; i++) sum[i].d = add_quad(sum[i].d, w3, x[i] + c, n);
}

static inline __attribute__((always_inline)) void small_m_rows(const ops_small_m_args *m,
                                                               const e4m3_table *t,
                                                               int32_t first, int32_t n_x) {
    const int32_t each = OPS_TILE_ROWS * OPS_LANES;
    const float *const *x = m->x + first;
    float *acc = m->acc + first * each;
    four sum[X_ROWS];
    coming next = comes_next(m, 8, 0, OPS_TILE_ROWS, first, n_x);
    for (int32_t i = 0; i < n_x; i++) sum[i] = load_sums(acc + i * each);
    for (int32_t c = 0, block = 0; c < m->n; block++) {
        const int32_t end = m->n - c < m->block ? m->n : c + m->block;
        for (; c + STEP <= end; c += STEP) {
            prefetch(&next);
            step(sum, t, m, x, n_x, c, STEP, block);
        }
        if (c == end) continue;
        step(sum, t, m, x, n_x, c, end - c, block);
        c = end;
    }
    for (int32_t i = 0; i < n_x; i++) store_sums(acc + i * each, sum[i]);
}

bool ops_small_m_e4m3_vbmi(const ops_small_m_args *m) {
    if (m->block % STEP != 0) return ops_small_m_e4m3_avx512(m);
    const e4m3_table table = make_e4m3_table();
    int32_t i = 0;
    for (; i + 4 <= m->n_x; i += 4) small_m_rows(m, &table, i, 4);
    if (m->n_x - i == 3) small_m_rows(m, &table, i, 3);
    if (m->n_x - i == 2) small_m_rows(m, &table, i, 2);
    if (m->n_x - i == 1) small_m_rows(m, &table, i, 1);
    return true;
}
