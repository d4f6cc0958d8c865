/* fast_ref.h - products of --precision fast on a CPU in plain C, bit for bit as docs/numerics.md
 * defines them, for matrices that it takes. */
#ifndef HD_TESTS_FAST_REF_H
#define HD_TESTS_FAST_REF_H

#include "ops/ops.h"

/* The reference's table with these products. */
void fast_ref_table(hd_ops *t);

#endif
