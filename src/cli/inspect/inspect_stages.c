/* inspect_stages.c - records the forward pass of a config's model: runs one step of the model
 * with tensors that have shapes and no values, on operators that only report their calls. */
#include "cli/inspect/inspect_stages.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kv/kv.h"
#include "model/model.h"

typedef struct rig {
    stage_list *list;
    const hd_model_spec *spec;
    hd_weights *weights;
    hd_device *device;
    hd_stream *stream;
    hd_ops host, ops; /* host: only its device and its size of an activation are used */
    hd_probe probe;
    hd_model *model;
    hd_kv *kv;
    hd_batch batch;
    int32_t n_layer_blocks; /* blocks of layers begun so far: two per layer */
    bool failed;            /* no memory for the list */
} rig;

/* ---- recording ---- */

static bool is_layer(const stage_block *b) {
    return strcmp(b->part, "step") != 0 && strcmp(b->part, "draft") != 0;
}

/* Returns the n-th element of a growing array, or NULL without memory. */
static void *slot_of(void **array, int32_t n, int32_t *cap, size_t bytes) {
    if (n == *cap) {
        const int32_t more = *cap ? 2 * *cap : 64;
        void *larger = realloc(*array, (size_t)more * bytes);
        if (!larger) return NULL;
        *array = larger;
        *cap = more;
    }
    return (char *)*array + (size_t)n * bytes;
}

static stage_op *add_op(rig *r, const char *stage) {
    stage_list *l = r->list;
    stage_op *op = slot_of((void **)&l->ops, l->n_ops, &l->ops_cap, sizeof *l->ops);
    if (!op) {
        r->failed = true;
        return NULL;
    }
    *op = (stage_op){.stage = stage};
    l->n_ops++;
    l->blocks[l->n_blocks - 1].n++;
    return op;
}

static bool same_tensors(const hd_op_tensor *a, const hd_op_tensor *b) {
    for (; a->name && b->name; a++, b++) {
        if (strcmp(a->name, b->name) != 0 || a->n_dims != b->n_dims ||
            memcmp(a->dim, b->dim, sizeof a->dim) != 0) {
            return false;
        }
    }
    return !a->name && !b->name;
}

static bool same_attributes(const hd_op_attribute *a, const hd_op_attribute *b) {
    for (; a->name && b->name; a++, b++) {
        if (strcmp(a->name, b->name) != 0 || a->value != b->value) return false;
    }
    return !a->name && !b->name;
}

static bool same_op(const stage_op *a, const stage_op *b) {
    if (strcmp(a->stage, b->stage) != 0 || !a->call.op != !b->call.op) return false;
    if (a->role != b->role || a->rows != b->rows || a->cols != b->cols) return false;
    return !a->call.op ||
           (strcmp(a->call.op, b->call.op) == 0 && same_tensors(a->call.in, b->call.in) &&
            same_tensors(a->call.out, b->call.out) &&
            same_attributes(a->call.attribute, b->call.attribute));
}

static bool same_block(const stage_list *l, const stage_block *a, const stage_block *b) {
    if (strcmp(a->part, b->part) != 0 || a->n != b->n) return false;
    for (int32_t i = 0; i < a->n; i++) {
        if (!same_op(&l->ops[a->first_op + i], &l->ops[b->first_op + i])) return false;
    }
    return true;
}

/* Ends the last block: one that an earlier layer has already only adds its layer there. */
static void end_block(rig *r) {
    stage_list *l = r->list;
    if (l->n_blocks == 0) return;
    stage_block *last = &l->blocks[l->n_blocks - 1], *b = l->blocks;
    if (!is_layer(last)) {
        while (last->n > 0 && !l->ops[l->n_ops - 1].call.op) { /* the sampler's stage */
            last->n--;
            l->n_ops--;
        }
        return;
    }
    while (!same_block(l, b, last)) b++;
    b->layers[b->n_layers++] = (r->n_layer_blocks - 1) / 2;
    if (b == last) return;
    free(last->layers);
    l->n_ops = last->first_op;
    l->n_blocks--;
}

static void begin_block(rig *r, const char *part) {
    stage_list *l = r->list;
    stage_block *b =
        slot_of((void **)&l->blocks, l->n_blocks, &l->blocks_cap, sizeof *l->blocks);
    const size_t layers = (size_t)(r->spec->n_layers + r->spec->n_mtp);
    int32_t *numbers = calloc(layers, sizeof *numbers);
    if (!b || !numbers) {
        r->failed = true;
        free(numbers);
        return;
    }
    *b = (stage_block){.part = part, .first_op = l->n_ops, .layers = numbers};
    l->n_blocks++;
    r->n_layer_blocks += is_layer(b);
}

/* hd_probe.at: before each stage, and before the start and the end of a pass. */
static void at_stage(void *ctx, const char *part, const char *stage) {
    rig *r = ctx;
    stage_list *l = r->list;
    if (r->failed) return;
    if (l->n_blocks == 0 || strcmp(l->blocks[l->n_blocks - 1].part, part) != 0) {
        end_block(r);
        begin_block(r, part);
    }
    if (!r->failed) add_op(r, stage);
}

static const char *role_in(const rig *r, int32_t layer, const hd_weight *w) {
    for (int k = 0; k < HD_N_ROLES; k++) {
        const hd_role role = (hd_role)k;
        const hd_expert_table *experts = hd_weights_experts(r->weights, layer, role);
        if (w == hd_weights_matrix(r->weights, layer, role) ||
            (experts && w == &experts->shape)) {
            return hd_role_name(role);
        }
    }
    return NULL;
}

static const char *role_of(const rig *r, const hd_weight *w) {
    const int32_t layer = r->n_layer_blocks > 0 ? (r->n_layer_blocks - 1) / 2 : 0;
    const char *name = role_in(r, layer, w);
    if (!name) name = role_in(r, HD_GLOBAL, w);
    for (int32_t i = 0; !name && i < r->spec->n_mtp; i++) {
        name = role_in(r, r->spec->n_layers + i, w);
    }
    if (name) return name;
    /* the row of the confidence head is multiplied in two parts */
    return w->rows == 1 ? hd_role_name(HD_DSPARK_CONFIDENCE) : "";
}

/* The operators of a stage: the first one takes the place that the stage has. */
static void at_op(void *ctx, const hd_op_call_shape *call) {
    rig *r = ctx;
    if (r->failed) return;
    stage_op *op = &r->list->ops[r->list->n_ops - 1];
    if (op->call.op) op = add_op(r, op->stage);
    if (!op) return;
    op->call = *call;
    op->call.w = NULL;
    if (!call->w) return;
    op->role = role_of(r, call->w);
    op->rows = call->w->rows;
    op->cols = call->w->cols;
    op->type = call->w->type;
}

/* ---- running ---- */

static hd_status open_rig(rig *r, hd_err *err) {
    const hd_dummy_options shapes = {.shapes_only = true};
    const hd_ops_options one_thread = {.cpu = {.n_threads = 1}};
    const hd_kv_options kv = {
        .n_pages = {1, 1}
    };
    const hd_kv_shape pages = hd_kv_shape_of(r->spec);
    const hd_model_limits limits = {.rows = STAGE_ROWS,
                                    .logits = hd_max_i32(STAGE_LOGITS, r->spec->dspark.block),
                                    .positions = pages.page_tokens};
    const hd_batch_limits batch = {STAGE_ROWS, 1, 1};
    HD_TRY(hd_weights_open_dummy(&r->weights, r->spec, &shapes, err));
    HD_TRY(hd_ops_open(&r->host, &r->device, "ref", &one_thread, err));
    HD_TRY(hd_stream_open(&r->stream, r->device, err));
    hd_op_trace_init(&r->ops, r->host.act_type, at_op, r);
    r->probe = (hd_probe){r, at_stage};
    const hd_model_env env = {.spec = r->spec,
                              .weights = r->weights,
                              .ops = &r->ops,
                              .device = r->device,
                              .stream = r->stream,
                              .probe = &r->probe};
    HD_TRY(hd_model_open(&r->model, &env, &limits, err));
    HD_TRY(
        hd_kv_open(&r->kv, r->spec, r->spec->n_layers + r->spec->n_mtp, r->device, &kv, err));
    return hd_batch_open(&r->batch, &batch, r->device, err);
}

static void close_rig(rig *r) {
    hd_batch_close(&r->batch);
    hd_kv_close(r->kv);
    hd_model_close(r->model);
    hd_stream_close(r->stream);
    hd_device_close(r->device);
    hd_weights_close(r->weights);
}

static void draft_block(rig *r) {
    static const int32_t tokens[HD_MAX_DRAFTS] = {0}, pages[1] = {0};
    const int32_t block = r->spec->dspark.block;
    hd_model_absorb(r->model, r->kv, &r->batch);
    hd_batch_reset(&r->batch);
    hd_batch_add(&r->batch,
                 &(hd_batch_seq){
                     .tokens = tokens, .n = block, .pages = {pages, pages},
                             .n_pages = 1
    });
    hd_batch_make_block(&r->batch, block);
    hd_batch_upload(&r->batch, r->stream);
    hd_model_draft_block(r->model, r->kv, &r->batch);
    hd_model_draft_place(r->model, 0, r->batch.device.tokens, 1, 1);
}

static hd_status run_pass(rig *r, hd_err *err) {
    static const int32_t tokens[STAGE_ROWS] = {0}, pages[1] = {0};
    hd_batch_add(&r->batch, &(hd_batch_seq){
                                .tokens = tokens,
                                .n = STAGE_ROWS,
                                .n_logits = STAGE_LOGITS,
                                .pages = {pages, pages},
                                .n_pages = 1
    });
    hd_batch_upload(&r->batch, r->stream);
    hd_model_step(r->model, r->kv, &r->batch);
    if (r->spec->drafter == HD_DRAFTER_MTP) hd_model_draft(r->model, r->kv, &r->batch, false);
    if (r->spec->drafter == HD_DRAFTER_DSPARK) draft_block(r);
    end_block(r);
    return r->failed ? HD_FAIL(err, HD_ENOMEM, "no memory for a list of operators")
                     : hd_stream_sync(r->stream, err);
}

hd_status stages_open(stage_list *out, const hd_model_spec *spec, hd_err *err) {
    *out = (stage_list){0};
    rig r = {.list = out, .spec = spec};
    hd_status st = open_rig(&r, err);
    if (st == HD_OK) st = run_pass(&r, err);
    close_rig(&r);
    return st;
}

void stages_close(stage_list *l) {
    for (int32_t i = 0; i < l->n_blocks; i++) free(l->blocks[i].layers);
    free(l->blocks);
    free(l->ops);
    *l = (stage_list){0};
}
