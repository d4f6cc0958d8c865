/* check_internal.h - the check of an operator's arguments, with which every table begins a call. */
#ifndef HD_OPS_CHECK_INTERNAL_H
#define HD_OPS_CHECK_INTERNAL_H

#include "ops/ops.h"

HD_BEGIN_C

/* The element types that a table takes, as bits 1 << type. */
typedef struct ops_types {
    uint32_t act, pool, keys;
} ops_types;

/* Of cached entries in the memory of a CPU. */
enum { OPS_ENTRY_TYPES = 1 << HD_F32 | 1 << HD_BF16 | 1 << HD_E4M3 | 1 << HD_E2M1 };

/* Returns whether a table takes an operator's rows; if not, fails the stream and names them. */
bool ops_takes(hd_stream *s, const ops_types *types, const char *op, const char *field,
               hd_rows_kind kind, const hd_rows *x);

/* Returns whether a pass fits the buffer, whatever its rows choose; if not, fails the stream. */
bool ops_fits_buffer(hd_stream *s, const hd_resident_args *a);

/* ops_check_op(s, types, a) for every operator: whether a table takes all rows in a. */
#define T(field, kind) &&ops_takes(s, types, op, #field, HD_ROWS_##kind, &a->field)
#define X(name)                                                               \
    static inline bool ops_check_##name(hd_stream *s, const ops_types *types, \
                                        const hd_##name##_args *a) {          \
        static const char op[] = #name;                                       \
        (void)s, (void)types, (void)a, (void)op;                              \
        return true HD_ROWS_##name(T);                                        \
    }
HD_OP_LIST(X)
#undef X
#undef T

HD_END_C

#endif
