/* fused_ref.c - reference of the fused operators: those that they stand for, in order. */
#include "ops/fused_internal.h"
#include "ops/ref/ref_internal.h"

#define RUN(part, args) hd_##part##_ref(s, args)
#define X(op)                                                   \
    void hd_##op##_ref(hd_stream *s, const hd_##op##_args *a) { \
        OPS_RUN_##op(RUN, a)                                    \
    }
OPS_FUSED_LIST(X)
#undef X
#undef RUN

#define hd_swiglu_ref_official hd_swiglu_ref
#define RUN(part, args)        hd_##part##_ref_official(s, args)
#define X(op)                                                            \
    void hd_##op##_ref_official(hd_stream *s, const hd_##op##_args *a) { \
        OPS_RUN_##op(RUN, a)                                             \
    }
X(linear_set)
X(linear_swiglu)
X(grouped_swiglu)
#undef X
#undef RUN
