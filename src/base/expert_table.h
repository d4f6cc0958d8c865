/* expert_table.h - the stored matrices of one role of an MoE layer, by expert slot.
 *
 * Which expert a slot holds may change between two steps. So operators read the matrices
 * from a table in device memory, and a captured step stays valid. What holds for all slots,
 * the host knows and it does not change: shape, format, and the range of addresses, from
 * which a kernel is chosen and its tensor maps are made. */
#ifndef HD_BASE_EXPERT_TABLE_H
#define HD_BASE_EXPERT_TABLE_H

#include "base/dtype.h"

HD_BEGIN_C

enum { HD_EXPERT_ALIGN = 128 }; /* of matrices that the fastest kernels take */

typedef struct hd_expert_table {
    const hd_weight *slots; /* [n] device memory; all of one shape */
    int32_t n;
    /* Shape and format of the slots. data and scale are the lowest addresses; if not all are
     * multiples of HD_EXPERT_ALIGN, addresses near them that are aligned as badly as the worst. */
    hd_weight shape;
    size_t data_range;           /* bytes from the lowest address of data to the highest */
    bool one_format, one_global; /* every slot has that of shape */
} hd_expert_table;

/* Describes matrices w[n], which are all that slots may ever hold. out->slots becomes w
 * itself; the caller replaces it where the device cannot read w. Matrices without data do
 * not count. */
void hd_expert_table_init(hd_expert_table *out, const hd_weight *w, int32_t n);

/* Includes one more matrix that slots may hold, aligned as the others, in the range. */
void hd_expert_table_extend(hd_expert_table *t, const hd_weight *w);

HD_END_C

#endif
