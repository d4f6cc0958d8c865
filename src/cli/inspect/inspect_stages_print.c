/* inspect_stages_print.c - prints the list of stages: a table per block, or one JSON object. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "cli/inspect/inspect_stages.h"

enum { STAGE = 10, OP = 14, MARGIN = 2 + STAGE + 1 + OP + 1, WIDTH = 98 };

typedef struct text {
    char s[160];
} text;

static void append(text *t, const char *s) {
    const size_t used = strlen(t->s);
    snprintf(t->s + used, sizeof t->s - used, "%s", s);
}

static void append_int(text *t, int32_t n) {
    char digits[16];
    snprintf(digits, sizeof digits, "%d", n);
    append(t, digits);
}

/* ---- what both formats say ---- */

/* Length i of a tensor: "n", "n*6", "m", "2048", or "*" for any length. */
static text length_of(const hd_op_tensor *t, int32_t i) {
    const int32_t n = t->dim[i];
    text out = {""};
    if (n == HD_ANY_LENGTH) {
        append(&out, "*");
    } else if (i > 0 || !t->by_row) {
        append_int(&out, n);
    } else if (n % STAGE_ROWS != 0) {
        append(&out, "m");
    } else {
        append(&out, "n");
        if (n == STAGE_ROWS) return out;
        append(&out, "*");
        append_int(&out, n / STAGE_ROWS);
    }
    return out;
}

/* "start", "head" for the parts "step" and "draft", whose only stage says more. */
static text title_of(const stage_list *l, const stage_block *b) {
    text out = {""};
    append(&out, b->part);
    if (b->n_layers == 0 && b->n > 0) {
        append(&out, " ");
        append(&out, l->ops[b->first_op].stage);
    }
    return out;
}

/* ---- text ---- */

/* Returns how many layers from number i on follow at the same distance; an MTP layer stands
 * alone. */
static int32_t range_of(const stage_block *b, int32_t i, int32_t n_layers) {
    int32_t end = i + 1;
    while (end < b->n_layers && b->layers[end] < n_layers &&
           b->layers[end] - b->layers[end - 1] == b->layers[i + 1] - b->layers[i]) {
        end++;
    }
    return end - i;
}

/* ": layers 0, 3-26, MTP 27"; ": layers 2-42 by 2" */
static void print_layers(const stage_block *b, const hd_model_spec *spec) {
    const char *before = b->n_layers > 1 ? ": layers " : ": layer ";
    const char *drafter = spec->drafter == HD_DRAFTER_DSPARK ? "DSpark " : "MTP ";
    for (int32_t i = 0; i < b->n_layers;) {
        const int32_t n = range_of(b, i, spec->n_layers), first = b->layers[i];
        printf("%s%s%d", before, first < spec->n_layers ? "" : drafter, first);
        if (n > 1) {
            const int32_t by = b->layers[i + 1] - first;
            printf("-%d", b->layers[i + n - 1]);
            if (by > 1) printf(" by %d", by);
        }
        before = ", ";
        i += n;
    }
}

/* The only tensor of a list has no name. */
static void add_tensors(text *out, const hd_op_tensor *list) {
    for (const hd_op_tensor *t = list; t->name; t++) {
        if (t != list) append(out, ", ");
        if (list[1].name) append(out, t->name);
        append(out, list[1].name ? " [" : "[");
        for (int32_t i = 0; i < t->n_dims; i++) {
            if (i > 0) append(out, ", ");
            append(out, length_of(t, i).s);
        }
        append(out, "]");
    }
}

static text inputs_of(const stage_op *op) {
    text out = {""};
    add_tensors(&out, op->call.in);
    if (!op->role) return out;
    append(&out, ", ");
    append(&out, op->role);
    append(&out, " [");
    append_int(&out, op->rows);
    append(&out, ", ");
    append_int(&out, op->cols);
    append(&out, "]");
    return out;
}

static text outputs_of(const stage_op *op) {
    text out = {""};
    if (op->call.out[0].name) append(&out, "-> ");
    add_tensors(&out, op->call.out);
    for (const hd_op_attribute *a = op->call.attribute; a->name; a++) {
        append(&out, a == op->call.attribute ? "; " : ", ");
        append(&out, a->name);
        if (!a->value) continue;
        append(&out, " ");
        append_int(&out, a->value);
    }
    return out;
}

static void print_op(const stage_op *op, bool first_of_stage) {
    const char *stage = first_of_stage ? op->stage : "";
    if (!op->call.op) {
        printf("  %-*s -\n", STAGE, stage);
        return;
    }
    const text in = inputs_of(op), out = outputs_of(op);
    const bool fits = MARGIN + strlen(in.s) + 1 + strlen(out.s) <= WIDTH;
    printf("  %-*s %-*s %s", STAGE, stage, OP, op->call.op, in.s);
    if (fits) {
        printf(" %s\n", out.s);
    } else {
        printf("\n%*s%s\n", MARGIN + 2, "", out.s);
    }
}

void stages_print_text(const stage_list *l, const hd_model_spec *spec) {
    printf("%s: one step as stages and operators, with one rank\n",
           hd_family_name(spec->family));
    printf("n: rows of the step; m: rows that need logits; *: any length\n");
    for (int32_t i = 0; i < l->n_blocks; i++) {
        const stage_block *b = &l->blocks[i];
        printf("\n%s", title_of(l, b).s);
        print_layers(b, spec);
        printf("\n");
        for (int32_t k = 0; k < b->n; k++) {
            const stage_op *op = &l->ops[b->first_op + k];
            print_op(op, k == 0 || strcmp(op[-1].stage, op->stage) != 0);
        }
    }
}

/* ---- JSON ---- */

/* Packers return NULL without memory, and take NULL values as failures. */
static json_t *tensors_json(const hd_op_tensor *list) {
    json_t *array = json_array();
    for (const hd_op_tensor *t = list; t->name; t++) {
        json_t *shape = json_array();
        for (int32_t i = 0; i < t->n_dims; i++) {
            const bool number = t->dim[i] != HD_ANY_LENGTH && (i > 0 || !t->by_row);
            json_array_append_new(shape, number ? json_integer(t->dim[i])
                                                : json_string(length_of(t, i).s));
        }
        json_array_append_new(array, json_pack("{s:s, s:o}", "name", t->name, "shape", shape));
    }
    return array;
}

static json_t *matrix_json(const stage_op *op) {
    if (!op->role) return json_null();
    return json_pack("{s:s, s:[i, i], s:s}", "role", op->role, "shape", op->rows, op->cols,
                     "dtype", hd_dtype_name(op->type));
}

static json_t *op_json(const stage_op *op) {
    if (!op->call.op) return json_pack("{s:s, s:n}", "stage", op->stage, "op");
    json_t *attributes = json_object();
    for (const hd_op_attribute *a = op->call.attribute; a->name; a++) {
        json_object_set_new(attributes, a->name,
                            a->value ? json_integer(a->value) : json_true());
    }
    return json_pack("{s:s, s:s, s:o, s:o, s:o, s:o}", "stage", op->stage, "op", op->call.op,
                     "matrix", matrix_json(op), "inputs", tensors_json(op->call.in), "outputs",
                     tensors_json(op->call.out), "attributes", attributes);
}

static json_t *block_json(const stage_list *l, const stage_block *b) {
    json_t *layers = json_array(), *ops = json_array();
    for (int32_t i = 0; i < b->n_layers; i++) {
        json_array_append_new(layers, json_integer(b->layers[i]));
    }
    for (int32_t i = 0; i < b->n; i++) {
        json_array_append_new(ops, op_json(&l->ops[b->first_op + i]));
    }
    return json_pack("{s:s, s:o, s:o}", "block", title_of(l, b).s, "layers", layers, "ops",
                     ops);
}

hd_status stages_print_json(const stage_list *l, const hd_model_spec *spec, hd_err *err) {
    json_t *blocks = json_array();
    int failed = 0;
    for (int32_t i = 0; i < l->n_blocks; i++) {
        failed |= json_array_append_new(blocks, block_json(l, &l->blocks[i]));
    }
    json_t *o =
        json_pack("{s:s, s:i, s:i, s:o}", "family", hd_family_name(spec->family), "layers",
                  spec->n_layers, "mtp_layers", spec->n_mtp, "blocks", blocks);
    if (failed || !o) {
        json_decref(o);
        return HD_FAIL(err, HD_ENOMEM, "no memory for the JSON of the stages");
    }
    json_dumpf(o, stdout, JSON_INDENT(2)); /* main reports write errors */
    putchar('\n');
    json_decref(o);
    return HD_OK;
}
