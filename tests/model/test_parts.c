/* test_parts.c - ranks that divide a step's rows have equal work in attention, counted row by row. */
#include "check.h"

#include "model/rows_internal.h"
#include "weights/configs.h"

enum { MOST_ROWS = 4096, MOST_SEQS = 3, MOST_PARTS = 8 };

/* Sequences of a step: their first positions and rows. */
typedef struct step {
    int32_t n, start[MOST_SEQS], rows[MOST_SEQS];
} step;

static const step steps[] = {
    {1, {0},           {4096}        },
    {1, {0},           {9}           },
    {1, {1000},        {512}         },
    {1, {900000},      {2048}        },
    {3, {0, 5000, 70}, {40, 300, 1}  },
    {3, {7, 0, 3},     {2, 600, 2000}},
};

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Multiplications of a row: of its products, and of what it reads and compares. */
static int64_t work_of(const hd_model_spec *c, int32_t layer, int64_t pos) {
    const int64_t ratio = c->layers[layer].compress_ratio, heads = c->n_heads;
    const int64_t query = (int64_t)c->hidden * c->q_rank;
    const int64_t index_query = (int64_t)c->index_heads * c->index_dim * c->q_rank +
                                (int64_t)c->index_heads * c->hidden;
    const int64_t comparisons = (int64_t)c->index_heads * c->index_dim;
    int64_t n = query;
    if (c->family == HD_FAMILY_V4) {
        n += heads * c->head_dim * c->q_rank;  /* queries */
        n += (int64_t)c->hidden * c->head_dim; /* window vector */
        n += heads * c->head_dim * c->o_rank;  /* output */
        n += (int64_t)c->o_groups * c->o_rank * c->hidden;
        n += 2 * heads * c->head_dim * least(pos + 1, c->window); /* scores and sums */
        if (ratio == 0) return n;
        const bool selects = c->layers[layer].attention == HD_ATTN_CSA;
        const int64_t seen = (pos + 1) / ratio, tokens = selects ? 2 : 1;
        n += 2 * tokens * c->head_dim * c->hidden; /* vectors and gates of the compressor */
        n += 2 * heads * c->head_dim * (selects ? least(seen, c->index_topk) : seen);
        if (!selects) return n;
        return n + 2 * tokens * c->index_dim * c->hidden + index_query + comparisons * seen;
    }
    const bool sparse = c->layers[layer].attention == HD_ATTN_MLA_SPARSE;
    n += (int64_t)c->hidden * (c->kv_rank + c->rope_dim);
    n += heads * (c->nope_dim + c->rope_dim) * (c->q_rank ? c->q_rank : c->hidden);
    n += heads * c->kv_rank * (c->nope_dim + c->v_dim); /* absorbed */
    n += heads * c->v_dim * c->hidden;
    n += heads * (2 * c->kv_rank + c->rope_dim) *
         (sparse ? least(pos + 1, c->index_topk) : pos + 1);
    if (!sparse) return n;
    return n + (int64_t)c->hidden * c->index_dim + index_query + comparisons * (pos + 1);
}

static int64_t work_between(const hd_model_spec *c, const hd_batch *b, int32_t layer,
                            hd_extent rows) {
    int64_t n = 0;
    for (int32_t r = rows.first; r < rows.first + rows.n; r++) {
        n += work_of(c, layer, b->host.pos[r]);
    }
    return n;
}

static void fill(hd_batch *b, const step *s) {
    static const int32_t tokens[MOST_ROWS], page[1];
    hd_batch_reset(b);
    for (int32_t q = 0; q < s->n; q++) {
        hd_batch_add(b, &(hd_batch_seq){
                            .tokens = tokens,
                            .n = s->rows[q],
                            .start = s->start[q],
                            .after = -1,
                            .pages = {page, page},
                            .n_pages = 1
        });
    }
}

/* Each row is in one part, and a part has its share of the work to within a row at either end. */
static void check(const hd_model_spec *c, const hd_batch *b, int32_t layer, int32_t parts) {
    const hd_extent whole = {0, b->n_rows};
    const int64_t all = work_between(c, b, layer, whole);
    int64_t most_of_row = 0;
    for (int32_t r = 0; r < b->n_rows; r++) {
        const int64_t n = work_of(c, layer, b->host.pos[r]);
        if (n > most_of_row) most_of_row = n;
    }
    for (int32_t i = 0, row = 0; i < parts; i++) {
        const hd_extent own = model_part_of(c, b, layer, i, parts);
        assert_int_equal(own.first, row);
        row += own.n;
        if (i == parts - 1) assert_int_equal(row, b->n_rows);
        const int64_t off = work_between(c, b, layer, own) - all / parts;
        assert_true(off <= most_of_row && -off <= most_of_row);
    }
}

static void parts_have_equal_work(void **state) {
    (void)state;
    static const char *const names[] = {"v4_flash", "tiny_v4", "v3_2_exp", "v3", "v2_lite"};
    hd_device *device;
    hd_batch batch;
    assert_int_equal(hd_device_open_cpu(&device, &(hd_cpu_options){.n_threads = 1}, NULL),
                     HD_OK);
    assert_int_equal(
        hd_batch_open(&batch, &(hd_batch_limits){MOST_ROWS, MOST_SEQS, 1}, device, NULL),
        HD_OK);
    for (size_t m = 0; m < HD_LEN(names); m++) {
        hd_model_spec *spec = config_open(names[m]);
        for (size_t i = 0; i < HD_LEN(steps); i++) {
            fill(&batch, &steps[i]);
            for (int32_t l = 0; l < spec->n_layers && l < 6; l++) {
                for (int32_t parts = 1; parts <= MOST_PARTS; parts++) {
                    check(spec, &batch, l, parts);
                }
            }
        }
        hd_model_spec_close(spec);
    }
    hd_batch_close(&batch);
    hd_device_close(device);
}

/* Of a prompt the first part is longer the more the work grows with the position. */
static void later_parts_are_shorter(void **state) {
    (void)state;
    hd_device *device;
    hd_batch batch;
    hd_model_spec *spec = config_open("v3");
    assert_int_equal(hd_device_open_cpu(&device, &(hd_cpu_options){.n_threads = 1}, NULL),
                     HD_OK);
    assert_int_equal(
        hd_batch_open(&batch, &(hd_batch_limits){MOST_ROWS, MOST_SEQS, 1}, device, NULL),
        HD_OK);
    fill(&batch, &steps[0]);
    int32_t before = MOST_ROWS;
    for (int32_t i = 0; i < 4; i++) {
        const hd_extent own = model_part_of(spec, &batch, 0, i, 4);
        assert_true(own.n < before);
        before = own.n;
    }
    hd_batch_close(&batch);
    hd_device_close(device);
    hd_model_spec_close(spec);
}

int test_parts(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_have_equal_work),
        cmocka_unit_test(later_parts_are_shorter),
    };
    return cmocka_run_group_tests_name("parts", tests, NULL, NULL);
}
