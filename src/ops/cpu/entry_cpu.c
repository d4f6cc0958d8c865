/* entry_cpu.c - cached entries that are not float32, decoded by the kernels of stored matrices. */
#include "base/checked.h"
#include "ops/cpu/cpu_internal.h"

enum { MOST_GROUPS = HD_MAX_ENTRY_COLS / OPS_LANES };

static void decode_fp8(const ops_kernels *k, const hd_paged *p, const uint8_t *from, float *out,
                       const float *one) {
    const int32_t plain = p->scales.plain, codes = p->width - plain, group = p->scales.group;
    const uint8_t *scale = from + codes + 2 * plain;
    float scales[MOST_GROUPS];
    for (int32_t i = 0; i * group < codes; i++) scales[i] = hd_e8m0_to_f32(scale[i]);
    ops_dequantizer(k, HD_E4M3)(out, from, codes, scales, group);
    ops_dequantizer(k, HD_BF16)(out + codes, from + codes, plain, one, HD_MAX_ENTRY_COLS);
}

const float *ops_entry_cpu(const ops_kernels *k, const hd_paged *p, int32_t seq, int32_t entry,
                           float *room) {
    static const float one = 1.0f;
    if (p->rows.type == HD_F32) return paged_entry(p, seq, entry);
    const uint8_t *from = paged_bytes(p, seq, entry);
    if (p->rows.type == HD_E4M3) {
        decode_fp8(k, p, from, room, &one);
    } else {
        ops_dequantizer(k, p->rows.type)(room, from, p->width, &one, HD_MAX_ENTRY_COLS);
    }
    return room;
}
