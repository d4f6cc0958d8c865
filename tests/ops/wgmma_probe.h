/* wgmma_probe.h - products of random rows by Hopper's instructions, compared bit by bit. */
#ifndef HD_TESTS_OPS_WGMMA_PROBE_H
#define HD_TESTS_OPS_WGMMA_PROBE_H

#include <stdbool.h>
#include <stdint.h>

enum { WGMMA_PROBE_A = 64, WGMMA_PROBE_B = 256, WGMMA_PROBE_BYTES = 256 }; /* rows; of each */

/* Outputs that were compared with those of wgmma with N = 8, and that have other bits. */
typedef struct wgmma_probe_counts {
    int64_t compared;
    int32_t widths;    /* N of 8 to 256, every row of b in many columns */
    int32_t registers; /* a in registers */
    int32_t exchanged; /* b's rows as the first operand */
    int32_t mma_sync;
} wgmma_probe_counts;

#ifdef __cplusplus
extern "C" {
#endif

/* a [A, BYTES] and b [B, BYTES] of E4M3 or bfloat16; base [A, B] becomes the products with N = 8; adds to
 * counts. Returns NULL or what the GPU said. For Hopper alone. */
const char *wgmma_probe(bool e4m3, const uint8_t *a, const uint8_t *b, float *base,
                        wgmma_probe_counts *counts);

#ifdef __cplusplus
}
#endif

#endif
