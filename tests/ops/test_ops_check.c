/* test_ops_check.c - every table refuses rows of a type, with scales or with a stride that it
 * does not take, and names the operator and the field. */
#include "ops/ops_fixture.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "ops/check_internal.h"

/* Rows of an operator's arguments. */
typedef struct rows_field {
    const char *op, *name;
    hd_rows_kind kind;
    size_t at;
    void (*run)(const hd_ops *ops, hd_stream *s, const void *args);
} rows_field;

/* All other arguments are zero: one that does not look computes nothing and succeeds. */
static void check_refused(const hd_ops *ops, const rows_field *f, hd_rows rows,
                          const char *why) {
    hd_stream *s = stream_for(ops, fix.stream[0]);
    hd_err err = {0};
    char want[160];
    void *args = take(1024);
    memset(args, 0, 1024);
    memcpy((uint8_t *)args + f->at, &rows, sizeof rows);
    f->run(ops, s, args);
    if (hd_stream_sync(s, &err) != HD_EUNSUPPORTED) fail_msg("%s takes %s", f->op, f->name);
    snprintf(want, sizeof want, "%s: %s has %s", f->op, f->name, why);
    if (!strstr(err.msg, want)) fail_msg("'%s' and not '%s'", err.msg, want);
}

/* Cached entries have four types, also keys of the indexer; on a GPU entries three and keys two. */
static bool takes(const hd_ops *ops, hd_rows_kind kind, hd_dtype type) {
    const bool cached = kind == HD_ROWS_POOL || kind == HD_ROWS_KEYS;
    if (type == HD_F32) return true;
    if (type == HD_E4M3) return cached;
    const bool on_gpu = stream_for(ops, fix.stream[0]) == fix.gpu_stream;
    if (type == HD_E2M1) return cached && !on_gpu;
    return cached && type == HD_BF16 && !(on_gpu && kind == HD_ROWS_KEYS);
}

static void check_field(const hd_ops *ops, const rows_field *f) {
    int32_t *data = take_ints(1);
    for (int type = 0; type < HD_N_DTYPES; type++) {
        const hd_rows other = {data, NULL, 0, (hd_dtype)type};
        if (!takes(ops, f->kind, other.type)) check_refused(ops, f, other, "type");
    }
    check_refused(ops, f, (hd_rows){data, data, 0, HD_F32}, "type F32 with scales");
    if (f->kind == HD_ROWS_STRIDED) return;
    check_refused(ops, f, (hd_rows){data, NULL, 64, HD_F32}, "a stride of 64");
}

#define T(name, kind) \
    check_field(ops, &(rows_field){op, #name, HD_ROWS_##kind, offsetof(args, name), run});
#define X(which)                                                                 \
    static void run_##which(const hd_ops *ops, hd_stream *s, const void *args) { \
        ops->which(s, args);                                                     \
    }                                                                            \
    static void refuse_##which(const hd_ops *ops) {                              \
        typedef hd_##which##_args args;                                          \
        static const char op[] = #which;                                         \
        void (*const run)(const hd_ops *, hd_stream *, const void *) =           \
            ops->which ? run_##which : NULL;                                     \
        (void)op, (void)sizeof(args);                                            \
        if (!run) return;                                                        \
        HD_ROWS_##which(T)                                                       \
    }
HD_OP_LIST(X)
#undef X
#undef T

static void check_refusals(const hd_ops *ops) {
#define X(op) refuse_##op(ops);
    HD_OP_LIST(X)
#undef X
}

void tables_refuse_other_rows(void **state) {
    (void)state;
    for (int32_t t = 0; t < fix.n_tables; t++) check_refusals(&fix.table[t]);
    for (fast_form f = 0; f < FAST_FORMS; f++) {
        /* the first is fast_ref.h's */
        for (int32_t t = 1; t < fix.n_fast[f]; t++) check_refusals(&fix.fast[f][t]);
    }
    if (!fix.gpu) return;
    check_refusals(&fix.gpu_fast);
    check_refusals(&fix.gpu_official);
}

/* A table that takes more than one type. */
void rows_are_taken_by_kind(void **state) {
    (void)state;
    static const ops_types types = {1u << HD_F32 | 1u << HD_E4M3, 1u << HD_F32 | 1u << HD_BF16,
                                    1u << HD_E4M3};
    static const struct {
        hd_rows_kind kind;
        hd_dtype type;
        bool scales;
        int64_t stride;
        const char *fault; /* NULL: it is taken */
    } cases[] = {
        {HD_ROWS_PLAIN,   HD_F32,  false, 0, NULL                                             },
        {HD_ROWS_PLAIN,   HD_E4M3, true,  0, NULL                                             },
        {HD_ROWS_STRIDED, HD_E4M3, true,  9, NULL                                             },
        {HD_ROWS_POOL,    HD_BF16, false, 0, NULL                                             },
        {HD_ROWS_STATE,   HD_F32,  false, 0, NULL                                             },
        {HD_ROWS_KEYS,    HD_E4M3, false, 0, NULL                                             },
        {HD_ROWS_PLAIN,   HD_BF16, false, 0,
         "op: x has type BF16, and this backend takes "
         "only F32 F8_E4M3"                                                                   },
        {HD_ROWS_PLAIN,   HD_E4M3, false, 0, "op: x has type F8_E4M3 without scales"          },
        {HD_ROWS_PLAIN,   HD_F32,  true,  0, "op: x has type F32 with scales"                 },
        {HD_ROWS_POOL,    HD_BF16, false, 7, "op: x has a stride of 7, and must be contiguous"},
        {HD_ROWS_KEYS,    HD_E4M3, true,  0, "op: x has type F8_E4M3 with scales"             },
        {HD_ROWS_KEYS,    HD_BF16, false, 0,
         "op: x has type BF16, and this backend takes only F8_E4M3"                           },
        {HD_ROWS_STATE,   HD_BF16, false, 0,
         "op: x has type BF16, and this backend takes only F32"                               },
    };
    int32_t *data = take_ints(1);
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        const hd_rows x = {data, cases[i].scales ? data : NULL, cases[i].stride, cases[i].type};
        const bool taken = ops_takes(fix.stream[0], &types, "op", "x", cases[i].kind, &x);
        hd_err err = {0};
        const hd_status st = hd_stream_sync(fix.stream[0], &err);
        assert_int_equal(taken, cases[i].fault == NULL);
        assert_int_equal(st, taken ? HD_OK : HD_EUNSUPPORTED);
        if (!taken) assert_string_equal(err.msg, cases[i].fault);
    }
}
