/* fuzz_pieces.c - any bytes as requests for pieces of experts: what is accepted lies in an array. */
#include <stdint.h>
#include <stdlib.h>

#include "comm/pieces.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { LAYERS = 4, EXPERTS = 4, BYTES = 1000 };

/* Arrays in memory of their own, so that a byte too many is seen. */
static const void *find(void *ctx, int32_t layer, int32_t expert, int32_t array,
                        size_t *bytes) {
    uint8_t **arrays = ctx;
    if (layer < 0 || layer >= LAYERS || expert < 0 || expert >= EXPERTS || array < 0 ||
        array >= HD_PIECE_ARRAYS) {
        abort();
    }
    *bytes = array % 2 ? 10 : BYTES;
    return layer == 1 ? NULL : arrays[array % 2];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    uint8_t *arrays[2] = {calloc(1, BYTES), calloc(1, 10)};
    const hd_piece_source source = {
        .find = find, .ctx = arrays, .n_layers = LAYERS, .n_experts = EXPERTS};
    hd_piece p;
    const void *bytes;
    if (arrays[0] && arrays[1] &&
        hd_piece_check(&p, &bytes, data, (uint32_t)n, &source, NULL) == HD_OK) {
        uint32_t sum = 0;
        for (uint32_t i = 0; i < p.n; i++) sum += ((const uint8_t *)bytes)[i];
        if (sum || n != sizeof p) abort();
    }
    free(arrays[0]);
    free(arrays[1]);
    return 0;
}
