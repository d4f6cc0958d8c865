/* weights_checker.c - endpoints that show weights: checksums of all tensors, a comparison with
 * earlier ones, random values to prove that an update replaces everything, and values by
 * name. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checksum.h"
#include "server/weight_updates.h"

enum { MAX_VALUES = 1000000, DEFAULT_ROWS = 100 };

static const hd_checkpoint *tensors_of(server *s) {
    return hd_weights_checkpoint(hd_engine_weights(s->engine));
}

/* ---- checksums ---- */

/* Covers dtype and shape, too: bytes alone could belong to another matrix. */
static uint64_t checksum_of(const hd_tensor *t) {
    const uint64_t h = hd_checksum(0, t->dtype_name, strlen(t->dtype_name));
    return hd_checksum(hd_checksum(h, t->shape, (size_t)t->rank * sizeof *t->shape), t->data,
                       t->bytes);
}

static json_t *hex(uint64_t h) {
    char text[20];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)h);
    return json_string(text);
}

static void reply_checksums(server *s, weight_call *c) {
    const hd_checkpoint *all = tensors_of(s);
    json_t *checksums = json_object();
    uint64_t whole = 0;
    for (int32_t i = 0; i < hd_checkpoint_count(all); i++) {
        const hd_tensor *t = hd_checkpoint_at(all, i);
        const uint64_t h = checksum_of(t);
        json_object_set_new(checksums, t->name, hex(h));
        whole = hd_checksum(whole, &h, sizeof h);
    }
    weight_updates_answer(c, 200,
                          json_pack("{s:b, s:s, s:[{s:o, s:o}], s:o}", "success", true,
                                    "message", "Checksums of all tensors as stored.", "ranks",
                                    "checksums", checksums, "per_gpu_checksum", hex(whole),
                                    "per_engine_checksum", hex(whole)));
}

static void take_snapshot(server *s, weight_call *c) {
    weight_updates *w = s->weights;
    const hd_checkpoint *all = tensors_of(s);
    const int32_t n = hd_checkpoint_count(all);
    free(w->snapshot);
    w->snapshot = calloc((size_t)n + 1, sizeof *w->snapshot);
    if (!w->snapshot) {
        weight_updates_reply(c, 503, "no memory for %d checksums", n);
        return;
    }
    for (int32_t i = 0; i < n; i++) w->snapshot[i] = checksum_of(hd_checkpoint_at(all, i));
    weight_updates_reply(c, 200, "Kept the checksums of %d tensors.", n);
}

static void compare(server *s, weight_call *c) {
    const weight_updates *w = s->weights;
    const hd_checkpoint *all = tensors_of(s);
    const char *first = NULL;
    int32_t n = 0;
    if (!w->snapshot) {
        weight_updates_reply(c, 400, "no snapshot to compare with");
        return;
    }
    for (int32_t i = 0; i < hd_checkpoint_count(all); i++) {
        const hd_tensor *t = hd_checkpoint_at(all, i);
        if (checksum_of(t) == w->snapshot[i]) continue;
        if (n++ == 0) first = t->name;
    }
    if (n > 0) {
        weight_updates_reply(c, 400, "%d tensors differ from the snapshot, the first is %s", n,
                             first);
    } else {
        weight_updates_reply(c, 200, "All tensors equal the snapshot.");
    }
}

/* ---- random values ---- */

static bool is_listed(json_t *parts, const char *name) {
    size_t i;
    json_t *part;
    json_array_foreach(parts, i, part) {
        if (strstr(name, json_string_value(part))) return true;
    }
    return false;
}

/* Writes random numbers of the stored type to a copy of the tensor at *at. */
static void scramble(hd_tensor *t, uint8_t *at, uint64_t seed) {
    const hd_dtype stored = t->dtype == HD_I8 || t->dtype == HD_U8 ? HD_E2M1 : t->dtype;
    hd_random_fill fill = hd_dtype_random(stored, 0.0625f);
    fill.seed = seed;
    for (size_t i = 0; i < t->bytes; i += sizeof(uint64_t)) {
        const uint64_t word = hd_random_fill_word(&fill, i / sizeof word);
        memcpy(at + i, &word, t->bytes - i < sizeof word ? t->bytes - i : sizeof word);
    }
    t->data = at;
}

/* Tensors of numbers get random ones; scales and tables come along as they are. */
static hd_status scramble_all(server *s, json_t *skip, hd_checkpoint **out, hd_err *err) {
    const hd_checkpoint *all = tensors_of(s);
    const hd_weights *w = hd_engine_weights(s->engine);
    const int32_t n = hd_checkpoint_count(all);
    size_t bytes = 0;
    hd_map map;
    hd_tensor *list = calloc((size_t)n + 1, sizeof *list);
    if (!list) return HD_FAIL(err, HD_ENOMEM, "no memory for %d tensors", n);
    for (int32_t i = 0; i < n; i++) bytes += hd_checkpoint_at(all, i)->bytes;
    hd_status st = hd_map_take(&map, bytes, "reset_tensors", err);
    uint8_t *at = hd_map_writable(&map);
    int32_t k = 0, decl;
    for (int32_t i = 0; i < n && st == HD_OK; i++) {
        const hd_use what = hd_weights_use(w, i, &decl);
        hd_tensor *t = &list[k];
        *t = *hd_checkpoint_at(all, i);
        if (decl < 0) continue;
        if (is_listed(skip, hd_weights_schema(w)->decls[decl].name)) continue;
        const bool integers = t->dtype == HD_I64 || t->dtype == HD_I32;
        if (what == HD_USE_DATA && !integers) scramble(t, at, (uint64_t)i);
        at += t->bytes;
        k++;
    }
    if (st == HD_OK) st = hd_checkpoint_of_tensors(out, list, k, &map, "reset_tensors", err);
    free(list);
    return st;
}

static void reset_tensors(server *s, weight_call *c, json_t *skip) {
    const hd_weights_update_rule rule = {.n_threads = hd_engine_threads(s->engine)};
    hd_weights_update *u = NULL;
    hd_checkpoint *random;
    hd_err err = {0};
    size_t i;
    json_t *part;
    json_array_foreach(skip, i, part) {
        if (json_is_string(part)) continue;
        weight_updates_reply(c, 400, "skip_tensor_list must be a list of strings");
        return;
    }
    hd_status st = scramble_all(s, skip, &random, &err);
    if (st == HD_OK) {
        st = hd_weights_update_open(&u, hd_engine_weights(s->engine), &err);
        if (st == HD_OK) st = hd_weights_update_add(u, random, &rule, &err);
        if (st == HD_OK) st = hd_engine_update_weights(s->engine, u, NULL, &err);
    }
    if (st == HD_OK) {
        weight_updates_reply(c, 200, "Gave random values to %d tensors.",
                             hd_weights_update_count(u));
    } else {
        weight_updates_failed(c, &err);
    }
    hd_weights_update_close(u);
}

static void check(server *s, weight_call *c, json_t *body) {
    json_t *given = json_object_get(body, "action");
    json_t *skip = json_object_get(body, "skip_tensor_list");
    const char *action = given ? json_string_value(given) : http_query(c->http, "action");
    if (weight_updates_refuse_lost(s, c)) return;
    if (!action && !given) action = "checksum";
    if (skip && !json_is_null(skip) && !json_is_array(skip)) {
        weight_updates_reply(c, 400, "skip_tensor_list must be a list of strings");
    } else if (!action) {
        weight_updates_reply(c, 400, "action must be a string");
    } else if (strcmp(action, "checksum") == 0) {
        reply_checksums(s, c);
    } else if (strcmp(action, "snapshot") == 0) {
        take_snapshot(s, c);
    } else if (strcmp(action, "compare") == 0) {
        compare(s, c);
    } else if (strcmp(action, "reset_tensors") == 0) {
        reset_tensors(s, c, skip);
    } else {
        weight_updates_reply(c, 400,
                             "action must be checksum, snapshot, compare or reset_tensors");
    }
}

/* ---- values ---- */

static json_t *value_at(const hd_tensor *t, int64_t i) {
    int64_t wide = 0;
    if (hd_dtypes[t->dtype].decode) {
        return json_real((double)hd_dtype_at(t->dtype, t->data, i));
    }
    const size_t bytes = hd_dtype_bytes(t->dtype, 1);
    memcpy(&wide, t->data + (size_t)i * bytes, bytes);
    if (t->dtype == HD_I8) wide = (wide ^ 0x80) - 0x80;
    if (t->dtype == HD_I32) wide = (int32_t)wide;
    return json_integer(wide);
}

/* The first rows of a tensor as nested lists. */
static json_t *values_of(const hd_tensor *t, int64_t rows) {
    if (t->rank == 0) return value_at(t, 0);
    int64_t per_row = 1;
    for (int32_t i = 1; i < t->rank; i++) per_row *= t->shape[i];
    json_t *list = json_array();
    for (int64_t r = 0; r < rows && r < t->shape[0]; r++) {
        json_t *row = t->rank == 1 ? value_at(t, r) : json_array();
        for (int64_t k = 0; t->rank > 1 && k < per_row; k++) {
            json_array_append_new(row, value_at(t, r * per_row + k));
        }
        json_array_append_new(list, row);
    }
    return list;
}

static void show(server *s, weight_call *c, json_t *body) {
    json_t *given = json_object_get(body, "name"),
           *size = json_object_get(body, "truncate_size");
    const char *name = given ? json_string_value(given) : http_query(c->http, "name");
    const int64_t rows = json_is_integer(size) ? json_integer_value(size) : DEFAULT_ROWS;
    const hd_tensor *t = name ? hd_checkpoint_find(tensors_of(s), name) : NULL;
    if ((size && !json_is_null(size) && !json_is_integer(size)) || rows < 1) {
        weight_updates_reply(c, 400, "truncate_size must be a whole number above 0");
        return;
    }
    if (!t || t->dtype == HD_NONE) {
        weight_updates_reply(c, 400, "name: no tensor %.200s", name ? name : "");
        return;
    }
    if (weight_updates_refuse_lost(s, c)) return;
    int64_t n = 1;
    for (int32_t i = 1; i < t->rank; i++) n *= t->shape[i];
    const int64_t shown = t->rank && rows < t->shape[0] ? rows : t->rank ? t->shape[0] : 1;
    if (n * shown > MAX_VALUES) {
        weight_updates_reply(c, 400, "truncate_size: %lld values are more than %d",
                             (long long)(n * shown), MAX_VALUES);
        return;
    }
    weight_updates_answer(c, 200, values_of(t, rows));
}

/* ---- handlers ---- */

void weights_on_checker(http_call *c, void *user) {
    weight_updates_handle(c, user, check);
}

void weights_on_by_name(http_call *c, void *user) {
    weight_updates_handle(c, user, show);
}
