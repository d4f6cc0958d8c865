/* placement.c - applies a parallel config to the tensors of a schema: one slice per tensor. */
#include "weights/placement.h"

#include <stdlib.h>

#include "base/checked.h"

/* One tensor that is being sharded. */
typedef struct cutter {
    const hd_plan_args *args;
    const hd_tensor_decl *decl;
    hd_stored_format format;
    hd_slice *out;
    hd_err *err;
} cutter;

/* Rows are cut anywhere: shard.c repeats the scales of a block that is cut. */
static hd_status take_rows(const cutter *c, hd_extent part) {
    c->out->row0 = part.first;
    c->out->rows = part.n;
    return HD_OK;
}

/* `by`: the config's word for the number of parts. */
static hd_status take_columns(const cutter *c, hd_extent part, const char *by) {
    const int32_t end = part.first + part.n, cols = c->decl->cols;
    const int32_t block = c->format.scale_type == HD_NONE ? 1 : c->format.block_cols;
    if (part.first % block || (end % block && end != cols)) {
        return HD_FAIL(c->err, HD_EINVAL,
                       "%s: columns %d to %d of %d, by %s: that cuts through its quantization "
                       "blocks of %d",
                       c->decl->name, part.first, end - 1, cols, by, block);
    }
    const int32_t bits = hd_dtype_bits(c->format.type);
    if ((int64_t)part.first * bits % 8 || (int64_t)end * bits % 8) {
        return HD_FAIL(c->err, HD_EINVAL,
                       "%s: columns %d to %d of %d, by %s: that cuts through a byte",
                       c->decl->name, part.first, end - 1, cols, by);
    }
    c->out->col0 = part.first;
    c->out->cols = part.n;
    return HD_OK;
}

/* The second GEMM of a block: rows `out`, or with sum_in_ranks columns `in`. */
static hd_status take_out(const cutter *c, hd_extent out, hd_extent in, const char *by) {
    return c->args->parallel->sum_in_ranks ? take_columns(c, in, by) : take_rows(c, out);
}

/* The part of n rows or columns, as many for each head, that belongs to the rank's heads. */
static hd_extent part_of_heads(const cutter *c, const hd_shard *shard, int32_t n) {
    const int32_t each = n / c->args->spec->n_heads;
    return (hd_extent){shard->head0 * each, shard->n_heads * each};
}

static hd_extent part_of_groups(const cutter *c, const hd_shard *shard) {
    const int32_t each = c->args->spec->o_rank;
    return (hd_extent){shard->o_group0 * each, shard->o_groups * each};
}

static hd_extent attention_columns(const cutter *c, const hd_shard *shard) {
    if (c->args->spec->o_groups) return part_of_groups(c, shard);
    return part_of_heads(c, shard, c->decl->cols);
}

static hd_status check_heads(const cutter *c, const hd_parallel_config *l) {
    const hd_model_spec *s = c->args->spec;
    const int32_t parts = hd_parallel_head_parts(l),
                  units = s->o_groups ? s->o_groups : s->n_heads;
    if (parts <= units) return HD_OK;
    return HD_FAIL(c->err, HD_EINVAL, "%s: %d %s cannot be shared by tp %d", c->decl->name,
                   units, s->o_groups ? "output groups" : "heads", parts);
}

/* Every rank needs a part of at least one row. */
static hd_status check_part(const cutter *c, int32_t n, int32_t parts, const char *by) {
    if (parts <= n) return HD_OK;
    return HD_FAIL(c->err, HD_EINVAL, "%s: %d %s cannot be shared by %s %d", c->decl->name, n,
                   c->args->parallel->sum_in_ranks ? "columns" : "rows", by, parts);
}

static hd_status check_held(const cutter *c, const hd_shard *shard) {
    const int32_t parts = c->args->parallel->dwdp;
    if (parts <= shard->n_experts) return HD_OK;
    return HD_FAIL(c->err, HD_EINVAL, "%s: %d experts cannot be shared by dwdp %d",
                   c->decl->name, shard->n_experts, parts);
}

static hd_status shard_expert(const cutter *c, const hd_shard *shard) {
    const hd_parallel_config *l = c->args->parallel;
    const hd_model_spec *s = c->args->spec;
    const int32_t n = s->route.n_experts, slots = n + l->redundant;
    if (slots % l->ep != 0 || shard->n_experts > n) {
        return HD_FAIL(c->err, HD_EINVAL, "%s: %d experts cannot be shared by ep %d",
                       c->decl->name, slots, l->ep);
    }
    HD_TRY(check_held(c, shard));
    HD_TRY(check_part(c, hd_min_i32(s->moe_inter, s->hidden), l->etp, "etp"));
    HD_TRY(c->decl->role == HD_EXPERT_DOWN
               ? take_out(c, shard->moe_out, shard->moe_inter, "etp")
               : take_rows(c, shard->moe_inter));
    const int32_t slot = hd_shard_slot(shard, c->decl->expert, n);
    if (slot < 0 || !hd_shard_holds(shard->held, slot, shard->n_experts)) {
        *c->out = (hd_slice){0};
    }
    return HD_OK;
}

static hd_status shard_mlp(const cutter *c, const hd_shard *shard) {
    const hd_tensor_decl *d = c->decl;
    const bool down = d->shard_axis == HD_SHARD_DENSE_OUT;
    const bool shared =
        d->role == HD_SHARED_GATE || d->role == HD_SHARED_UP || d->role == HD_SHARED_DOWN;
    const hd_extent inter = shared ? shard->shared_inter : shard->dense_inter;
    HD_TRY(check_part(c, hd_min_i32(d->rows, d->cols), shard->parallel.dense_tp, "dense_tp"));
    return down ? take_out(c, shard->dense_out, inter, "dense_tp") : take_rows(c, inter);
}

static hd_status shard_tensor(const cutter *c, const hd_shard *shard) {
    const hd_parallel_config *l = c->args->parallel;
    const hd_tensor_decl *d = c->decl;
    *c->out = (hd_slice){.rows = d->rows, .cols = d->cols};
    switch (d->shard_axis) {
    case HD_SHARD_NONE:
        return HD_OK;
    case HD_SHARD_HEAD_ROWS:
        HD_TRY(check_heads(c, l));
        return take_rows(c, part_of_heads(c, shard, d->rows));
    case HD_SHARD_HEAD_VECTOR:
        HD_TRY(check_heads(c, l));
        return take_columns(c, part_of_heads(c, shard, d->cols), "tp");
    case HD_SHARD_GROUP_ROWS:
        HD_TRY(check_heads(c, l));
        return take_rows(c, part_of_groups(c, shard));
    case HD_SHARD_ATTENTION_OUT:
        HD_TRY(check_heads(c, l));
        return take_out(c, shard->o_out, attention_columns(c, shard), "tp");
    case HD_SHARD_DENSE_ROWS:
    case HD_SHARD_DENSE_OUT:
        return shard_mlp(c, shard);
    case HD_SHARD_VOCAB_ROWS:
        HD_TRY(check_part(c, d->rows, l->head_tp, "head_tp"));
        return take_rows(c, (hd_extent){shard->vocab0, shard->vocab});
    case HD_SHARD_EXPERT:
        return shard_expert(c, shard);
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
    out->n = a->schema->n;
    out->shard = hd_shard_of(a->parallel, a->rank, a->spec);
    if (a->no_experts) out->shard.held = (hd_extent){0};
    out->slices = calloc((size_t)out->n, sizeof *out->slices);
    if (!out->slices) {
        return HD_FAIL(err, HD_ENOMEM, "no memory to plan %d tensors", out->n);
    }
    for (int32_t i = 0; i < out->n; i++) {
        const hd_tensor_decl *d = &a->schema->decls[i];
        cutter c = {.args = a, .decl = d, .out = &out->slices[i], .err = err};
        if (d->duplicate || d->layer >= a->spec->n_layers + a->n_mtp) continue;
        c.format = a->formats ? a->formats[i] : hd_declared_format(a->spec, d);
        hd_status st = shard_tensor(&c, &out->shard);
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
