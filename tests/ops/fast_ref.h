/* fast_ref.h - products of --precision fast on a CPU in plain C, bit for bit as docs/numerics.md
 * defines them, for matrices of BF16 and those that it takes. */
#ifndef HD_TESTS_FAST_REF_H
#define HD_TESTS_FAST_REF_H

#include "ops/ops.h"

/* What x is rounded to, by processor. */
typedef enum fast_form { FAST_BF16, FAST_INT16, FAST_FORMS } fast_form;

/* The reference's table with these products. */
void fast_ref_table(hd_ops *t, fast_form form);

#endif
