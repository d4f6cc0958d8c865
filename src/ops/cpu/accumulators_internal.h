/* accumulators_internal.h - GEMM accumulators: sums of one row of x with OPS_TILE_ROWS rows
 * of W, over the lanes of the instruction set whose header is included before. */
#ifndef HD_OPS_CPU_ACCUMULATORS_INTERNAL_H
#define HD_OPS_CPU_ACCUMULATORS_INTERNAL_H

/* Four accumulators, loaded, updated and stored together. They are named members because the
 * compiler would keep an array in memory. */
typedef struct four {
    lanes a, b, c, d;
} four;

static inline four load_sums(const float *at) {
    return (four){load_lanes(at), load_lanes(at + OPS_LANES), load_lanes(at + 2 * OPS_LANES),
                  load_lanes(at + 3 * OPS_LANES)};
}

static inline void store_sums(float *at, four s) {
    store_lanes(at, s.a);
    store_lanes(at + OPS_LANES, s.b);
    store_lanes(at + 2 * OPS_LANES, s.c);
    store_lanes(at + 3 * OPS_LANES, s.d);
}

static inline four add_products(four sum, lanes x, four w) {
    return (four){add_product(sum.a, x, w.a), add_product(sum.b, x, w.b),
                  add_product(sum.c, x, w.c), add_product(sum.d, x, w.d)};
}

#endif
