/* meet_avx512.c - dot products with stored rows, for few rows of x: elements go from their
 * stored format into a register and meet x there, without a tile of floats between. Same steps
 * in the same order as decode and dots, same bits. */
#include "ops/meet_internal.h"

/* What turns 16 stored elements into floats times a scale. Of E2M1 the scale is in the table
 * already. */
typedef struct scaled {
    __m512 by; /* the scale, or a table of 16 scaled values */
} scaled;

typedef scaled prepare_fn(float scale);
typedef __m512 widen_fn(const uint8_t *src, scaled s);

static inline scaled no_scale(float scale) {
    (void)scale;
    return (scaled){_mm512_setzero_ps()};
}

static inline __m512 widen_f32(const uint8_t *src, scaled s) {
    (void)s;
    return _mm512_loadu_ps(src);
}

static inline __m512 widen_bf16(const uint8_t *src, scaled s) {
    (void)s;
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)src);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The bits of E4M3 in their places of F16 are the value times 2^-8 (kernels_avx2.c). */
static inline scaled e4m3_scale(float scale) {
    return (scaled){_mm512_set1_ps(scale * 256.0f)};
}

static inline __m512 widen_e4m3(const uint8_t *src, scaled s) {
    const __m256i byte =
        _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)src));
    const __m256i bits =
        _mm256_and_si256(_mm256_slli_epi16(byte, 7), _mm256_set1_epi16((int16_t)0xbf80));
    return _mm512_mul_ps(_mm512_cvtph_ps(bits), s.by);
}

static inline scaled e2m1_scale(float scale) {
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f,
                                         -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return (scaled){_mm512_mul_ps(values, _mm512_set1_ps(scale))};
}

/* Each lane shifts its own code out of its half of the eight bytes; the look-up reads four
 * bits of it. */
static inline __m512 widen_e2m1(const uint8_t *src, scaled s) {
    const __m512i half = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i shift =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    int64_t eight;
    memcpy(&eight, src, sizeof eight);
    const __m512i both = _mm512_permutexvar_epi32(half, _mm512_set1_epi64(eight));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(both, shift), s.by);
}

/* Which of the 64 codes at src, or of those before end, are NaN in E4M3. */
static inline __mmask64 nan_codes(const uint8_t *src, const uint8_t *end) {
    const __mmask64 live = end - src >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (end - src)) - 1;
    const __m512i magnitude = _mm512_set1_epi8(0x7f);
    const __m512i codes = _mm512_maskz_loadu_epi8(live, src);
    return _mm512_cmpeq_epi8_mask(_mm512_and_si512(codes, magnitude), magnitude);
}

/* bits an element; n_x, bits, prepare and widen are constants where this is inlined. False, and
 * no sum is touched, when an element of E4M3 is NaN. */
static inline __attribute__((always_inline)) bool meet_rows(const ops_meeting *m, float *acc,
                                                            const float *const *x, int32_t n_x,
                                                            int32_t bits, prepare_fn *prepare,
                                                            widen_fn *widen) {
    const int32_t each = OPS_TILE_ROWS * OPS_LANES;
    four s0 = load_sums(acc), s1 = s0, s2 = s0, s3 = s0;
    if (n_x > 1) s1 = load_sums(acc + each);
    if (n_x > 2) s2 = load_sums(acc + 2 * each), s3 = load_sums(acc + 3 * each);
    __mmask64 nan = 0;
    for (int32_t c = 0, block = 0; c < m->n; block++) {
        const int32_t end = m->n - c < m->block ? m->n : c + m->block;
        const scaled a = prepare(m->scale[0][block]), b = prepare(m->scale[1][block]),
                     d = prepare(m->scale[2][block]), e = prepare(m->scale[3][block]);
        for (; c < end; c += OPS_LANES) {
            const int64_t at = (int64_t)c * bits / 8;
            if (at % 64 == 0) {
                prefetch(m, at);
                for (int32_t j = 0; bits == 8 && j < OPS_TILE_ROWS; j++) {
                    nan |= nan_codes(m->src[j] + at, m->src[j] + m->n);
                }
            }
            const four w = {widen(m->src[0] + at, a), widen(m->src[1] + at, b),
                            widen(m->src[2] + at, d), widen(m->src[3] + at, e)};
            s0 = add_products(s0, _mm512_loadu_ps(x[0] + c), w);
            if (n_x > 1) s1 = add_products(s1, _mm512_loadu_ps(x[1] + c), w);
            if (n_x > 2) s2 = add_products(s2, _mm512_loadu_ps(x[2] + c), w);
            if (n_x > 2) s3 = add_products(s3, _mm512_loadu_ps(x[3] + c), w);
        }
    }
    if (nan) return false;
    store_sums(acc, s0);
    if (n_x > 1) store_sums(acc + each, s1);
    if (n_x > 2) store_sums(acc + 2 * each, s2), store_sums(acc + 3 * each, s3);
    return true;
}

static inline __attribute__((always_inline)) bool meet(const ops_meeting *m, int32_t bits,
                                                       prepare_fn *prepare, widen_fn *widen) {
    const int32_t each = OPS_TILE_ROWS * OPS_LANES;
    bool done = true;
    int32_t i = 0;
    for (; done && i + 4 <= m->n_x; i += 4) {
        done = meet_rows(m, m->acc + i * each, m->x + i, 4, bits, prepare, widen);
    }
    for (; done && i + 2 <= m->n_x; i += 2) {
        done = meet_rows(m, m->acc + i * each, m->x + i, 2, bits, prepare, widen);
    }
    if (!done || i == m->n_x) return done;
    return meet_rows(m, m->acc + i * each, m->x + i, 1, bits, prepare, widen);
}

bool ops_meet_f32_avx512(const ops_meeting *m) {
    return !m->scaled && meet(m, 32, no_scale, widen_f32);
}

bool ops_meet_bf16_avx512(const ops_meeting *m) {
    return !m->scaled && meet(m, 16, no_scale, widen_bf16);
}

/* The trick with F16 knows no NaN, and its scale no numbers above 2^120. */
bool ops_meet_e4m3_avx512(const ops_meeting *m) {
    for (int32_t j = 0; j < OPS_TILE_ROWS; j++) {
        for (int32_t c = 0, block = 0; c < m->n; c += m->block, block++) {
            if (!(m->scale[j][block] < 0x1p120f)) return false;
        }
    }
    return meet(m, 8, e4m3_scale, widen_e4m3);
}

bool ops_meet_e2m1_avx512(const ops_meeting *m) {
    return meet(m, 4, e2m1_scale, widen_e2m1);
}
