/* store.c - a list of answers, newest first, with a bound on its bytes. */
#include "api/store.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry {
    struct entry *next; /* older */
    char *id;
    uint64_t salt;
    api_text object, items;
} entry;

struct api_store {
    pthread_mutex_t lock; /* guards the rest */
    entry *newest;
    size_t bytes, max_bytes;
};

api_store *api_store_open(size_t max_bytes) {
    api_store *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    if (pthread_mutex_init(&s->lock, NULL) != 0) {
        free(s);
        return NULL;
    }
    s->max_bytes = max_bytes;
    return s;
}

static void entry_free(entry *e) {
    if (!e) return;
    api_text_deinit(&e->object);
    api_text_deinit(&e->items);
    free(e->id);
    free(e);
}

void api_store_close(api_store *s) {
    if (!s) return;
    while (s->newest) {
        entry *e = s->newest;
        s->newest = e->next;
        entry_free(e);
    }
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static size_t entry_bytes(const entry *e) {
    return sizeof *e + strlen(e->id) + e->object.cap + e->items.cap;
}

/* Keeps what fits, from the newest on, and returns the rest. */
static entry *cut_tail(api_store *s) {
    entry **link = &s->newest;
    size_t bytes = 0;
    while (*link && bytes + entry_bytes(*link) <= s->max_bytes) {
        bytes += entry_bytes(*link);
        link = &(*link)->next;
    }
    entry *rest = *link;
    *link = NULL;
    s->bytes = bytes;
    return rest;
}

void api_store_put(api_store *s, const char *id, uint64_t salt, api_text *object,
                   api_text *items) {
    entry *e = calloc(1, sizeof *e), *rest = NULL;
    char *name = strdup(id);
    if (!e || !name || object->failed || items->failed) {
        free(e);
        free(name);
        return;
    }
    *e = (entry){.id = name, .salt = salt, .object = *object, .items = *items};
    *object = *items = (api_text){0};
    if (entry_bytes(e) > s->max_bytes) {
        entry_free(e);
        return;
    }
    pthread_mutex_lock(&s->lock);
    e->next = s->newest;
    s->newest = e;
    s->bytes += entry_bytes(e);
    if (s->bytes > s->max_bytes) rest = cut_tail(s);
    pthread_mutex_unlock(&s->lock);
    while (rest) {
        entry *next = rest->next;
        entry_free(rest);
        rest = next;
    }
}

bool api_store_get(api_store *s, const char *id, uint64_t salt, api_text *object,
                   api_text *items) {
    const entry *e = NULL;
    if (!s) return false;
    pthread_mutex_lock(&s->lock);
    for (e = s->newest; e; e = e->next) {
        if (e->salt == salt && strcmp(e->id, id) == 0) break;
    }
    if (e && object) api_put(object, e->object.data, e->object.n);
    if (e && items) api_put(items, e->items.data, e->items.n);
    pthread_mutex_unlock(&s->lock);
    return e != NULL;
}
