/* token_lists.c - see token_lists.h; every error names the sequence and the position. */
#include "cli/token_lists.h"

#include <stdbool.h>
#include <stdlib.h>

#include "base/json.h"

enum { MAX_FILE_BYTES = 1 << 30 };

typedef struct reader {
    const char *path;
    int32_t vocab, max_tokens;
    hd_err *err;
} reader;

static hd_status add_sequence(const reader *r, token_lists *t, const json_t *list) {
    const size_t n = json_array_size(list);
    if (n < 1 || n > (size_t)r->max_tokens) {
        return HD_FAIL(r->err, HD_EINVAL, "%s: sequence %d has %zu tokens; must be 1 to %d",
                       r->path, t->n, n, r->max_tokens);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(list, i);
        json_int_t v = json_integer_value(id);
        if (!json_is_integer(id) || v < 0 || v >= r->vocab) {
            return HD_FAIL(r->err, HD_EINVAL,
                           "%s: sequence %d, token %zu: must be an id from 0 to %d", r->path,
                           t->n, i, r->vocab - 1);
        }
        t->tokens[t->total++] = (int32_t)v;
    }
    if ((int32_t)n > t->longest) t->longest = (int32_t)n;
    t->first[++t->n] = t->total;
    return HD_OK;
}

static hd_status read_lists(const reader *r, token_lists *t, const json_t *root) {
    if (!json_is_array(root) || json_array_size(root) == 0) {
        return HD_FAIL(r->err, HD_EINVAL,
                       "%s: must be a list of token ids, or a list of such lists", r->path);
    }
    const bool nested = json_is_array(json_array_get(root, 0));
    const size_t n_lists = nested ? json_array_size(root) : 1;
    size_t total = nested ? 0 : json_array_size(root);
    for (size_t i = 0; nested && i < n_lists; i++) {
        const json_t *list = json_array_get(root, i);
        if (!json_is_array(list)) {
            return HD_FAIL(r->err, HD_EINVAL, "%s: element %zu is not a list", r->path, i);
        }
        total += json_array_size(list);
    }
    t->tokens = calloc(total + 1, sizeof *t->tokens);
    t->first = calloc(n_lists + 1, sizeof *t->first);
    if (!t->tokens || !t->first) {
        return HD_FAIL(r->err, HD_ENOMEM, "%s: no memory for %zu tokens", r->path, total);
    }
    for (size_t i = 0; i < n_lists; i++) {
        HD_TRY(add_sequence(r, t, nested ? json_array_get(root, i) : root));
    }
    return HD_OK;
}

hd_status token_lists_load(token_lists *out, const char *path, int32_t vocab,
                           int32_t max_tokens, hd_err *err) {
    json_t *root;
    *out = (token_lists){0};
    HD_TRY(hd_json_load(&root, path, MAX_FILE_BYTES, err));
    hd_status st = read_lists(&(reader){path, vocab, max_tokens, err}, out, root);
    json_decref(root);
    if (st != HD_OK) token_lists_free(out);
    return st;
}

void token_lists_free(token_lists *t) {
    free(t->tokens);
    free(t->first);
    *t = (token_lists){0};
}
