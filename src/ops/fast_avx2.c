/* fast_avx2.c - products in whole numbers with AVX2. Rows of x meet a panel in which 4 columns of
 * 8 rows of W are a register, so that no sum is folded. */
#include "ops/fast_loops_internal.h"

#include <immintrin.h>

#define UNROLL _Pragma("GCC unroll 8")

static inline __m256i load32(const void *src) {
    return _mm256_loadu_si256((const __m256i *)src);
}

static inline void read_e2m1(int8_t *out, const uint8_t *src, int32_t n) {
    const __m128i doubled =
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i nibble = _mm_set1_epi8(0x0f);
    int32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m128i v = _mm_loadu_si128((const __m128i *)(const void *)(src + i / 2));
        const __m128i even = _mm_shuffle_epi8(doubled, _mm_and_si128(v, nibble)),
                      odd = _mm_shuffle_epi8(doubled,
                                             _mm_and_si128(_mm_srli_epi16(v, 4), nibble));
        _mm_storeu_si128((__m128i *)(void *)(out + i), _mm_unpacklo_epi8(even, odd));
        _mm_storeu_si128((__m128i *)(void *)(out + i + 16), _mm_unpackhi_epi8(even, odd));
    }
    read_e2m1_numbers(out + i, src + i / 2, n - i);
}

/* A look-up reads 16 bytes, and what is not 0 reaches over eight exponents, so four look-ups: each
 * index without its high bits, or past 127 where those are others'. */
static inline void read_e4m3(int8_t *out, const uint8_t *src, int32_t n, uint32_t e) {
    const uint32_t base = e < 8 ? 0 : 8 * (e - 7);
    const __m256i offset = _mm256_set1_epi8((char)FAST_E4M3_OFFSET);
    __m256i table[4];
    for (int32_t t = 0; t < 4; t++) {
        table[t] = _mm256_broadcastsi128_si256(
            _mm_loadu_si128((const __m128i *)(const void *)(fast_e4m3[e] + base + 16 * t)));
    }
    int32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i code = load32(src + i);
        const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi8(0x7f));
        const __m256i index = _mm256_subs_epu8(magnitude, _mm256_set1_epi8((char)base));
        __m256i number = offset; /* taken away by the one look-up that meets */
        for (int32_t t = 0; t < 4; t++) {
            const __m256i high = _mm256_xor_si256(index, _mm256_set1_epi8((char)(16 * t)));
            const __m256i place = _mm256_adds_epu8(high, _mm256_set1_epi8(0x70));
            number = _mm256_xor_si256(number, _mm256_shuffle_epi8(table[t], place));
        }
        const __m256i sign = _mm256_or_si256(code, _mm256_set1_epi8(1));
        _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm256_sign_epi8(number, sign));
    }
    read_e4m3_numbers(out + i, src + i, n - i, e);
}

static inline uint32_t largest_e4m3(const uint8_t *src, int32_t n) {
    const __m256i magnitude = _mm256_set1_epi8(0x7f);
    __m256i most = _mm256_setzero_si256();
    int32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        most = _mm256_max_epu8(most, _mm256_and_si256(load32(src + i), magnitude));
    }
    uint8_t byte[32];
    _mm256_storeu_si256((__m256i *)(void *)byte, most);
    const uint32_t end = largest_code(src + i, n - i), all = largest_code(byte, 32);
    return all > end ? all : end;
}

/* ---- W: 4 columns of 16 rows side by side ---- */

enum { HALF_ROWS = 8, STEP_BYTES = FAST_STEP * FAST_ROWS };

/* out[d] = the d-th 32 bits of all eight. */
static inline void turn(__m256i out[8], const __m256i in[8]) {
    __m256i t[8], u[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        out[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
        out[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
    }
}

/* The numbers of a step of one row; gives what they make of its group's scale. */
static inline float read_step(int8_t out[FAST_STEP], const uint8_t *src, int32_t n,
                              hd_dtype type) {
    if (n < FAST_STEP) memset(out, 0, FAST_STEP);
    if (type == HD_E2M1) {
        read_e2m1(out, src, n);
        return 1.0f;
    }
    const uint32_t largest = largest_e4m3(src, n), e = largest < 8 ? 1 : largest >> 3;
    read_e4m3(out, src, n, e);
    return largest == 0x7f ? NAN : hd_f32_from_bits((e + 114) << 23);
}

static inline void read_panel(const fast_product *p, hd_dtype type) {
    const int32_t per_step = FAST_STEP / p->group, groups = fast_padded_groups(p);
    for (int32_t j = 0; j < FAST_ROWS; j++) {
        fast_read_scales(p->scale_row, p, j);
        for (int32_t g = 0; g < groups; g++) p->scales[g * FAST_ROWS + j] = p->scale_row[g];
    }
    for (int32_t first = 0; first < p->n_w; first += HALF_ROWS) {
        const uint8_t *src[HALF_ROWS];
        for (int32_t j = 0; j < HALF_ROWS; j++) src[j] = fast_row(p, first + j);
        for (int32_t c = 0; c < p->n; c += FAST_STEP) {
            int8_t number[HALF_ROWS][FAST_STEP];
            uint8_t *to = p->panel + c / FAST_STEP * STEP_BYTES + first * 4;
            float *scale = p->scales + c / FAST_STEP * per_step * FAST_ROWS + first;
            for (int32_t j = 0; j < HALF_ROWS; j++) {
                const uint8_t *at = src[j] + (type == HD_E2M1 ? c / 2 : c);
                const float by =
                    read_step(number[j], at, hd_min_i32(FAST_STEP, p->n - c), type);
                if (type == HD_E4M3) scale[j] *= by;
            }
            for (int32_t q = 0; q < FAST_STEP; q += 32) {
                __m256i in[8], out[8];
                UNROLL for (int j = 0; j < 8; j++) in[j] = load32(number[j] + q);
                turn(out, in);
                UNROLL for (int d = 0; d < 8; d++) {
                    _mm256_storeu_si256((__m256i *)(void *)(to + (q / 4 + d) * 64), out[d]);
                }
            }
        }
    }
}

/* ---- products ---- */

/* The sums of half a block for eight rows. Neighbors' products fit 16 bits because no number of
 * W is beyond 120, and of FP4 so do four of their sums. */
static inline __m256i dot_half(const uint8_t *w, const int8_t *x, int32_t group) {
    const __m256i one = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    UNROLL for (int d = 0; d < 4; d++) {
        int32_t four;
        memcpy(&four, x + 4 * d, sizeof four);
        const __m256i by = _mm256_set1_epi32(four);
        const __m256i pairs =
            _mm256_maddubs_epi16(_mm256_abs_epi8(by), _mm256_sign_epi8(load32(w + d * 64), by));
        sum = group == 128 ? _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, one))
                           : _mm256_add_epi16(sum, pairs);
    }
    return group == 128 ? sum : _mm256_madd_epi16(sum, one);
}

static inline __m256 scaled(__m256i sum, const float *by) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(by));
}

/* The sum of a row of x with rows `first` to first + 7 goes on. */
static inline __m256 add_columns(__m256 acc, const fast_product *p, int32_t i, int32_t first,
                                 int32_t group) {
    const fast_x *x = p->x;
    int32_t at = (i / x->side * x->blocks + p->x_col / FAST_BLOCK) * x->side + i % x->side;
    __m256 part = _mm256_setzero_ps();
    const int32_t blocks = fast_padded_groups(p) * group / FAST_BLOCK;
    for (int32_t b = 0; b < blocks; b++, at += x->side) {
        const uint8_t *w = p->panel + b * FAST_BLOCK * FAST_ROWS + first * 4;
        const float *scale = p->scales + b * FAST_BLOCK / group * FAST_ROWS + first;
        const int8_t *code = x->code + at * FAST_BLOCK;
        const __m256 by = _mm256_set1_ps(x->scale[at]);
        const __m256i low = dot_half(w, code, group),
                      high = dot_half(w + FAST_BLOCK / 2 * FAST_ROWS, code + 16, group);
        if (group == 16) {
            const __m256 sum =
                _mm256_add_ps(scaled(low, scale), scaled(high, scale + FAST_ROWS));
            acc = _mm256_add_ps(acc, _mm256_mul_ps(sum, by));
        } else if (group == 32) {
            const __m256 sum = scaled(_mm256_add_epi32(low, high), scale);
            acc = _mm256_add_ps(acc, _mm256_mul_ps(sum, by));
        } else {
            const __m256 sum =
                _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(low, high)), by);
            part = b % 4 ? _mm256_add_ps(part, sum) : sum;
            if (b % 4 < 3) continue;
            acc = _mm256_add_ps(acc, _mm256_mul_ps(part, _mm256_loadu_ps(scale)));
        }
    }
    return acc;
}

static inline void multiply_panel(const fast_product *p, int32_t group) {
    for (int32_t first = 0; first < p->n_w; first += HALF_ROWS) {
        const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i live = _mm256_cmpgt_epi32(_mm256_set1_epi32(p->n_w - first), place);
        for (int32_t i = 0; i < p->n_x; i++) {
            float *out = p->out + i * p->out_stride + first;
            const __m256 acc = p->more ? _mm256_maskload_ps(out, live) : _mm256_setzero_ps();
            _mm256_maskstore_ps(out, live, add_columns(acc, p, i, first, group));
        }
    }
}

static void multiply(const fast_product *p) {
    if (p->group == 128) {
        read_panel(p, HD_E4M3);
        multiply_panel(p, 128);
    } else if (p->group == 16) {
        read_panel(p, HD_E2M1);
        multiply_panel(p, 16);
    } else {
        read_panel(p, HD_E2M1);
        multiply_panel(p, 32);
    }
}

const fast_kernels fast_avx2 = {.quantize = quantize_row, .multiply = multiply};
