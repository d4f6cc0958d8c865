/* changes.c - see changes.h. A part is a head, an entry for each tensor, and their bytes in this
 * order. */
#include "weights/changes.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "weights/weights_internal.h"

enum { PART_BYTES = 64 << 20, PART_TENSORS = 4096, MAGIC = 0x48445743 }; /* "CWDH" */

typedef struct part_head {
    uint32_t magic, n;
    uint64_t bytes; /* behind the entries */
} part_head;

typedef struct part_entry {
    int32_t tensor; /* of the checkpoint */
    uint32_t pad;
    uint64_t bytes;
} part_entry;

struct hd_weights_changes {
    const hd_weights *w;
    bool *changed, *due; /* [schema.n] */
    int32_t n_due;
    bool *taken; /* [tensors of the checkpoint] by the parts since it was due */
    const hd_tensor *tensors[PART_TENSORS]; /* of the next part */
    uint32_t n;
    uint64_t bytes;
};

hd_status hd_weights_changes_open(hd_weights_changes **out, const hd_weights *w, hd_err *err) {
    hd_weights_changes *c = calloc(1, sizeof *c);
    *out = c;
    if (c) {
        c->w = w;
        c->changed = calloc((size_t)w->schema.n + 1, sizeof *c->changed);
        c->due = calloc((size_t)w->schema.n + 1, sizeof *c->due);
        c->taken = calloc((size_t)hd_checkpoint_count(w->checkpoint) + 1, sizeof *c->taken);
    }
    if (c && c->changed && c->due && c->taken) return HD_OK;
    hd_weights_changes_close(c);
    *out = NULL;
    return HD_FAIL(err, HD_ENOMEM, "no memory for the changes of weights");
}

void hd_weights_changes_close(hd_weights_changes *c) {
    if (!c) return;
    free(c->changed);
    free(c->due);
    free(c->taken);
    free(c);
}

static void set_due(hd_weights_changes *c, int32_t decl) {
    c->n_due += !c->due[decl];
    c->due[decl] = c->changed[decl] = true;
}

/* Parts that were taken before have old values. */
static void forget_parts(hd_weights_changes *c) {
    memset(c->taken, 0, (size_t)hd_checkpoint_count(c->w->checkpoint) * sizeof *c->taken);
}

void hd_weights_changes_add(hd_weights_changes *c, const hd_weights_update *u) {
    forget_parts(c);
    for (int32_t i = 0; i < c->w->schema.n; i++) {
        if (weights_update_brings(u, i)) set_due(c, i);
    }
}

void hd_weights_changes_again(hd_weights_changes *c) {
    forget_parts(c);
    for (int32_t i = 0; i < c->w->schema.n; i++) {
        if (c->changed[i]) set_due(c, i);
    }
}

bool hd_weights_changes_are_due(const hd_weights_changes *c) {
    return c->n_due > 0;
}

/* ---- making a part ---- */

/* Tensors of several declarations, as those that stack experts, are taken once. */
static void choose_tensor(hd_weights_changes *c, const hd_tensor *t) {
    if (!t) return;
    bool *taken = &c->taken[t - hd_checkpoint_at(c->w->checkpoint, 0)];
    if (*taken) return;
    *taken = true;
    c->tensors[c->n++] = t;
    c->bytes += t->bytes;
}

static void choose(hd_weights_changes *c) {
    enum { OF_ONE = 3 };
    c->n = 0;
    c->bytes = 0;
    for (int32_t i = 0; i < c->w->schema.n; i++) {
        const weights_bound *b = &c->w->bound[i];
        if (!c->due[i]) continue;
        if (c->bytes >= PART_BYTES || c->n + OF_ONE > PART_TENSORS) return;
        choose_tensor(c, b->data);
        choose_tensor(c, b->scale);
        choose_tensor(c, b->global);
        c->due[i] = false;
        c->n_due--;
    }
}

hd_status hd_weights_changes_take(hd_weights_changes *c, hd_map *out, hd_err *err) {
    *out = (hd_map){0};
    choose(c);
    if (c->n == 0) return HD_OK;
    const part_head head = {MAGIC, c->n, c->bytes};
    const size_t entries = (size_t)c->n * sizeof(part_entry);
    HD_TRY(hd_map_take(out, sizeof head + entries + (size_t)c->bytes, "changed weights", err));
    uint8_t *to = hd_map_writable(out), *bytes = to + sizeof head + entries;
    memcpy(to, &head, sizeof head);
    for (uint32_t i = 0; i < c->n; i++) {
        const hd_tensor *t = c->tensors[i];
        const part_entry e = {.tensor = (int32_t)(t - hd_checkpoint_at(c->w->checkpoint, 0)),
                              .bytes = t->bytes};
        memcpy(to + sizeof head + i * sizeof e, &e, sizeof e);
        memcpy(bytes, t->data, t->bytes);
        bytes += t->bytes;
    }
    return HD_OK;
}

/* ---- reading a part ---- */

static hd_status refuse(hd_err *err) {
    return HD_FAIL(err, HD_EFORMAT, "changed weights that are not of this model's files");
}

static hd_status check_head(part_head *head, const hd_map *part, hd_err *err) {
    if (part->bytes < sizeof *head) return refuse(err);
    memcpy(head, part->data, sizeof *head);
    const size_t left = part->bytes - sizeof *head;
    if (head->magic != MAGIC || head->n == 0 || head->n > PART_TENSORS ||
        head->n * sizeof(part_entry) > left ||
        head->bytes != left - head->n * sizeof(part_entry)) {
        return refuse(err);
    }
    return HD_OK;
}

/* Fills tensors [head->n], which point into the part. */
static hd_status find_tensors(hd_tensor *tensors, const part_head *head, const hd_weights *w,
                              const hd_map *part, hd_err *err) {
    const uint8_t *entries = part->data + sizeof *head;
    const uint8_t *bytes = entries + head->n * sizeof(part_entry);
    uint64_t left = head->bytes;
    for (uint32_t i = 0; i < head->n; i++) {
        part_entry e;
        memcpy(&e, entries + i * sizeof e, sizeof e);
        if (e.tensor < 0 || e.tensor >= hd_checkpoint_count(w->checkpoint)) return refuse(err);
        tensors[i] = *hd_checkpoint_at(w->checkpoint, e.tensor);
        if (e.bytes != tensors[i].bytes || e.bytes > left) return refuse(err);
        tensors[i].data = bytes;
        tensors[i].shard = 0;
        bytes += e.bytes;
        left -= e.bytes;
    }
    return left ? refuse(err) : HD_OK;
}

hd_status hd_weights_changes_read(hd_weights_update *u, const hd_weights *w, hd_map *part,
                                  hd_err *err) {
    static const hd_weights_update_rule all = {.selector = HD_SELECT_ALL};
    part_head head;
    hd_checkpoint *c;
    hd_tensor *tensors = NULL;
    hd_status st = check_head(&head, part, err);
    if (st == HD_OK) {
        tensors = calloc(head.n, sizeof *tensors);
        st = tensors ? find_tensors(tensors, &head, w, part, err)
                     : HD_FAIL(err, HD_ENOMEM, "no memory for changed weights");
    }
    if (st == HD_OK) {
        st = hd_checkpoint_of_tensors(&c, tensors, (int32_t)head.n, part, "changes", err);
        if (st == HD_OK) st = hd_weights_update_add(u, c, &all, err);
    } else {
        hd_map_close(part);
    }
    free(tensors);
    return st;
}
