/* fast_ref.h - reference GEMMs of --precision fast on a CPU, in plain C. They equal the
 * definitions of docs/numerics.md bit for bit, for the formats that `fast` rounds. */
#ifndef HD_TESTS_FAST_REF_H
#define HD_TESTS_FAST_REF_H

#include "ops/ops.h"

/* The format that x is rounded to; it depends on the processor. */
typedef enum fast_form { FAST_BF16, FAST_INT16, FAST_FORMS } fast_form;

/* Fills the reference table, with these GEMMs. */
void fast_ref_table(hd_ops *t, fast_form form);

#endif
