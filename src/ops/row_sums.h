/* row_sums.h - how a GPU sums rows of a parameter's gradient: see backward.h.
 *
 * In chunks, which are the sequences, divided at every HD_SUM_ROWS rows (of large stacks of experts at every
 * eighth of these places). A chunk's sum does not depend on the
 * other rows of the call, and a parameter adds the sums of its chunks in order. A CPU reads none of this: it
 * adds row by row. */
#ifndef HD_OPS_ROW_SUMS_H
#define HD_OPS_ROW_SUMS_H

#include "ops/types.h"

HD_BEGIN_C

enum { HD_SUM_ROWS = 512 };

typedef struct hd_row_sums {
    hd_seqs seqs;    /* of the rows, or of groups of as many each; n 0: they are one sequence */
    float *parts;    /* [n_parts] for the operator's own use; NULL: it has to do without */
    int64_t n_parts; /* no bit depends on it */
} hd_row_sums;

HD_END_C

#endif
