/* attention_back.h - backward operators of attention: see backward.h. */
#ifndef HD_OPS_ATTENTION_BACK_H
#define HD_OPS_ATTENTION_BACK_H

#include "ops/types.h"

HD_BEGIN_C

/* Gradients of attention, MLA absorbed; docs/training.md. Its sequences are complete: row
 * first_row[s] + p is position p of sequence s. The keys' gradients are sums over the rows
 * that see a key, in ascending order. */
typedef struct hd_attention_back_args {
    float *dq;       /* [rows, heads, k_dim] */
    float *drecent;  /* [rows, k_dim] at the row of a key's position; read with window */
    float *dentries; /* [n entries, k_dim]: entry e of sequence s is row first_entry[s] + e */
    float *dsink;    /* [heads] */
    float *lse, *delta; /* [rows, heads] for the operator's own use */
    hd_rows g, out;     /* [rows, heads, v_dim] */
    hd_rows q;
    hd_paged recent, entries;
    const int32_t *selected; /* as of attention, ascending */
    const float *sink;
    const int32_t *first_entry; /* [seqs.n]; read with ratio */
    hd_seqs seqs;
    int32_t rows, heads, k_dim, v_dim, window, ratio, n_selected; /* rows of all sequences */
    float scale;
    float *parts; /* as of hd_row_sums, for dsink */
    int64_t n_parts;
} hd_attention_back_args;

/* Gradients of naive MLA attention, whose keys and values are made of the latents, one per head: key =
 * [made nope | rotated], value = the rest of made. Sequences are complete, as of attention_back; sums
 * are in ascending order of rows and of keys. */
typedef struct hd_attention_naive_back_args {
    float *dq;        /* [rows, heads, nope_dim + rope_dim] */
    float *dmade;     /* [rows, heads, nope_dim + v_dim] */
    hd_rows drotated; /* [rows, rope_dim] the sum over heads */
    /* for the operator's own use: [rows, heads, rope_dim], [rows, heads] */
    float *part, *lse, *delta;
    hd_rows g, out;    /* [rows, heads, v_dim] */
    hd_rows q;         /* as dq, rotated */
    const float *made; /* as dmade */
    hd_rows rotated;   /* [rows, rope_dim] of the latents */
    hd_seqs seqs;
    int32_t rows, heads, nope_dim, rope_dim, v_dim; /* rows of all sequences */
    float scale;
} hd_attention_naive_back_args;

HD_END_C

#endif
