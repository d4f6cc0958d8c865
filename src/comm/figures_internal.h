/* figures_internal.h - how backends count what a rank exchanges: the rank's thread counts, any thread
 * reads. */
#ifndef HD_COMM_FIGURES_INTERNAL_H
#define HD_COMM_FIGURES_INTERNAL_H

#include <stdatomic.h>
#include <stdint.h>

#include "hadal_types.h"

enum { COMM_FIGURES = (int)(sizeof(hd_rank_figures) / sizeof(int64_t)) };

struct comm_figures {
    _Atomic int64_t n[COMM_FIGURES]; /* as in hd_rank_figures */
    hd_comm_op kind;                 /* of the call that the rank is in */
    int64_t exchange_ns;             /* of all kinds */
};

/* Counts what came from another rank, and how long this one waited for it. f may be NULL. */
void comm_count_bytes(struct comm_figures *f, int64_t bytes);
void comm_count_wait(struct comm_figures *f, int64_t ns);

void comm_read_figures(const struct comm_figures *f, hd_rank_figures *out);

#endif
