/* memory_occupation.c - endpoints that give memory back to the system between rollouts, and take it
 * again: SGLang's tags weights and kv_cache. */
#include <string.h>

#include "server/weight_updates.h"

/* A CUDA graph keeps its memory: it stays valid, as addresses do. */
static const struct {
    const char *name;
    uint32_t memory;
} tags[] = {
    {"weights",    HD_MEMORY_WEIGHTS},
    {"kv_cache",   HD_MEMORY_KV     },
    {"cuda_graph", 0                }
};

static bool add_tag(const char *name, uint32_t *memory) {
    for (size_t i = 0; name && i < HD_LEN(tags); i++) {
        if (strcmp(tags[i].name, name) != 0) continue;
        *memory |= tags[i].memory;
        return true;
    }
    return false;
}

/* No tags mean all. */
static bool take_tags(weight_call *c, json_t *body, uint32_t *memory) {
    json_t *list = json_object_get(body, "tags"), *tag;
    size_t i;
    *memory = 0;
    if (list && !json_is_null(list) && !json_is_array(list)) {
        weight_updates_reply(c, 400, "tags must be a list");
        return false;
    }
    json_array_foreach(list, i, tag) {
        if (add_tag(json_string_value(tag), memory)) continue;
        weight_updates_reply(c, 400, "tags[%zu] must be weights, kv_cache or cuda_graph", i);
        return false;
    }
    if (json_array_size(list) == 0) *memory = HD_MEMORY_WEIGHTS | HD_MEMORY_KV;
    return true;
}

static void release(server *s, weight_call *c, json_t *body) {
    uint32_t memory;
    hd_engine_stats e;
    hd_err err = {0};
    if (!take_tags(c, body, &memory)) return;
    if (s->weights->session.update) {
        weight_updates_reply(c, 409, "an update in parts has begun and not ended");
    } else if (hd_engine_release_memory(s->engine, memory, &err) != HD_OK) {
        weight_updates_failed(c, &err);
    } else {
        prefix_ring_forget(s->prefixes);
        hd_engine_read_stats(s->engine, &e);
        weight_updates_reply(c, 200, "Released: %zu bytes are given back.", e.released_bytes);
    }
}

static void resume(server *s, weight_call *c, json_t *body) {
    uint32_t memory;
    hd_engine_stats e;
    hd_err err = {0};
    if (!take_tags(c, body, &memory)) return;
    if (hd_engine_resume_memory(s->engine, memory, &err) != HD_OK) {
        weight_updates_failed(c, &err);
        return;
    }
    hd_engine_read_stats(s->engine, &e);
    if (e.weights_lost) {
        weight_updates_reply(c, 200, "Resumed: %d tensors wait for an update.", e.weights_lost);
    } else {
        weight_updates_reply(c, 200, "Resumed.");
    }
}

void weights_on_release(http_call *c, void *user) {
    weight_updates_handle(c, user, release);
}

void weights_on_resume(http_call *c, void *user) {
    weight_updates_handle(c, user, resume);
}
