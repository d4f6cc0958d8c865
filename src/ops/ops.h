/* ops.h - the mathematics, one argument struct and one table entry per operator.
 *
 * Contract of every entry: queue the work on s and return; allocate nothing; synchronize
 * nothing; report trouble through the stream; accept zero rows. Shapes are in brackets,
 * row-major; a *_stride counts elements between rows, and where there are no heads 0 means
 * the natural one. Nothing may overlap unless the struct says so.
 *
 * Activations are hd_act: an incomplete type, because the element is the backend's affair
 * (float on the CPU). What must be float32 everywhere (scores, mixing weights, logits) says
 * float. A row's result depends on that row, its sequence's keys and the weights alone: never
 * on how many rows, chunks or threads share the call (design D8), but where that was given up
 * (hd_ops_options). */
#ifndef HD_OPS_OPS_H
#define HD_OPS_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "base/dtype.h"
#include "base/router_rule.h"

HD_BEGIN_C

typedef struct hd_act hd_act;

/* Entries of many sequences in pages of one pool. Entry e of sequence s is row
 * table[s * table_stride + e / page_entries] * page_entries + e % page_entries. */
typedef struct hd_paged {
    hd_act *data;         /* [n_pages * page_entries, width] */
    const int32_t *table; /* [n_seqs, table_stride] pages; only live entries need one */
    int32_t table_stride;
    int32_t page_entries;
    int32_t width;
} hd_paged;

/* The last `ring` positions of every page of page_tokens positions. Position p of sequence s
 * is row table[s * table_stride + p / page_tokens] * ring + p % ring; ring divides
 * page_tokens. */
typedef struct hd_ring {
    float *data; /* [n_pages * ring, width] */
    const int32_t *table;
    int32_t table_stride;
    int32_t page_tokens;
    int32_t ring;
    int32_t width;
} hd_ring;

/* The sequences of a step: sequence s owns rows first_row[s] .. first_row[s + 1] - 1, at
 * positions start[s], start[s] + 1, ... */
typedef struct hd_seqs {
    int32_t n;
    const int32_t *first_row; /* [n + 1] */
    const int32_t *start;     /* [n] */
} hd_seqs;

/* out[r, i, :] = table[tokens[r], :] for i < copies */
typedef struct hd_embed_args {
    hd_act *out; /* [rows, copies, cols] */
    const hd_weight *table;
    const int32_t *tokens; /* [rows] */
    int32_t rows, copies;
} hd_embed_args;

/* out[i, :] = x[index[i], :] */
typedef struct hd_gather_args {
    hd_act *out;          /* [rows, cols] */
    const hd_act *x;      /* [*, cols] */
    const int32_t *index; /* [rows] */
    int32_t rows, cols;
} hd_gather_args;

/* x[r, :] += y[r / repeat, :] */
typedef struct hd_add_args {
    hd_act *x;       /* [rows, cols] */
    const hd_act *y; /* [rows / repeat, cols] */
    int32_t rows, cols, repeat;
} hd_add_args;

/* out = w * x / sqrt(mean(x^2) + eps); models.md 2.1.1 */
typedef struct hd_rms_norm_args {
    hd_act *out;         /* [rows, cols], may be x */
    const hd_act *x;     /* [rows, cols] */
    const float *weight; /* [cols], NULL: ones */
    int32_t rows, cols, out_stride, x_stride;
    float eps;
} hd_rms_norm_args;

/* out = w * (x - mean) / sqrt(var + eps) + b, biased variance; models.md 2.1.2 */
typedef struct hd_layer_norm_args {
    hd_act *out;     /* [rows, cols], may be x */
    const hd_act *x; /* [rows, cols] */
    const float *weight, *bias;
    int32_t rows, cols;
    float eps;
} hd_layer_norm_args;

/* out = x W^T. Exactly one of out and out_f32 is set. */
typedef struct hd_linear_args {
    hd_act *out;     /* [rows, w->rows] */
    float *out_f32;  /* [rows, w->rows] */
    const hd_act *x; /* [rows, w->cols] */
    const hd_weight *w;
    int32_t rows, out_stride, x_stride;
} hd_linear_args;

/* One small matrix per head, all in one tensor: head h uses W_h = rows
 * [first_row + h * head_rows, + n_rows) of w.
 *     plain:     out[r, h, :] = x[r, h, :] W_h^T   x wide w->cols, out wide n_rows
 *     transpose: out[r, h, :] = x[r, h, :] W_h     x wide n_rows,  out wide w->cols
 * MLA's absorbed key (transposed) and value projections; V4's grouped output projection. */
typedef struct hd_linear_heads_args {
    hd_act *out;     /* [rows, heads, *] with out_head elements between heads */
    const hd_act *x; /* [rows, heads, *] with x_head elements between heads */
    const hd_weight *w;
    int32_t rows, heads, n_rows, first_row, head_rows;
    int32_t out_stride, out_head, x_stride, x_head;
    bool transpose;
} hd_linear_heads_args;

/* angle[r, i] = position[r] * freq[i]; out[r] = cos(angle) then sin(angle), times scale */
typedef struct hd_rope_table_args {
    float *out;              /* [rows, 2, pairs] */
    const int32_t *position; /* [rows] */
    const float *freq;       /* [pairs] */
    int32_t rows, pairs;
    float scale;
} hd_rope_table_args;

/* Rotates 2 * pairs elements of every head; models.md 2.1.4. Interleaved pairs
 * (x[2i], x[2i+1]), or with half_split (x[i], x[i + pairs]). Elements outside are left. */
typedef struct hd_rope_args {
    hd_act *out;          /* first rotated element of row 0, head 0; may be x */
    const hd_act *x;      /* likewise */
    const float *cos_sin; /* [rows, 2, pairs] of rope_table */
    int32_t rows, heads, pairs;
    int32_t out_stride, out_head, x_stride, x_head;
    bool half_split, inverse;
} hd_rope_args;

/* pool entry (seq[r], pos[r]) = x[r, 0 .. pool.width) */
typedef struct hd_store_args {
    hd_paged pool;
    const hd_act *x; /* [rows, pool.width] */
    const int32_t *seq, *pos;
    int32_t rows, x_stride;
} hd_store_args;

/* Lightning indexer; models.md 2.6 (ratio 1) and 2.11 (compressed keys). Row r sees
 * n = (pos[r] + 1) / ratio keys and scores each
 *     score[u] = sum_h weight[r, h] * scale * max(0, q[r, h] . key[u])
 * Keeps the top_k best, the lower index on a tie, in ascending order; the rest of a row is
 * -1. Rows that see no more than top_k keys take all of them. */
typedef struct hd_index_select_args {
    int32_t *out;        /* [rows, top_k] */
    const hd_act *q;     /* [rows, heads, keys.width] */
    const float *weight; /* [rows, heads] */
    hd_paged keys;
    const int32_t *seq, *pos; /* [rows] */
    int32_t rows, heads, ratio, top_k;
    float scale;
} hd_index_select_args;

/* Softmax attention of one row over two lists of keys, in this order:
 *     window:  positions max(0, pos - window + 1) .. pos of `recent`   (window 0: none)
 *     entries: e < (pos + 1) / ratio of `entries`, or only selected ones (ratio 0: none)
 * An entry's first v_dim elements are its value. sink adds exp(sink[h]) to the denominator
 * only. MLA: entries with ratio 1, k_dim = latent + rope, v_dim = latent (models.md 2.4);
 * V4: both lists, k_dim = v_dim (2.9). */
typedef struct hd_attend_args {
    hd_act *out;     /* [rows, heads, v_dim] */
    const hd_act *q; /* [rows, heads, k_dim] */
    hd_paged recent, entries;
    const int32_t *selected; /* [rows, n_selected] entry numbers, -1 at the end; NULL: all */
    const float *sink;       /* [heads] or NULL */
    const int32_t *seq, *pos;
    int32_t rows, heads, k_dim, v_dim, window, ratio, n_selected;
    float scale;
} hd_attend_args;

/* MLA in its naive form: softmax attention whose keys and values are made from the cached latents
 * for every head; models.md 2.4. With W_h rows [h * (nope_dim + v_dim), + nope_dim + v_dim) of w:
 *     [key | value] of entry e and head h = W_h latent[e], the key followed by roped[e]
 * A row sees the entries up to its own position. */
typedef struct hd_attend_naive_args {
    hd_act *out;      /* [rows, heads, v_dim] */
    const hd_act *q;  /* [rows, heads, nope_dim + rope_dim], the last rope_dim rotated */
    hd_paged latents; /* width = w->cols + rope_dim: latent | rotated key of all heads */
    const hd_weight *w;
    hd_seqs seqs; /* first_row counts from row 0 of out and q */
    int32_t heads, nope_dim, rope_dim, v_dim;
    float scale;
} hd_attend_naive_args;

/* V4's compressor; models.md 2.10. For every block of `ratio` positions that ends in this
 * step: per-channel softmax over the block (with overlap: over the previous block's first
 * half of channels and this block's second half), RMS norm, rotary embedding at the block's
 * first position, stored as entry position / ratio. Positions before the step come from
 * `state`, where the step's own last positions are left for the next one.
 * state rows are [kv | gate + ape], each coff * width wide, coff = overlap ? 2 : 1. */
typedef struct hd_compress_args {
    hd_paged entries;  /* width = the entry's width */
    hd_ring state;     /* width = 2 * coff * entries.width; ring >= coff * ratio */
    float *kv;         /* [rows, coff * width] */
    float *gate;       /* [rows, coff * width]; may hold anything afterwards */
    const float *ape;  /* [ratio, coff * width] */
    const float *norm; /* [width] */
    const float *freq; /* [pairs] */
    hd_seqs seqs;
    int32_t ratio, pairs; /* the last 2 * pairs elements are rotated, interleaved */
    bool overlap;
    float eps;
} hd_compress_args;

/* Chooses experts and their weights; models.md 2.2, 2.3, 2.12. With `table` the experts are
 * table[token] and only the weights come from the scores. Chosen in order of preference, the
 * lower expert first on a tie. */
typedef struct hd_route_args {
    int32_t *expert;       /* [rows, top_k] */
    float *weight;         /* [rows, top_k] */
    const float *logits;   /* [rows, n_experts] */
    const float *bias;     /* [n_experts] added for choosing only, or NULL */
    const int32_t *table;  /* [vocab, top_k] or NULL */
    const int32_t *tokens; /* [rows], read with table */
    int32_t rows;
    hd_route_rule rule;
} hd_route_args;

/* Sorts the rows * top_k assignments (number t * top_k + j) by expert, stably. */
typedef struct hd_permute_args {
    int32_t *offset;       /* [n_experts + 1] first sorted place of each expert */
    int32_t *assignment;   /* [rows * top_k] the assignment at each sorted place */
    int32_t *place;        /* [rows * top_k] the sorted place of each assignment */
    const int32_t *expert; /* [rows, top_k] */
    int64_t *load;         /* [n_experts] grows by the places of each; or NULL */
    const int32_t *live;   /* [rows] 0: the row does not count as load; or NULL */
    int32_t rows, top_k, n_experts;
} hd_permute_args;

/* Places offset[e] .. offset[e + 1] - 1 times expert e's matrix. Place i reads row
 * assignment[i] / top_k of x, or row i when assignment is NULL. */
typedef struct hd_linear_grouped_args {
    hd_act *out;        /* [n places, w[0].rows] */
    const hd_act *x;    /* [*, w[0].cols] */
    const hd_weight *w; /* [n_experts], all of one shape */
    const int32_t *offset, *assignment;
    int32_t n_experts, top_k, n_places; /* n_places = rows * top_k, the bound the host knows */
} hd_linear_grouped_args;

/* out = silu(g) * u with g = min(gate, limit), u = clamp(up, -limit, limit) (limit 0: none),
 * times weight[assignment[r]], or weight[r] without assignment, where weight is given; models.md
 * 2.1.3, 2.12 */
typedef struct hd_swiglu_args {
    hd_act *out; /* [rows, cols], may be gate */
    const hd_act *gate, *up;
    const float *weight; /* NULL: ones */
    const int32_t *assignment;
    int32_t rows, cols;
    float limit;
} hd_swiglu_args;

/* out[t] = shared[t] + sum over j of y[place[t * top_k + j]] * weight[t * top_k + j], summed
 * in order of expert number, so that the choice's order does not matter */
typedef struct hd_combine_args {
    hd_act *out;          /* [rows, cols], may be shared */
    const hd_act *y;      /* [rows * top_k, cols] by sorted place */
    const hd_act *shared; /* [rows, cols] or NULL */
    const float *weight;  /* [rows, top_k] or NULL: ones (already applied) */
    const int32_t *place; /* [rows, top_k] */
    int32_t rows, cols, top_k;
} hd_combine_args;

/* V4's hyper-connections before a block; models.md 2.8: mixes hc streams into one row and
 * derives how the block's result goes back. */
typedef struct hd_hc_pre_args {
    hd_act *out;        /* [rows, cols] */
    float *post;        /* [rows, hc] */
    float *comb;        /* [rows, hc, hc] */
    const hd_act *x;    /* [rows, hc, cols] */
    const float *fn;    /* [2 * hc + hc * hc, hc * cols] */
    const float *scale; /* [3] */
    const float *base;  /* [2 * hc + hc * hc] */
    int32_t rows, cols, hc, iters;
    float norm_eps, eps;
} hd_hc_pre_args;

/* x[r, j, :] = post[r, j] * y[r, :] + sum_i comb[r, i, j] * x[r, i, :], in place */
typedef struct hd_hc_post_args {
    hd_act *x;       /* [rows, hc, cols] */
    const hd_act *y; /* [rows, cols] */
    const float *post, *comb;
    int32_t rows, cols, hc;
} hd_hc_post_args;

/* The streams into one row for the head; no way back. models.md 2.8, HC_head */
typedef struct hd_hc_head_args {
    hd_act *out;        /* [rows, cols] */
    const hd_act *x;    /* [rows, hc, cols] */
    const float *fn;    /* [hc, hc * cols] */
    const float *scale; /* [1] */
    const float *base;  /* [hc] */
    int32_t rows, cols, hc;
    float norm_eps, eps;
} hd_hc_head_args;

/* ---- choosing tokens; docs/sampling.md ---- */

enum {
    HD_MAX_TOP_LOGPROBS = 20,
    HD_MAX_DRAFTED = 16, /* drafts of one request in a step */
    HD_TOKEN_NONE = -1,  /* every token was forbidden */
    HD_TOKEN_BROKEN = -2 /* a logit was NaN or +inf: something below is broken */
};

/* value is added to the logit of token id; -inf forbids it. */
typedef struct hd_logit_bias {
    int32_t id;
    float value;
} hd_logit_bias;

/* What one request asks of the sampler. All zero is greedy. The op trusts the numbers: finite,
 * temperature >= 0, top_p and min_p in [0, 1], repetition_penalty >= 0. */
typedef struct hd_sampling {
    uint64_t seed;
    float temperature;        /* 0: greedy */
    float top_p;              /* 0, 1: off */
    float min_p;              /* 0: off */
    float repetition_penalty; /* 0, 1: off; tokens of prompt and output */
    float presence_penalty;   /* 0: off; tokens of the output */
    float frequency_penalty;  /* 0: off; times each occurs in the output */
    int32_t top_k;            /* 0: off */
    int32_t counts_row;       /* of the counts table; see hd_has_penalty() */
    int32_t bias_at, n_bias;  /* its entries of the pool; they add up */
    int32_t ban_at, n_ban;    /* tokens forbidden before position ban_until, as entries of */
    int32_t ban_until;        /* the pool whose values do not count: end tokens, min_tokens */
    int32_t n_top;            /* alternatives to report, <= HD_MAX_TOP_LOGPROBS */
    bool logprob;             /* report the token's own */
    int32_t relaxed_top;      /* see hd_sample_args.draft; either 0: off */
    float relaxed_delta;
} hd_sampling;

/* Whether the row of counts is read at all. */
static inline bool hd_has_penalty(const hd_sampling *p) {
    return (p->repetition_penalty != 0.0f && p->repetition_penalty != 1.0f) ||
           p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f;
}

/* A row of counts: in how many places of the output a token is, and whether the prompt has it.
 * Counts stop at the largest that fits. */
enum { HD_COUNT_OUTPUT = 0x7fff, HD_COUNT_PROMPT = 0x8000 };

/* Zeroes rows clear[..] of counts, then notes token[i] in counts row row[i], as prompt or as
 * output. Negative tokens (a row that failed) are skipped. */
typedef struct hd_count_tokens_args {
    uint16_t *counts;     /* [*, vocab] */
    const int32_t *clear; /* [n_clear] */
    const int32_t *row;   /* [n] */
    const int32_t *token; /* [n] */
    int32_t n_clear, n, vocab;
    bool prompt;
} hd_count_tokens_args;

/* Chooses the token after each row. In this order: bias, bans and mask, penalties, temperature,
 * top-k, top-p, min-p, one draw of Philox keyed by (seed, position). Order ties by lower id.
 * Log-probabilities are those of the raw logits over the whole row, before any of it.
 * Ids from n_ids on have no token: never chosen, never listed. A row that fails says so in its
 * token, and its other outputs are not written; the rest of the step is not touched.
 * Drafts of a request that went in up to row r, input[r - n_drafted[r] + 1 .. r], are not in
 * its counts yet and are counted as output for this row. They are below n_ids.
 *
 * A row with a given token takes it as it is and reports its log-probability in any case. A row
 * with a draft (below n_ids) takes that instead of choosing, if it is one of the relaxed_top
 * largest scores after penalties, before the temperature, and its probability by the softmax of
 * those scores is at least the largest one's less relaxed_delta; it must be allowed. */
typedef struct hd_sample_args {
    int32_t *token;            /* [rows] or HD_TOKEN_NONE, HD_TOKEN_BROKEN */
    float *logprob;            /* [rows] written where asked for */
    int32_t *top_id;           /* [rows, HD_MAX_TOP_LOGPROBS] the first n_top written, most */
    float *top_logprob;        /* probable first; id -1 where the row has no more */
    const float *logits;       /* [rows, vocab] finite or -inf */
    const hd_sampling *params; /* [*] */
    const int32_t *slot;       /* [rows] of params */
    const int32_t *position;   /* [rows] of the token to choose */
    const hd_logit_bias *bias; /* the pool, or NULL */
    const uint32_t *mask;      /* [*, ceil(vocab / 32)] bit set: allowed; or NULL */
    const int32_t *mask_row;   /* [rows] of mask, -1: all allowed; read with mask */
    const uint16_t *counts;    /* [*, vocab] of count_tokens, or NULL without penalties */
    const int32_t *input;      /* [rows] the token that went into each row */
    const int32_t *n_drafted;  /* [rows] see above, or NULL: no drafts */
    const int32_t *given;      /* [rows] below vocab, -1: choose; or NULL: all choose */
    const int32_t *draft;      /* [rows] -1: none; or NULL: none */
    int32_t rows, vocab, n_ids;
} hd_sample_args;

/* Which drafts were right. Request s owns rows first_row[s] .. first_row[s + 1] - 1, at least
 * one; the inputs after the first are its drafts. accepted[s] of them equal the token sampled
 * one row earlier, without a gap, and next[s] is the token sampled after those. */
typedef struct hd_verify_args {
    int32_t *accepted;        /* [n] */
    int32_t *next;            /* [n] */
    const int32_t *token;     /* [rows] of sample */
    const int32_t *input;     /* [rows] */
    const int32_t *first_row; /* [n + 1] */
    int32_t n;
} hd_verify_args;

/* token[r] = the id < n_ids of the largest logit, the lower on a tie, of those that its mask
 * allows. For drafts: always an id, as NaN counts as -inf and id 0 stands in for nothing. */
typedef struct hd_argmax_args {
    int32_t *token;          /* [rows] */
    const float *logits;     /* [rows, vocab] */
    const uint32_t *mask;    /* as in hd_sample_args; NULL: all are allowed */
    const int32_t *mask_row; /* [rows] -1: all */
    int32_t rows, vocab, n_ids;
} hd_argmax_args;

/* ---- steps of a fixed shape; docs/graphs.md ----
 *
 * Such a step has n sequences of 1 + n_drafts rows, those of sequence i from row
 * i * (1 + n_drafts) on, whoever runs: calls follow from the shape alone, everything else is
 * read from device memory. A row or a sequence that is nobody's has token 0 at position 0 and
 * up, in the scratch page. */

/* Where a request stands: the token chosen last, which is not computed yet, and what may
 * follow it. */
typedef struct hd_cursor {
    int32_t position; /* of token */
    int32_t token;
    int32_t draft[HD_MAX_DRAFTED];
} hd_cursor;

/* One sequence of a step, as the host tells it. */
typedef struct hd_step_seq {
    int32_t slot;     /* of its parameters and its cursor */
    int32_t n_drafts; /* that may stand, at most the shape's */
    int32_t room;     /* positions that have pages */
    int32_t fresh; /* it begins at `at`; otherwise at its slot's cursor, and is nobody's if it
                         could leave the room */
    hd_cursor at;
} hd_step_seq;

/* How drafts stand in benchmarks, whatever the model says: at least k + 1 of them with
 * probability least[k], which never grows with k. least[0] 0: the model's own verdict. */
typedef struct hd_acceptance {
    float least[HD_MAX_DRAFTED];
} hd_acceptance;

/* So many drafts on average: the whole number below or above it. */
hd_acceptance hd_acceptance_of(float mean);

/* Rows from cursors. Forced acceptance is drawn by Philox (high word 2) at the position of the
 * first token to choose. */
typedef struct hd_lay_step_args {
    int32_t *token, *pos, *seq, *logit_row; /* [rows] */
    int32_t *live;              /* [rows] 0: nobody's, or a draft that cannot stand */
    int32_t *first_row, *start; /* [n + 1], [n] */
    int32_t *table[2];          /* [n, table_stride] written where nobody's */
    int32_t *slot, *position, *n_drafted, *given; /* [rows] of the sampler */
    int32_t *standing;                            /* [n] drafts that may stand; -1: nobody's */
    int32_t *turn;                                /* [1] 0 and 1 in turn, step by step */
    hd_cursor *cursor;                            /* [*] by slot; fresh ones are written */
    const hd_step_seq *seqs;                      /* [n] */
    const int32_t *n_live;                        /* [1] the first so many are somebody's */
    const hd_sampling *params;
    int32_t scratch_page[2];
    int32_t n, n_drafts, table_stride, idle_slot; /* idle_slot: the sampler's, where nobody's */
    hd_acceptance forced;
} hd_lay_step_args;

/* Which drafts stand; cursors and counts of those with penalties move past them. */
typedef struct hd_settle_step_args {
    int32_t *accepted;   /* [n] drafts that stand; -1: nobody's */
    int32_t *next_token; /* [rows] after each row, 0 behind refused drafts */
    int32_t *wanted;     /* [n] the row of the last token that stands */
    hd_cursor *cursor;
    uint16_t *counts; /* [*, vocab] of count_tokens */
    const hd_step_seq *seqs;
    const int32_t *standing;
    const int32_t *token, *input; /* [rows] chosen by sample; computed */
    const hd_sampling *params;
    int32_t n, n_drafts, vocab;
} hd_settle_step_args;

/* Draft `at` of every sequence into its cursor, and the rows that guess the next one. */
typedef struct hd_lay_draft_args {
    int32_t *draft;                                      /* [n, n_drafts] written at `at` */
    int32_t *token, *next_token, *pos, *seq, *logit_row; /* [n] */
    int32_t *first_row, *start;                          /* [n + 1], [n] */
    hd_cursor *cursor;
    const hd_step_seq *seqs;
    const int32_t *standing;
    const int32_t *guess; /* [n] of argmax */
    int32_t n, n_drafts, at;
} hd_lay_draft_args;

/* Copies between the device and host memory of hd_device_alloc_host(), which the device
 * reaches: to[*turn] = from[*turn], the first `most` bytes, or *bytes of them. Everything is
 * aligned to 16 bytes. A small copy inside a step, where a queued one would cost a pause. */
typedef struct hd_carry_args {
    void *to[2];
    const void *from[2];
    const int32_t *turn;  /* [1] 0 or 1 */
    const int32_t *bytes; /* [1] or NULL */
    int32_t most;
} hd_carry_args;

/* The device's clock in nanoseconds, when everything before is done. */
typedef struct hd_stamp_args {
    int64_t *at;
} hd_stamp_args;

/* What every table has. */
#define HD_COMMON_OP_LIST(X) \
    X(embed)                 \
    X(gather)                \
    X(add)                   \
    X(rms_norm)              \
    X(layer_norm)            \
    X(linear)                \
    X(linear_heads)          \
    X(rope_table)            \
    X(rope)                  \
    X(store)                 \
    X(index_select)          \
    X(attend)                \
    X(compress)              \
    X(route)                 \
    X(permute)               \
    X(linear_grouped)        \
    X(swiglu)                \
    X(combine)               \
    X(hc_pre)                \
    X(hc_post)               \
    X(hc_head)               \
    X(count_tokens)          \
    X(sample)                \
    X(verify)                \
    X(argmax)                \
    X(lay_step)              \
    X(settle_step)           \
    X(lay_draft)             \
    X(carry)                 \
    X(stamp)

/* attend_naive is the CPU's alone, as its gain is, and NULL in other tables. */
#define HD_OP_LIST(X)    \
    HD_COMMON_OP_LIST(X) \
    X(attend_naive)

#define X(op) typedef void hd_##op##_fn(hd_stream *s, const hd_##op##_args *a);
HD_OP_LIST(X)
#undef X

enum { HD_MAX_HC = 16 }; /* hyper-connection streams an op keeps on its stack */

/* How products are made: of the values as they are, in float32, or of narrower numbers near them.
 * CPU: bfloat16 for x, where the processor multiplies it; CUDA: bfloat16 and half precision
 * (docs/numerics.md). */
typedef enum hd_precision { HD_EXACT, HD_FAST } hd_precision;

typedef struct hd_ops {
    const char *name;  /* "ref", "cpu avx512", ... */
    int32_t act_bytes; /* size of one hd_act element */
    hd_precision precision;
#define X(op) hd_##op##_fn *op;
    HD_OP_LIST(X)
#undef X
} hd_ops;

/* Element `at` of an activation array. */
static inline hd_act *hd_act_at(const hd_ops *ops, hd_act *x, int64_t at) {
    return (hd_act *)((uint8_t *)x + at * ops->act_bytes);
}

/* What the ops of a backend are opened with. Zero is the default everywhere. */
typedef struct hd_ops_options {
    hd_cpu_options cpu;
    hd_precision precision; /* "ref" has HD_EXACT only */
    bool
        no_batch_invariance; /* of "cuda" with HD_FAST: many rows at once may be multiplied in an
                                 order of their number's own, and from narrower numbers
                                 (docs/numerics.md) */
    const char *needs_cpu;   /* what is asked for and no GPU does, "mla naive"; NULL: nothing */
    hd_err *no_gpu;          /* NULL, or gets why "auto" took the CPU */
} hd_ops_options;

/* By name, "exact" or "fast"; NULL is the default. */
hd_status hd_precision_of(hd_precision *out, const char *name, hd_err *err);

/* How MLA's attention is computed over long prompts (docs/numerics.md): over the latents themselves,
 * or over keys and values made from them. */
typedef enum hd_mla_form { HD_MLA_ABSORBED, HD_MLA_NAIVE } hd_mla_form;

/* By name, "absorbed" or "naive"; NULL is the default. */
hd_status hd_mla_form_of(hd_mla_form *out, const char *name, hd_err *err);

/* Each fills every entry: the reference first, then what cpu_flags (base/cpu.h) allow. */
void hd_ops_init_ref(hd_ops *t);
void hd_ops_init_cpu(hd_ops *t, uint32_t cpu_flags, hd_precision precision);
void hd_ops_init_cuda(hd_ops *t, hd_precision precision, bool library);

/* Loads the library that a table with `library` needs, and keeps it with the device. Its products use
 * the scratch of the stream that they are queued on. The two above are in builds with HD_CUDA. */
hd_status hd_ops_open_library(hd_device *d, hd_err *err);

/* Opens the device of a backend, "ref", "cpu" or "cuda", and fills the table of its ops. "auto" is
 * "cuda" where that can be opened with these options, else "cpu". On failure *d may be open: close
 * it. */
hd_status hd_ops_open(hd_ops *t, hd_device **d, const char *backend,
                      const hd_ops_options *options, hd_err *err);

/* Scratch per worker that the tables need: max_keys bounds window + entries that one row
 * may attend to or score, max_cols the widest row of any op (the vocabulary where sampled). */
size_t hd_ops_scratch_bytes(int32_t max_keys, int32_t max_cols);

HD_END_C

#endif
