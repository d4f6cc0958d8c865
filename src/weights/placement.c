/* placement.c - applies a parallel config to the tensors of a schema: one slice per tensor. */
#include "weights/placement.h"

#include <stdlib.h>

/* One tensor that is being sharded. */
typedef struct cutter {
    const hd_plan_args *args;
    const hd_tensor_decl *decl;
    hd_stored_format format;
    hd_slice *out;
    hd_err *err;
} cutter;

/* Sets this rank's slice to part `part` of `parts` equal parts of one side. units: number of
 * heads, groups or blocks in the side that must not be divided; by: the config's word for
 * parts. */
static hd_status shard_along(const cutter *c, bool rows, int32_t units, const char *unit,
                             int32_t part, int32_t parts, const char *by) {
    const char *side = rows ? "rows" : "columns";
    int32_t n = rows ? c->decl->rows : c->decl->cols;
    int32_t block = rows ? c->format.block_rows : c->format.block_cols;
    int32_t size = n / parts;
    if (units % parts != 0) {
        return HD_FAIL(c->err, HD_EINVAL, "%s: %d %s cannot be shared by %s %d", c->decl->name,
                       units, unit, by, parts);
    }
    if (parts > 1 && c->format.scale_type != HD_NONE && size % block != 0) {
        return HD_FAIL(c->err, HD_EINVAL,
                       "%s: %d %s over %s %d are %d each: that cuts through its quantization "
                       "blocks of %d",
                       c->decl->name, n, side, by, parts, size, block);
    }
    if (parts > 1 && !rows && (int64_t)size * hd_dtype_bits(c->format.type) % 8 != 0) {
        return HD_FAIL(c->err, HD_EINVAL,
                       "%s: %d columns over %s %d are %d each: that cuts through a byte",
                       c->decl->name, n, by, parts, size);
    }
    if (rows) {
        c->out->row0 = part * size;
        c->out->rows = size;
    } else {
        c->out->col0 = part * size;
        c->out->cols = size;
    }
    return HD_OK;
}

static hd_status shard_expert(const cutter *c, const hd_shard *shard,
                              const hd_rank_coords *at) {
    const hd_parallel_config *l = c->args->parallel;
    const int32_t n = c->args->spec->route.n_experts, slots = n + l->redundant;
    if (slots % l->ep != 0 || shard->n_experts > n) {
        return HD_FAIL(c->err, HD_EINVAL, "%s: %d experts cannot be shared by ep %d",
                       c->decl->name, slots, l->ep);
    }
    bool rows = c->decl->role != HD_EXPERT_DOWN;
    int32_t inter = c->args->spec->moe_inter;
    HD_TRY(shard_along(c, rows, inter, rows ? "rows" : "columns", at->etp, l->etp, "etp"));
    if (hd_shard_slot(shard, c->decl->expert, n) < 0) *c->out = (hd_slice){0};
    return HD_OK;
}

static hd_status shard_tensor(const cutter *c, const hd_shard *shard,
                              const hd_rank_coords *at) {
    const hd_parallel_config *l = c->args->parallel;
    const hd_model_spec *s = c->args->spec;
    const hd_tensor_decl *d = c->decl;
    const int32_t heads = hd_parallel_head_parts(l);
    *c->out = (hd_slice){.rows = d->rows, .cols = d->cols};
    switch (d->shard_axis) {
    case HD_SHARD_NONE:
        return HD_OK;
    case HD_SHARD_HEAD_ROWS:
        return shard_along(c, true, s->n_heads, "heads", at->tp % heads, heads, "tp");
    case HD_SHARD_HEAD_COLS:
        return shard_along(c, false, s->n_heads, "heads", at->tp % heads, heads, "tp");
    case HD_SHARD_GROUP_ROWS:
        return shard_along(c, true, s->o_groups, "output groups", at->tp % heads, heads, "tp");
    case HD_SHARD_GROUP_COLS:
        return shard_along(c, false, s->o_groups, "output groups", at->tp % heads, heads, "tp");
    case HD_SHARD_DENSE_ROWS:
        return shard_along(c, true, d->rows, "rows", at->dense, l->dense_tp, "dense_tp");
    case HD_SHARD_DENSE_COLS:
        return shard_along(c, false, d->cols, "columns", at->dense, l->dense_tp, "dense_tp");
    case HD_SHARD_VOCAB_ROWS:
        return shard_along(c, true, d->rows, "rows", at->head, l->head_tp, "head_tp");
    case HD_SHARD_EXPERT:
        return shard_expert(c, shard, at);
    }
    return HD_FAIL(c->err, HD_EINVAL, "%s: unknown kind of cut %d", d->name,
                   (int)d->shard_axis);
}

static hd_status check_args(const hd_plan_args *a, hd_err *err) {
    HD_TRY(hd_parallel_check(a->parallel, err));
    int32_t world = hd_parallel_world(a->parallel);
    if (a->rank < 0 || a->rank >= world) {
        return HD_FAIL(err, HD_EINVAL, "layout: rank %d is outside a world of %d", a->rank,
                       world);
    }
    if (a->n_mtp < 0 || a->n_mtp > a->spec->n_mtp) {
        return HD_FAIL(err, HD_EINVAL, "layout: %d MTP layers asked for, the model has %d",
                       a->n_mtp, a->spec->n_mtp);
    }
    return HD_OK;
}

hd_status hd_plan_open(hd_plan *out, const hd_plan_args *a, hd_err *err) {
    *out = (hd_plan){0};
    HD_TRY(check_args(a, err));
    const hd_rank_coords at = hd_parallel_coords(a->parallel, a->rank);
    out->n = a->schema->n;
    out->shard = hd_shard_of(a->parallel, a->rank, a->spec);
    out->slices = calloc((size_t)out->n, sizeof *out->slices);
    if (!out->slices) {
        return HD_FAIL(err, HD_ENOMEM, "no memory to plan %d tensors", out->n);
    }
    for (int32_t i = 0; i < out->n; i++) {
        const hd_tensor_decl *d = &a->schema->decls[i];
        cutter c = {.args = a, .decl = d, .out = &out->slices[i], .err = err};
        if (d->duplicate || d->layer >= a->spec->n_layers + a->n_mtp) continue;
        c.format = a->formats ? a->formats[i] : hd_declared_format(a->spec, d);
        hd_status st = shard_tensor(&c, &out->shard, &at);
        if (st != HD_OK) {
            hd_plan_close(out);
            return st;
        }
        hd_summary_add(&out->held, a->spec, d, c.out->rows, c.out->cols, &c.format);
    }
    return HD_OK;
}

void hd_plan_close(hd_plan *p) {
    free(p->slices);
    *p = (hd_plan){0};
}
