/* rows_internal.h - the rows that the ranks of a group compute together, and the columns that they
 * exchange. */
#ifndef HD_MODEL_ROWS_INTERNAL_H
#define HD_MODEL_ROWS_INTERNAL_H

#include "model/model_internal.h"

typedef struct model_rows {
    int32_t n;              /* all of them */
    int32_t own_first, own; /* of them, those that this rank owns */
    int32_t own_row;        /* the first row that it owns, in the batch */
    bool foreign;           /* they belong to several attention groups, and are gathered */
    int32_t first;          /* if not foreign: the first one of them in the batch */
} model_rows;

bool model_shares(const hd_model *m, hd_group group); /* whether it has several ranks */
/* whether its ranks gather the columns that each of them computed, and do not sum */
bool model_gathers_columns(const hd_model *m, hd_group group);
bool model_rows_are_foreign(const hd_model *m, hd_group group);
/* whether other ranks compute rows of this rank's batch */
bool model_rows_are_few(const hd_model *m, hd_group group);

/* Returns the most rows that a group computes of batches of `rows`. */
int32_t model_most_rows(const hd_model *m, hd_group group, int32_t rows);

/* rows: of this rank's batch; group_rows: those of every attention group, or NULL if there is
 * one. model_step_rows(): all rows of the step. */
model_rows model_rows_of(const model_step *s, hd_group group, int32_t rows,
                         const int32_t *group_rows);
model_rows model_step_rows(const model_step *s, hd_group group);

/* Returns how many rows of the step the ranks of another rank's group compute. */
int32_t model_rows_of_rank(const model_step *s, hd_group group, int32_t rank);

/* Returns the group's rows [n, cols]: rows of `batch`, or `gathered`. */
hd_rows model_rows_in(const model_rows *r, hd_rows batch, hd_rows gathered, int32_t cols);

/* Foreign rows: gathers the rows that each rank owns; copies those of the batch, of `rows` rows,
 * back: all that the group computed. */
void model_fetch_rows(const model_step *s, hd_group group, const model_rows *r,
                      hd_rows gathered, hd_rows batch, int32_t cols);
void model_fetch_ints(const model_step *s, hd_group group, const model_rows *r,
                      int32_t *gathered, const int32_t *batch); /* one of each row */
void model_return_rows(const model_step *s, hd_group group, const model_rows *r, hd_rows batch,
                       hd_rows gathered, int32_t rows, int32_t cols);

/* x [n, each]: this rank has rows `own`; afterwards all have all. */
void model_gather_ints(const model_step *s, hd_group group, int32_t *x, int32_t n, int32_t each,
                       hd_extent own);

/* Context parallelism: of the rows of a step a rank computes a part. Whether this step divides them: with few
 * rows it does not pay. A rank's part of the step, in which its rows are all rows. Each rank stores the keys
 * of all rows: it gathers what the parts leave for them (model_gathers_keys), or computes all. Buffers whose
 * width is the layer's stay those of the step. False: it has no rows. */
typedef struct model_part {
    int32_t first; /* its first row in the step */
    model_step step;
    hd_batch batch;
    model_activations t;
} model_part;
bool model_divides_rows(const model_step *s);
bool model_own_part(const model_step *s, int32_t layer, model_part *to);
/* Which rows of a batch a part has in a layer; those of this rank's part. Parts have equal work. */
hd_extent model_part_of(const hd_model_spec *c, const hd_batch *b, int32_t layer, int32_t part,
                        int32_t parts);
hd_extent model_own_rows(const model_step *s, int32_t layer);
bool model_gathers_keys(const model_step *s);
bool model_may_divide_rows(const hd_model *m);
bool model_may_gather_keys(const hd_model *m);
void model_gather_parts(const model_step *s, int32_t layer); /* the block's results */
/* x [rows of the step, cols]: gathers the parts; none if cols is 0 */
void model_gather_part(const model_step *s, int32_t layer, hd_rows x, int32_t cols);

/* Gathers the batch's rows of the ranks that own them. */
void model_spread_rows(const model_step *s, hd_rows batch, int32_t rows, int32_t cols);

/* Columns `own` of x [rows, all]: where this rank writes them, and their gather. */
hd_rows model_columns_at(hd_rows x, hd_extent own, int32_t all);
void model_gather_columns(const model_step *s, hd_group group, hd_rows x, int32_t rows,
                          hd_extent own, int32_t all);

/* Completes a block's result [rows, hidden], of which each rank of the group has computed columns
 * `own`, or with sum_in_ranks a partial sum. */
void model_join_result(const model_step *s, hd_group group, hd_rows y, int32_t rows,
                       hd_extent own);

/* Where a fused call pays: whether the block's result is completed in the stage after it, by the residual and
 * norm of the next block. Not if rows travel on a stream of their own. */
bool model_joins_later(const model_step *s, hd_group group);
bool model_heads_join_later(const model_step *s);
bool model_ffn_joins_later(const model_step *s, int32_t layer);

/* The attention's columns: gathered before its last projection (model_gathers_heads), and the
 * result joined (model_shares_heads). */
bool model_shares_heads(const hd_model *m);
bool model_gathers_heads(const hd_model *m);
hd_rows model_head_values(const model_step *s, int32_t row); /* o_low from a row on */
void model_attn_output(const model_step *s, int32_t layer);
void model_gather_heads(const model_step *s, int32_t layer);
void model_join_heads(const model_step *s, int32_t layer);
/* o_low [rows, width]: the columns that this rank computes, of width elements in all */
hd_extent model_head_columns(const hd_model *m, int32_t *width);

#endif
