/* prefix.c - hashes of the beginnings of a prompt. */
#include "router/prefix.h"

#include <string.h>

#include "base/json.h"
#include "base/siphash.h"

typedef struct hasher {
    hd_siphash hash;
    router_prefix *out;
    int64_t block_left;
} hasher;

static int64_t block_bytes(int32_t i) {
    return (int64_t)ROUTER_PREFIX_BYTES << i / ROUTER_PREFIX_STEP;
}

int64_t router_prefix_end(int32_t n) {
    int64_t end = 0;
    for (int32_t i = 0; i < n; i++) end += block_bytes(i);
    return end;
}

static void add(hasher *h, const void *bytes, size_t n) {
    const char *p = bytes;
    h->out->bytes += (int64_t)n;
    while (n && h->out->n < ROUTER_PREFIX_BLOCKS) {
        const size_t k = (int64_t)n < h->block_left ? n : (size_t)h->block_left;
        hd_siphash_add(&h->hash, p, k);
        p += k;
        n -= k;
        h->block_left -= (int64_t)k;
        if (h->block_left) continue;
        h->out->hashes[h->out->n++] = hd_siphash_value(&h->hash);
        h->block_left = block_bytes(h->out->n);
    }
}

/* A NUL ends each text; the JSON reader lets none into a text. Its depth is limited as well. */
static void add_value(hasher *h, const json_t *value) {
    const char *key;
    json_t *part;
    size_t i;
    if (json_is_string(value)) add(h, json_string_value(value), json_string_length(value) + 1);
    if (json_is_integer(value)) {
        const json_int_t number = json_integer_value(value);
        add(h, &number, sizeof number);
    }
    json_array_foreach(value, i, part) {
        add_value(h, part);
    }
    json_object_foreach((json_t *)(uintptr_t)value, key, part) {
        add(h, key, strlen(key) + 1);
        add_value(h, part);
    }
}

void router_prefix_of(router_prefix *out, const char *body, size_t n, uint64_t salt,
                      const uint64_t key[2]) {
    static const char *const members[] = {"instructions", "system", "tools", "messages",
                                          "input",        "prompt", "text",  "input_ids"};
    hasher h = {.out = out, .block_left = block_bytes(0)};
    json_t *object = NULL;
    out->n = 0;
    out->bytes = 0;
    if (n == 0 || hd_json_parse(&object, body, n, "the body", &(hd_err){0}) != HD_OK) return;
    hd_siphash_init(&h.hash, key);
    hd_siphash_add(&h.hash, &salt, sizeof salt);
    for (size_t i = 0; i < HD_LEN(members); i++) {
        const json_t *value = json_object_get(object, members[i]);
        if (value) add_value(&h, value);
    }
    json_decref(object);
}
