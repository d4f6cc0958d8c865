/* eplb_files.c - loads and maps as JSON, maps in the forms of SGLang and TensorRT-LLM. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "moe/eplb.h"

enum { MAX_PASSES = 1 << 20 };

/* ---- loads ---- */

/* Length of a nested list and of the lists in it; all of those must be equally long. */
static hd_status measure(const json_t *list, size_t *n, size_t *inner, size_t most,
                         const char *what, hd_err *err) {
    *n = json_array_size(list);
    *inner = json_array_size(json_array_get(list, 0));
    if (*n == 0 || *inner == 0) return HD_FAIL(err, HD_EFORMAT, "%s: an empty list", what);
    if (*n > most) return HD_FAIL(err, HD_EFORMAT, "%s: a list of %zu", what, *n);
    for (size_t i = 0; i < *n; i++) {
        const json_t *row = json_array_get(list, i);
        if (!json_is_array(row) || json_array_size(row) != *inner) {
            return HD_FAIL(err, HD_EFORMAT, "%s: entry %zu is not a list of %zu like the first",
                           what, i, *inner);
        }
    }
    return HD_OK;
}

/* Adds a pass, and its squares. */
static hd_status add_pass(hd_eplb_loads *l, double *squares, const json_t *pass,
                          const char *what, hd_err *err) {
    size_t layers, experts;
    HD_TRY(measure(pass, &layers, &experts, HD_EPLB_MAX_LAYERS, what, err));
    if (experts > HD_EPLB_MAX_EXPERTS) {
        return HD_FAIL(err, HD_EFORMAT, "%s: %zu experts; the most are %d", what, experts,
                       HD_EPLB_MAX_EXPERTS);
    }
    if (!l->loads) {
        l->layers = (int32_t)layers;
        l->experts = (int32_t)experts;
        l->loads = calloc(2 * layers * experts, sizeof *l->loads);
        if (!l->loads) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for the loads", what);
        squares = l->loads + layers * experts;
    }
    if (layers != (size_t)l->layers || experts != (size_t)l->experts) {
        return HD_FAIL(err, HD_EFORMAT, "%s: a pass of [%zu][%zu] among [%d][%d]", what, layers,
                       experts, l->layers, l->experts);
    }
    for (size_t i = 0; i < layers; i++) {
        for (size_t e = 0; e < experts; e++) {
            const json_t *v = json_array_get(json_array_get(pass, i), e);
            const double w = json_is_number(v) ? json_number_value(v) : -1;
            if (!(w >= 0 && w <= HD_EPLB_MAX_LOAD)) {
                return HD_FAIL(err, HD_EFORMAT,
                               "%s: the load of expert %zu in layer %zu is not a number from 0 "
                               "to 2^63",
                               what, e, i);
            }
            l->loads[i * experts + e] += w;
            squares[i * experts + e] += w * w;
        }
    }
    return HD_OK;
}

static hd_status read_loads(hd_eplb_loads *l, const json_t *counts, double z, const char *what,
                            hd_err *err) {
    size_t n = 1;
    const bool passes = json_is_array(json_array_get(json_array_get(counts, 0), 0));
    if (passes) n = json_array_size(counts);
    if (n > MAX_PASSES) return HD_FAIL(err, HD_EFORMAT, "%s: %zu passes", what, n);
    for (size_t i = 0; i < n; i++) {
        double *squares = l->loads ? l->loads + (size_t)l->layers * (size_t)l->experts : NULL;
        HD_TRY(add_pass(l, squares, passes ? json_array_get(counts, i) : counts, what, err));
    }
    const size_t all = (size_t)l->layers * (size_t)l->experts;
    for (size_t i = 0; i < all; i++) {
        const double mean = l->loads[i] / (double)n;
        const double variance = l->loads[all + i] / (double)n - mean * mean;
        if (z > 0 && variance > 0) l->loads[i] += (double)n * z * sqrt(variance);
        if (l->loads[i] > HD_EPLB_MAX_LOAD) {
            return HD_FAIL(err, HD_EFORMAT, "%s: the passes add up to more than 2^63", what);
        }
    }
    return HD_OK;
}

hd_status hd_eplb_loads_read(hd_eplb_loads *out, const char *text, size_t n, double z,
                             const char *what, hd_err *err) {
    json_t *json;
    *out = (hd_eplb_loads){0};
    HD_TRY(hd_json_parse(&json, text, n, what, err));
    const json_t *counts = json_is_object(json) ? json_object_get(json, "logical_count") : json;
    hd_status st = HD_OK;
    if (!json_is_array(counts)) {
        st = HD_FAIL(err, HD_EFORMAT, "%s: neither [layers][experts] nor \"logical_count\"",
                     what);
    }
    if (st == HD_OK) st = read_loads(out, counts, z, what, err);
    json_decref(json);
    if (st != HD_OK) hd_eplb_loads_close(out);
    return st;
}

void hd_eplb_loads_close(hd_eplb_loads *l) {
    free(l->loads);
    *l = (hd_eplb_loads){0};
}

/* ---- maps ---- */

static hd_status read_map(int32_t **out, int32_t *layers, int32_t *slots, const json_t *map,
                          const char *what, hd_err *err) {
    size_t n, m;
    HD_TRY(measure(map, &n, &m, HD_EPLB_MAX_LAYERS, what, err));
    if (m > HD_EPLB_MAX_SLOTS) return HD_FAIL(err, HD_EFORMAT, "%s: %zu slots", what, m);
    int32_t *all = malloc(n * m * sizeof *all);
    if (!all) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for the map", what);
    for (size_t i = 0; i < n * m; i++) {
        const json_t *v = json_array_get(json_array_get(map, i / m), i % m);
        const json_int_t e = json_is_integer(v) ? json_integer_value(v) : -2;
        if (e < -1 || e >= HD_EPLB_MAX_EXPERTS) {
            free(all);
            return HD_FAIL(err, HD_EFORMAT,
                           "%s: slot %zu of layer %zu holds no expert's number", what, i % m,
                           i / m);
        }
        all[i] = (int32_t)e;
    }
    *out = all;
    *layers = (int32_t)n;
    *slots = (int32_t)m;
    return HD_OK;
}

/* ---- TensorRT-LLM's YAML ---- */

#define ASSIGNMENTS "initial_global_assignments:"

typedef struct yaml {
    const char *at;
    bool key; /* a key of the outermost level begins here, or the text ends */
} yaml;

/* Skips blanks and comments. */
static void skip(yaml *y) {
    bool fresh = false; /* at the beginning of a line */
    for (;; y->at++) {
        if (*y->at == '#') y->at += strcspn(y->at, "\n");
        if (*y->at == '\0' || !strchr(" \t\r\n", *y->at)) break;
        fresh = *y->at == '\n';
    }
    y->key = *y->at == '\0' || (fresh && (*y->at < '0' || *y->at > '9') && *y->at != '-');
}

static bool take_char(yaml *y, char c) {
    skip(y);
    if (y->key || *y->at != c) return false;
    y->at++;
    return true;
}

static bool take_integer(yaml *y, long *v) {
    skip(y);
    const char *digits = y->at + (*y->at == '-');
    if (y->key || *digits < '0' || *digits > '9') return false;
    char *end;
    *v = strtol(y->at, &end, 10);
    y->at = end;
    return true;
}

/* "[1, 2]", or lines of "- 1". */
static bool take_list(yaml *y, json_t *list) {
    long v;
    if (take_char(y, '[')) {
        do {
            if (!take_integer(y, &v)) return false;
            json_array_append_new(list, json_integer(v));
        } while (take_char(y, ','));
        return take_char(y, ']');
    }
    for (skip(y); !y->key && y->at[0] == '-' && y->at[1] == ' '; skip(y)) {
        y->at++;
        if (!take_integer(y, &v)) return false;
        json_array_append_new(list, json_integer(v));
    }
    return json_array_size(list) > 0;
}

static const char *find_assignments(const char *text) {
    const char *at = text;
    while ((at = strstr(at, ASSIGNMENTS)) && at != text && at[-1] != '\n') at++;
    return at;
}

/* Becomes [layers][slots]; layers are numbered from 0 without a gap. */
static hd_status parse_yaml(json_t **out, const char *text, const char *what, hd_err *err) {
    yaml y = {.at = find_assignments(text) + strlen(ASSIGNMENTS)};
    *out = json_array();
    for (skip(&y); !y.key; skip(&y)) {
        long layer;
        const size_t expected = json_array_size(*out);
        json_t *list = json_array();
        json_array_append_new(*out, list);
        if (!take_integer(&y, &layer) || !take_char(&y, ':') || !take_list(&y, list)) {
            return HD_FAIL(err, HD_EFORMAT,
                           "%s: layer %zu of the assignments is not \"N: [experts]\"", what,
                           expected);
        }
        if (layer < 0 || (size_t)layer != expected) {
            return HD_FAIL(err, HD_EFORMAT, "%s: layer %ld stands where layer %zu is expected",
                           what, layer, expected);
        }
    }
    return HD_OK;
}

static bool is_yaml(const char *text) {
    const size_t blank = strspn(text, " \t\r\n");
    return text[blank] != '[' && text[blank] != '{' && find_assignments(text) != NULL;
}

hd_status hd_eplb_map_read(int32_t **out, int32_t *layers, int32_t *slots, const char *text,
                           size_t n, const char *what, hd_err *err) {
    json_t *json = NULL;
    *out = NULL;
    hd_status st = is_yaml(text) ? parse_yaml(&json, text, what, err)
                                 : hd_json_parse(&json, text, n, what, err);
    const json_t *map =
        json_is_object(json) ? json_object_get(json, "physical_to_logical_map") : json;
    if (st == HD_OK && !json_is_array(map)) {
        st = HD_FAIL(err, HD_EFORMAT,
                     "%s: neither [layers][slots], \"physical_to_logical_map\" nor "
                     "\"initial_global_assignments\"",
                     what);
    }
    if (st == HD_OK) st = read_map(out, layers, slots, map, what, err);
    json_decref(json);
    return st;
}

/* ---- writing ---- */

static json_t *integers(const int32_t *v, size_t n) {
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(list, json_integer(v[i]));
    return list;
}

static json_t *matrix(const int32_t *v, int32_t rows, int32_t columns) {
    json_t *list = json_array();
    for (int32_t i = 0; i < rows; i++) {
        json_array_append_new(list, integers(v + (size_t)i * (size_t)columns, (size_t)columns));
    }
    return list;
}

static json_t *reals(const double *v, int32_t n) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_real(v[i]));
    return list;
}

static json_t *all_slots(const hd_eplb_map *m) {
    json_t *list = json_array();
    const size_t layer = (size_t)m->experts * (size_t)m->most_copies;
    for (size_t i = 0; i < (size_t)m->layers; i++) {
        json_array_append_new(list,
                              matrix(m->expert_slots + i * layer, m->experts, m->most_copies));
    }
    return list;
}

json_t *hd_eplb_map_sglang(const hd_eplb_map *m) {
    json_t *o = json_object();
    json_object_set_new(o, "physical_to_logical_map",
                        matrix(m->slot_expert, m->layers, m->slots));
    return o;
}

json_t *hd_eplb_map_json(const hd_eplb_map *m) {
    json_t *o = hd_eplb_map_sglang(m);
    json_object_set_new(o, "logical_to_all_physical_map", all_slots(m));
    json_object_set_new(o, "expert_count", matrix(m->n_copies, m->layers, m->experts));
    json_object_set_new(o, "balancedness", reals(m->balancedness, m->layers));
    json_object_set_new(o, "bound", reals(m->bound, m->layers));
    return o;
}

char *hd_eplb_map_tensorrt(const hd_eplb_map *m) {
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    if (!f) return NULL;
    fprintf(f, "num_slots: %d\ninitial_global_assignments:\n", m->slots);
    for (int32_t i = 0; i < m->layers; i++) {
        fprintf(f, "  %d: [", i);
        for (int32_t s = 0; s < m->slots; s++) {
            fprintf(f, "%s%d", s ? ", " : "",
                    m->slot_expert[(size_t)i * (size_t)m->slots + (size_t)s]);
        }
        fprintf(f, "]\n");
    }
    fprintf(f, "layer_updates_per_iter: 0\n");
    if (fclose(f) == 0) return text;
    free(text);
    return NULL;
}
