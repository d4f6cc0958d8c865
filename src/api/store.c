/* store.c - a list of stored responses, newest first, with a limit on its bytes. */
#include "api/store.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry {
    struct entry *next; /* older */
    char *id;
    uint64_t salt;
    api_text object, items, events;
} entry;

struct api_store {
    pthread_mutex_t lock; /* guards the fields below */
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
    api_text_deinit(&e->events);
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
    return sizeof *e + strlen(e->id) + e->object.cap + e->items.cap + e->events.cap;
}

/* Returns the link to the entry, or the last link. */
static entry **link_of(api_store *s, const char *id, uint64_t salt) {
    entry **link = &s->newest;
    while (*link && ((*link)->salt != salt || strcmp((*link)->id, id) != 0)) {
        link = &(*link)->next;
    }
    return link;
}

static entry *unlink_entry(api_store *s, const char *id, uint64_t salt) {
    entry **link = link_of(s, id, salt), *e = *link;
    if (!e) return NULL;
    s->bytes -= entry_bytes(e);
    *link = e->next;
    e->next = NULL;
    return e;
}

/* Keeps the newest entries that fit and returns the rest. */
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

static void free_list(entry *e) {
    while (e) {
        entry *next = e->next;
        entry_free(e);
        e = next;
    }
}

void api_store_put(api_store *s, const char *id, uint64_t salt, api_text *object,
                   api_text *items) {
    entry *e = calloc(1, sizeof *e), *rest = NULL, *before;
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
    before = unlink_entry(s, id, salt);
    e->next = s->newest;
    s->newest = e;
    s->bytes += entry_bytes(e);
    if (s->bytes > s->max_bytes) rest = cut_tail(s);
    pthread_mutex_unlock(&s->lock);
    entry_free(before);
    free_list(rest);
}

bool api_store_get(api_store *s, const char *id, uint64_t salt, api_text *object,
                   api_text *items) {
    if (!s) return false;
    pthread_mutex_lock(&s->lock);
    const entry *e = *link_of(s, id, salt);
    if (e && object) api_put(object, e->object.data, e->object.n);
    if (e && items) api_put(items, e->items.data, e->items.n);
    pthread_mutex_unlock(&s->lock);
    return e != NULL;
}

void api_store_attach(api_store *s, const char *id, uint64_t salt, api_text *events) {
    entry *rest = NULL;
    pthread_mutex_lock(&s->lock);
    entry *e = *link_of(s, id, salt);
    if (e && events->n > 0 && !events->failed) {
        e->events = *events;
        *events = (api_text){0};
        s->bytes += e->events.cap;
        if (s->bytes > s->max_bytes) rest = cut_tail(s);
    }
    pthread_mutex_unlock(&s->lock);
    free_list(rest);
}

bool api_store_get_events(api_store *s, const char *id, uint64_t salt, api_text *events) {
    if (!s) return false;
    pthread_mutex_lock(&s->lock);
    const entry *e = *link_of(s, id, salt);
    const bool there = e && e->events.n > 0;
    if (there) api_put(events, e->events.data, e->events.n);
    pthread_mutex_unlock(&s->lock);
    return there;
}

bool api_store_remove(api_store *s, const char *id, uint64_t salt) {
    pthread_mutex_lock(&s->lock);
    entry *e = unlink_entry(s, id, salt);
    pthread_mutex_unlock(&s->lock);
    entry_free(e);
    return e != NULL;
}
