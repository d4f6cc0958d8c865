/* ops_fixture.h - tests an operator on every operator table of this machine.
 *
 * An op_case runs rows [first, first + n) of one set of inputs. check_op() runs it on every
 * table, with NaN in scratch and outputs and guard words around the outputs. It compares with
 * the reference within the tolerance. It asks for the same bits on 1, 2, 3 and 5 threads; row
 * by row, in sevens, and all at once; and from AVX2 and AVX-512. With a GPU the CUDA table is
 * tested too, also captured in a graph; then both sides can address the memory of a test.
 * HADAL_TEST_BRIEF=1 runs the reference and CUDA only, all rows at once, for the device's
 * sanitizers; HADAL_TEST_GPU_ALONE=1 the reference and CUDA, in all ways.
 *
 * An operator with a form of its own for --precision fast has a fast_tolerance: each form of
 * fast_ref.h is within it. The CPU tables of that precision give the bits of fast_ref.h; the
 * GPU's table has a tolerance of its own. */
#ifndef HD_TESTS_OPS_FIXTURE_H
#define HD_TESTS_OPS_FIXTURE_H

#include "check.h"

#include "ops/fast_ref.h"
#include "ops/ops.h"

enum { MAX_OUTS = 5, MAX_TABLES = 16, N_THREADS = 4 };

/* one test per operator; a missing one does not link */
#define X(op) void op_##op(void **state);
HD_OP_LIST(X)
#undef X

void fast_products(void **state);
void few_places_on_gpu(void **state);
void naive_on_gpu(void **state); /* test_ops_attention.c */
void many_rows_on_gpu(void **state);

/* tests of test_ops_csa2.c */
void groups_are_rounded(void **state);
void pools_are_those_of_whole_numbers(void **state);
void pool_breaks_ties_downwards(void **state);
void gates_know_their_answers(void **state);

void resident_refuses_too_much(void **state); /* test_ops_resident.c */

/* tests of test_ops_real.c */
#define REAL_OPS_LIST(X)   \
    X(real_linear)         \
    X(real_linear_heads)   \
    X(real_linear_grouped) \
    X(real_attention)      \
    X(real_index_select)   \
    X(real_hc_pre)         \
    X(refusals_are_reported)
#define X(test) void test(void **state);
REAL_OPS_LIST(X)
#undef X

/* Those of test_ops_entries.c and test_ops_entries_gpu.c. */
#define ENTRY_TESTS_LIST(X)          \
    X(entries_are_the_nearest)       \
    X(entry_sizes)                   \
    X(entries_are_rounded)           \
    X(entries_keep_nan)              \
    X(packed_entries_are_read)       \
    X(gradients_read_packed_entries) \
    X(made_entries_are_packed)       \
    X(packed_entries_are_fetched)    \
    X(packed_attention_on_gpu)       \
    X(packed_keys_on_gpu)            \
    X(packed_naive_on_gpu)
#define X(test) void test(void **state);
ENTRY_TESTS_LIST(X)
#undef X

/* Those of test_ops_check.c. */
#define CHECK_TESTS_LIST(X)     \
    X(tables_refuse_other_rows) \
    X(rows_are_taken_by_kind)
#define X(test) void test(void **state);
CHECK_TESTS_LIST(X)
#undef X

/* tests of test_ops_official.c */
#define OFFICIAL_TESTS_LIST(X)  \
    X(official_linear)          \
    X(official_linear_heads)    \
    X(official_grouped_gemm)    \
    X(official_little_scratch)  \
    X(official_tiles)           \
    X(official_attention)       \
    X(official_leaves_the_rest) \
    X(official_instructions)
#define X(test) void test(void **state);
OFFICIAL_TESTS_LIST(X)
#undef X

/* tests of test_ops_cublaslt.c */
#define CUBLASLT_TESTS_LIST(X) \
    X(cublaslt_products)       \
    X(cublaslt_in_pieces)      \
    X(library_leaves_the_rest) \
    X(library_is_refused)
#define X(test) void test(void **state);
CUBLASLT_TESTS_LIST(X)
#undef X

/* What tables run on, opened once; a stream per number of threads. */
typedef struct ops_fixture {
    hd_ops table[MAX_TABLES]; /* the reference, every distinct CPU table, CUDA */
    int32_t n_tables;
    hd_ops fast[FAST_FORMS][MAX_TABLES]; /* fast_ref.h's, and every CPU table of --precision
                                            fast; none in brief */
    int32_t n_fast[FAST_FORMS];
    hd_device *device[N_THREADS];
    hd_stream *stream[N_THREADS]; /* 1, 2, 3 and 5 threads */
    hd_device *gpu;               /* NULL without one */
    hd_stream *gpu_stream;
    hd_ops gpu_fast, gpu_official; /* its tables of these precisions */
    int32_t n_cases;
    bool poisoned; /* its scratch, once per case because it is large */
    bool brief;
    bool gpu_alone; /* with one: tables of a CPU are there, and are not compared */
} ops_fixture;

extern ops_fixture fix;

int open_fixture(void **state);
int close_fixture(void **state);
int forget_all(void **state); /* releases what a test allocated */

typedef struct op_case op_case;

struct op_case {
    const char *name;
    int32_t rows, n_outs;
    int32_t width[MAX_OUTS];    /* 4-byte elements of a row of each output */
    double tolerance[MAX_OUTS]; /* relative to |want| + rms of the output; 0: the same bits */
    double fast_tolerance;      /* of output 0; 0: one precision */
    bool fast_near;             /* fast_ref.h does not have its bits */
    double gpu_fast_tolerance;  /* likewise for the GPU */
    double
        official_tolerance; /* of the GPU from the reference of --precision official; 0: no */
    double official_mean;   /* likewise, of the root mean square */
    bool all_rows;          /* its rows depend on each other */
    bool cpu_only;          /* a GPU refuses it, or has no such operator */
    bool not_recorded;      /* run() does more than queue the operator */
    const void *args;
    void (*run)(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first, int32_t n,
                void *const *out); /* out[i] is row `first` of output i */
};

void check_op(const op_case *c);

/* Asks for the bits of fast_ref.h from the tables of --precision fast, in all the ways
 * above. */
void check_fast_bits(const op_case *c);

/* check_op() on the GPU alone, for shapes that are too large for the others. Does nothing
 * without a GPU. */
void check_on_gpu(const op_case *c);

/* Returns the stream of a table: s, or the GPU's stream. */
hd_stream *stream_for(const hd_ops *ops, hd_stream *s);

/* Compares another table of the GPU with `want`, also captured and in slices. Does nothing
 * without a GPU. */
void check_gpu_table(const op_case *c, const hd_ops *ops, double tolerance, void *const *want);

/* Likewise of --precision official, whose first output is also within `mean` of `want` in root mean square. */
void check_gpu_official(const op_case *c, double tolerance, double mean, void *const *want);

/* Fails unless the root mean square of the error is within tolerance of that of the output, where that is
 * finite. */
void check_mean(const char *what, const float *got, const float *want, int64_t n,
                double tolerance);

/* Waits for an operator that was called directly; fails if it failed. */
void finish(const char *what, hd_stream *s);

/* Runs rows [first, first + n) of c into fresh outputs, poisoned and guarded. */
void run_op(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first, int32_t n,
            void **out);

/* Fails unless both arrays have the same bits; any NaN equals any other. */
void check_bits(const char *what, const void *got, const void *want, int64_t n);

/* Fails unless every element is within tolerance of |want| + rms of all of them. */
void check_near(const char *what, const void *got, const void *want, int64_t n,
                double tolerance);

/* ---- inputs: allocated for one test with the exact size, so that overruns are found ---- */

void *take(size_t bytes);

void *take_copy(const void *from, size_t bytes);
float *take_nan(int64_t n);
float *take_random(int64_t n, float spread); /* uniform in (-spread, spread) */
int32_t *take_ints(int64_t n);               /* zero */
int32_t random_below(int32_t n);             /* 0 .. n - 1 */
void fill_random(float *x, int64_t n, float spread);

/* ---- stored matrices ---- */

typedef struct weight_format {
    int32_t id; /* FORMAT_ID of a row of hd_formats, or one of the negative ones below */
    const char *name;
    hd_dtype type, scale_type;
    int32_t block_rows, block_cols;
    float global;
} weight_format;

#define FORMAT_ID(format, scale_type) \
    ((int32_t)(format) * (int32_t)HD_N_DTYPES + (int32_t)(scale_type))

/* The formats that tests name. */
enum {
    UNNAMED = -1,
    E4M3_ODD = -2, /* scales per 3 x 5 */
    FP8_32 = -3,   /* V4.1's: powers of two per 32 x 32 */
    F32_PLAIN = FORMAT_ID(HD_FORMAT_F32, HD_NONE),
    BF16_PLAIN = FORMAT_ID(HD_FORMAT_BF16, HD_NONE),
    FP8_F32 = FORMAT_ID(HD_FORMAT_FP8, HD_F32),
    FP8_E8M0 = FORMAT_ID(HD_FORMAT_FP8, HD_E8M0),
    FP4_E8M0 = FORMAT_ID(HD_FORMAT_FP4, HD_E8M0),
    MXFP8_E8M0 = FORMAT_ID(HD_FORMAT_MXFP8, HD_E8M0),
    NVFP4_E4M3 = FORMAT_ID(HD_FORMAT_NVFP4, HD_E4M3)
};

/* All formats: the rows of hd_formats, and odd ones. Filled by open_fixture(). */
enum { MAX_FORMATS = 64 };
extern weight_format weight_formats[MAX_FORMATS];
extern int32_t n_weight_formats;

const weight_format *weight_format_of(int32_t id);

/* A random matrix, in every third case at an odd address. all_codes: every bit pattern, NaN too,
 * of elements and of scales of 8 bits. cols is rounded up until a row ends on a whole byte. */
hd_weight *take_weight(const weight_format *f, int32_t rows, int32_t cols, bool all_codes);

/* One with the alignment of a checkpoint's. powers: its scales are powers of two. */
const hd_weight *take_aligned(int32_t format, int32_t rows, int32_t cols, bool powers);

/* ---- pages: n_seqs sequences of n_entries[s] entries, in random order. Rows that are no entry
 * are NaN; unused pages have no number. ---- */

hd_paged take_pages(int32_t n_seqs, const int32_t *n_entries, int32_t page_entries,
                    int32_t width, float spread);
float *page_entry(const hd_paged *p, int32_t seq, int32_t entry);

/* The same pages with entries rounded to bfloat16. */
hd_paged narrow_pages(const hd_paged *p, int32_t n_seqs, const int32_t *n_entries);

/* ---- attention ---- */

/* The arguments of a case, and its lists of keys for tables whose entries are bfloat16. */
typedef struct attention_lists {
    hd_attention_args a;
    hd_paged narrow_recent, narrow_entries;
} attention_lists;

/* op_case.run; args: an attention_lists. */
void run_attention_lists(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                         int32_t n, void *const *out);

#endif
