/* disk.c - the index of a store: extents by the names of their pages, and which is replaced next. */
#include "kv/disk.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/checked.h"
#include "base/heap.h"

enum { NONE = -1, SCAN_HEADS = 4096, DEPTH_BITS = 20 };

typedef enum extent_state { EXTENT_FREE, EXTENT_WRITING, EXTENT_HAS_PAGE } extent_state;

typedef struct disk_extent {
    extent_state state;
    int32_t n_readers;
    bool lost; /* a read failed: free it when nobody reads it */
    hd_page_name name;
    int32_t page;
    uint64_t used;
    int32_t next; /* in its bucket */
} disk_extent;

typedef struct disk_group {
    disk_extent *extents; /* [n] */
    int32_t n, n_buckets;
    int32_t *buckets;  /* [n_buckets] heads of chains of extents that have pages */
    hd_heap free;      /* the lowest number first, so that files stay short */
    hd_heap evictable; /* extents that have pages and no readers */
    size_t stride;
    int64_t replaced;
    int32_t n_pages;
} disk_group;

struct hd_disk {
    hd_disk_files files;
    hd_disk_header header;
    char *where;
    uint64_t tick;
    disk_group groups[HD_N_KV_GROUPS];
};

/* ---- the index ---- */

static int32_t *bucket_of(const disk_group *g, hd_page_name name) {
    return &g->buckets[name.lo & (uint64_t)(g->n_buckets - 1)];
}

static int32_t find(const disk_group *g, hd_page_name name) {
    if (!g->n) return NONE;
    int32_t x = *bucket_of(g, name);
    while (x != NONE && !hd_page_name_equal(g->extents[x].name, name)) x = g->extents[x].next;
    return x;
}

/* The least recently used first, of one prefix its end first. */
static void finish(disk_group *g, int32_t x) {
    const disk_extent *e = &g->extents[x];
    const int64_t key = (int64_t)(e->used << DEPTH_BITS) - e->page;
    if (e->state == EXTENT_HAS_PAGE && e->n_readers == 0) {
        hd_heap_put(&g->evictable, x, key);
    } else {
        hd_heap_remove(&g->evictable, x);
    }
    if (e->state == EXTENT_FREE) {
        hd_heap_put(&g->free, x, x);
    } else {
        hd_heap_remove(&g->free, x);
    }
}

static void add_page(disk_group *g, int32_t x) {
    disk_extent *e = &g->extents[x];
    int32_t *bucket = bucket_of(g, e->name);
    e->state = EXTENT_HAS_PAGE;
    e->next = *bucket;
    *bucket = x;
    g->n_pages++;
    finish(g, x);
}

static void drop_page(disk_group *g, int32_t x) {
    disk_extent *e = &g->extents[x];
    int32_t *at = bucket_of(g, e->name);
    while (*at != x) at = &g->extents[*at].next;
    *at = e->next;
    *e = (disk_extent){.state = EXTENT_FREE};
    g->n_pages--;
    finish(g, x);
}

static void clear_index(hd_disk *d) {
    for (int i = 0; i < HD_N_KV_GROUPS; i++) {
        disk_group *g = &d->groups[i];
        hd_heap_clear(&g->free);
        hd_heap_clear(&g->evictable);
        g->n_pages = 0;
        for (int32_t b = 0; b < g->n_buckets; b++) g->buckets[b] = NONE;
        for (int32_t x = 0; x < g->n; x++) {
            g->extents[x] = (disk_extent){.state = EXTENT_FREE};
            finish(g, x);
        }
    }
}

bool hd_disk_has(const hd_disk *d, hd_kv_group group, hd_page_name name) {
    return find(&d->groups[group], name) != NONE;
}

void hd_disk_begin_use(hd_disk *d) {
    d->tick++;
}

bool hd_disk_use(hd_disk *d, hd_kv_group group, hd_page_name name) {
    disk_group *g = &d->groups[group];
    const int32_t x = find(g, name);
    if (x == NONE) return false;
    g->extents[x].used = d->tick;
    finish(g, x);
    return true;
}

int32_t hd_disk_begin_read(hd_disk *d, hd_kv_group group, hd_page_name name) {
    disk_group *g = &d->groups[group];
    const int32_t x = find(g, name);
    if (x == NONE || g->extents[x].lost) return NONE;
    g->extents[x].n_readers++;
    finish(g, x);
    return x;
}

void hd_disk_end_read(hd_disk *d, hd_kv_group group, int32_t extent, bool good) {
    disk_group *g = &d->groups[group];
    disk_extent *e = &g->extents[extent];
    e->n_readers--;
    e->lost = e->lost || !good;
    if (e->lost && e->n_readers == 0) {
        drop_page(g, extent);
    } else {
        finish(g, extent);
    }
}

int32_t hd_disk_begin_write(hd_disk *d, hd_kv_group group, hd_page_name name, int32_t page) {
    disk_group *g = &d->groups[group];
    int32_t x = g->n ? hd_heap_min(&g->free) : NONE;
    if (x == NONE && g->n) {
        x = hd_heap_min(&g->evictable);
        if (x == NONE) return NONE;
        drop_page(g, x);
        g->replaced++;
    }
    if (x == NONE) return NONE;
    g->extents[x] = (disk_extent){
        .state = EXTENT_WRITING, .name = name, .page = page, .used = d->tick, .next = NONE};
    finish(g, x);
    return x;
}

void hd_disk_end_write(hd_disk *d, hd_kv_group group, int32_t extent, bool good) {
    disk_group *g = &d->groups[group];
    disk_extent *e = &g->extents[extent];
    if (good && find(g, e->name) == NONE) {
        add_page(g, extent);
    } else {
        *e = (disk_extent){.state = EXTENT_FREE};
        finish(g, extent);
    }
}

/* ---- bytes ---- */

static uint64_t head_at(int32_t extent) {
    return (uint64_t)extent * sizeof(hd_disk_head);
}

static uint64_t page_at(const hd_disk *d, hd_kv_group group, int32_t extent) {
    return (uint64_t)extent * d->groups[group].stride;
}

int hd_disk_read(const hd_disk *d, hd_kv_group group, int32_t extent, void *page) {
    const hd_disk_files *f = &d->files;
    uint8_t bytes[sizeof(hd_disk_head)];
    hd_disk_head head;
    int why = f->read(f->ctx, (hd_disk_file)(HD_DISK_HEADS + group), bytes, sizeof bytes,
                      head_at(extent));
    if (why) return why;
    if (!hd_disk_head_read(&head, bytes, &d->header, group) ||
        !hd_page_name_equal(head.name, d->groups[group].extents[extent].name)) {
        return EBADMSG;
    }
    why = f->read(f->ctx, (hd_disk_file)(HD_DISK_PAGES + group), page, (size_t)head.bytes,
                  page_at(d, group, extent));
    if (why) return why;
    return hd_disk_head_fits(&head, page) ? 0 : EBADMSG;
}

int hd_disk_write(const hd_disk *d, hd_kv_group group, int32_t extent, const void *page) {
    const hd_disk_files *f = &d->files;
    const disk_extent *e = &d->groups[group].extents[extent];
    hd_disk_head head = {
        .group = (uint32_t)group, .name = e->name, .used = e->used, .page = (uint32_t)e->page};
    hd_disk_head_seal(&head, &d->header, page);
    const int why = f->write(f->ctx, (hd_disk_file)(HD_DISK_PAGES + group), page,
                             (size_t)head.bytes, page_at(d, group, extent));
    if (why) return why;
    return f->write(f->ctx, (hd_disk_file)(HD_DISK_HEADS + group), &head, sizeof head,
                    head_at(extent));
}

int hd_disk_sync(const hd_disk *d) {
    int first = 0;
    for (int f = HD_DISK_HEADS; f < HD_N_DISK_FILES; f++) {
        const int why = d->files.sync(d->files.ctx, (hd_disk_file)f);
        if (!first) first = why;
    }
    return first;
}

/* ---- opening ---- */

static hd_status failed(const hd_disk *d, hd_disk_file f, int why, hd_err *err) {
    return HD_FAIL(err, HD_EIO, "%s/%s: %s", d->where, hd_disk_file_name(f), strerror(why));
}

/* Half of the bytes for each group that the model has. */
static hd_status choose_extents(hd_disk *d, const hd_disk_options *o, hd_err *err) {
    const uint64_t parts = o->page_bytes[HD_KV_WINDOW] ? 2 : 1;
    const uint64_t room = o->bytes > sizeof d->header ? o->bytes - sizeof d->header : 0;
    for (int i = 0; i < HD_N_KV_GROUPS; i++) {
        disk_group *g = &d->groups[i];
        if (!o->page_bytes[i]) continue;
        g->stride = hd_disk_stride(o->page_bytes[i]);
        const uint64_t n = room / parts / (g->stride + sizeof(hd_disk_head));
        g->n = (int32_t)(n < (1u << 30) ? n : 1u << 30);
        if (g->n) continue;
        return HD_FAIL(err, HD_EINVAL, "%s: %llu bytes hold no page of %zu bytes", d->where,
                       (unsigned long long)o->bytes, o->page_bytes[i]);
    }
    return HD_OK;
}

static hd_status take_index(hd_disk *d, hd_err *err) {
    for (int i = 0; i < HD_N_KV_GROUPS; i++) {
        disk_group *g = &d->groups[i];
        if (!g->n) continue;
        g->n_buckets = 64;
        while (g->n_buckets < g->n) g->n_buckets *= 2;
        g->extents = calloc((size_t)g->n, sizeof *g->extents);
        g->buckets = calloc((size_t)g->n_buckets, sizeof *g->buckets);
        if (!g->extents || !g->buckets) {
            return HD_FAIL(err, HD_ENOMEM, "%s: no memory for %d pages", d->where, g->n);
        }
        HD_TRY(hd_heap_init(&g->free, g->n, err));
        HD_TRY(hd_heap_init(&g->evictable, g->n, err));
    }
    clear_index(d);
    return HD_OK;
}

static hd_status draw(void *out, size_t n, hd_err *err) {
    if (getrandom(out, n, 0) == (ssize_t)n) return HD_OK;
    return HD_FAIL(err, HD_EIO, "no random numbers for a store of KV pages: %s",
                   strerror(errno));
}

static int write_header(const hd_disk *d, const hd_disk_header *h) {
    const hd_disk_files *f = &d->files;
    const int why = f->write(f->ctx, HD_DISK_STORE, h, sizeof *h, 0);
    return why ? why : f->sync(f->ctx, HD_DISK_STORE);
}

static hd_status start_header(hd_disk *d, const hd_disk_options *o, hd_err *err) {
    hd_disk_header *h = &d->header;
    *h = (hd_disk_header){.page_tokens = (uint32_t)o->page_tokens};
    for (int i = 0; i < HD_N_KV_GROUPS; i++) h->page_bytes[i] = o->page_bytes[i];
    snprintf(h->identity, sizeof h->identity, "%s", o->identity);
    HD_TRY(draw(h->key, sizeof h->key, err));
    HD_TRY(draw(&h->generation, sizeof h->generation, err));
    hd_disk_header_seal(h);
    const int why = write_header(d, h);
    return why ? failed(d, HD_DISK_STORE, why, err) : HD_OK;
}

static hd_status check_header(const hd_disk *d, const hd_disk_options *o, hd_err *err) {
    const hd_disk_header *h = &d->header;
    if (strcmp(h->identity, o->identity) != 0) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s: pages of another model or program, '%s' instead of '%s'; hadal kv "
                       "drop deletes them",
                       d->where, h->identity, o->identity);
    }
    for (int i = 0; i < HD_N_KV_GROUPS; i++) {
        if (h->page_bytes[i] == o->page_bytes[i] &&
            h->page_tokens == (uint32_t)o->page_tokens) {
            continue;
        }
        return HD_FAIL(err, HD_EINVAL,
                       "%s: pages of %u tokens and %llu bytes instead of %d and %zu; hadal kv "
                       "drop deletes them",
                       d->where, h->page_tokens, (unsigned long long)h->page_bytes[i],
                       o->page_tokens, o->page_bytes[i]);
    }
    return HD_OK;
}

/* A store whose header was not written to its end is new: nothing can be read without its key. */
static hd_status open_header(hd_disk *d, const hd_disk_options *o, hd_err *err) {
    const hd_disk_files *f = &d->files;
    uint8_t bytes[sizeof d->header];
    hd_err why_new = {0};
    uint64_t n = 0;
    int why = f->size(f->ctx, HD_DISK_STORE, &n);
    if (n > sizeof bytes) n = sizeof bytes;
    if (!why) why = f->read(f->ctx, HD_DISK_STORE, bytes, (size_t)n, 0);
    if (why) return failed(d, HD_DISK_STORE, why, err);
    const hd_status st = hd_disk_header_read(&d->header, bytes, (size_t)n, d->where, &why_new);
    if (st == HD_EFORMAT) return start_header(d, o, err);
    if (st == HD_OK) return check_header(d, o, err);
    return HD_FAIL(err, st, "%s", why_new.msg);
}

/* What is beyond the bytes that the store may have goes. */
static hd_status cut_files(const hd_disk *d, hd_err *err) {
    const hd_disk_files *f = &d->files;
    int why = f->cut(f->ctx, HD_DISK_STORE, sizeof d->header);
    for (int i = 0; !why && i < HD_N_KV_GROUPS; i++) {
        const disk_group *g = &d->groups[i];
        why = f->cut(f->ctx, (hd_disk_file)(HD_DISK_HEADS + i), head_at(g->n));
        if (!why) {
            why = f->cut(f->ctx, (hd_disk_file)(HD_DISK_PAGES + i), (uint64_t)g->n * g->stride);
        }
    }
    return why ? failed(d, HD_DISK_PAGES, why, err) : HD_OK;
}

static void take_head(hd_disk *d, hd_kv_group group, int32_t x, const hd_disk_head *bytes) {
    disk_group *g = &d->groups[group];
    hd_disk_head head;
    if (!hd_disk_head_read(&head, bytes, &d->header, group)) return;
    if (head.used >> (63 - DEPTH_BITS) || head.page >> DEPTH_BITS) return;
    if (find(g, head.name) != NONE) return;
    g->extents[x].name = head.name;
    g->extents[x].page = (int32_t)head.page;
    g->extents[x].used = head.used;
    if (d->tick < head.used) d->tick = head.used;
    add_page(g, x);
}

/* Reads the heads of a group. */
static hd_status scan(hd_disk *d, hd_kv_group group, hd_disk_head *some, hd_err *err) {
    const hd_disk_files *f = &d->files;
    const hd_disk_file file = (hd_disk_file)(HD_DISK_HEADS + group);
    uint64_t bytes;
    int why = f->size(f->ctx, file, &bytes);
    if (why) return failed(d, file, why, err);
    const uint64_t whole = bytes / sizeof(hd_disk_head);
    const int32_t n =
        whole < (uint64_t)d->groups[group].n ? (int32_t)whole : d->groups[group].n;
    for (int32_t x = 0; x < n; x += SCAN_HEADS) {
        const int32_t part = hd_min_i32(SCAN_HEADS, n - x);
        why = f->read(f->ctx, file, some, (size_t)part * sizeof *some, head_at(x));
        if (why) return failed(d, file, why, err);
        for (int32_t i = 0; i < part; i++) take_head(d, group, x + i, &some[i]);
    }
    return HD_OK;
}

static hd_status open_all(hd_disk *d, const hd_disk_options *o, hd_err *err) {
    HD_TRY(choose_extents(d, o, err));
    HD_TRY(take_index(d, err));
    HD_TRY(open_header(d, o, err));
    HD_TRY(cut_files(d, err));
    hd_disk_head *some = malloc(SCAN_HEADS * sizeof *some);
    if (!some) return HD_FAIL(err, HD_ENOMEM, "%s: no memory to read heads", d->where);
    hd_status st = HD_OK;
    for (int i = 0; st == HD_OK && i < HD_N_KV_GROUPS; i++) {
        st = scan(d, (hd_kv_group)i, some, err);
    }
    free(some);
    return st;
}

hd_status hd_disk_open(hd_disk **out, const hd_disk_options *o, hd_err *err) {
    *out = NULL;
    hd_disk *d = calloc(1, sizeof *d);
    if (!d) {
        o->files.close(o->files.ctx);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a store of KV pages");
    }
    d->files = o->files;
    d->where = strdup(o->where);
    const hd_status st =
        d->where ? open_all(d, o, err) : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    if (st != HD_OK) {
        hd_disk_close(d);
        return st;
    }
    *out = d;
    return HD_OK;
}

void hd_disk_close(hd_disk *d) {
    if (!d) return;
    for (int i = 0; i < HD_N_KV_GROUPS; i++) {
        disk_group *g = &d->groups[i];
        free(g->extents);
        free(g->buckets);
        hd_heap_deinit(&g->free);
        hd_heap_deinit(&g->evictable);
    }
    d->files.close(d->files.ctx);
    free(d->where);
    free(d);
}

const uint64_t *hd_disk_key(const hd_disk *d) {
    return d->header.key;
}

int hd_disk_clear(hd_disk *d) {
    hd_err err = {0};
    clear_index(d);
    if (draw(&d->header.generation, sizeof d->header.generation, &err) != HD_OK) {
        d->header.generation++;
    }
    hd_disk_header_seal(&d->header);
    const int why = write_header(d, &d->header);
    const hd_disk_files *f = &d->files;
    int first = why;
    for (int i = HD_DISK_HEADS; i < HD_N_DISK_FILES; i++) {
        const int cut = f->cut(f->ctx, (hd_disk_file)i, 0);
        if (!first) first = cut;
    }
    return first;
}

/* ---- figures and checks ---- */

hd_disk_stats hd_disk_read_stats(const hd_disk *d) {
    hd_disk_stats s = {.bytes = sizeof d->header};
    for (int i = 0; i < HD_N_KV_GROUPS; i++) {
        const disk_group *g = &d->groups[i];
        s.extents[i] = g->n;
        s.used[i] = g->n_pages;
        s.bytes += (uint64_t)g->n * (g->stride + sizeof(hd_disk_head));
        s.replaced[i] = g->replaced;
    }
    return s;
}

static hd_status broken(const hd_disk *d, const char *what, int32_t x, hd_err *err) {
    return HD_FAIL(err, HD_EINVAL, "%s: %s (%d)", d->where, what, x);
}

static hd_status check_group(const hd_disk *d, const disk_group *g, hd_err *err) {
    int32_t n_pages = 0;
    for (int32_t x = 0; x < g->n; x++) {
        const disk_extent *e = &g->extents[x];
        const bool has = e->state == EXTENT_HAS_PAGE, idle = has && e->n_readers == 0;
        if (hd_heap_has(&g->free, x) != (e->state == EXTENT_FREE)) {
            return broken(d, "a free extent is miscounted", x, err);
        }
        if (hd_heap_has(&g->evictable, x) != idle) {
            return broken(d, "a page that may leave is miscounted", x, err);
        }
        if (has && find(g, e->name) != x) return broken(d, "a page is not found", x, err);
        if (!has && e->n_readers) return broken(d, "readers without a page", x, err);
        n_pages += has;
    }
    return n_pages == g->n_pages ? HD_OK : broken(d, "pages are miscounted", n_pages, err);
}

hd_status hd_disk_check(const hd_disk *d, hd_err *err) {
    for (int i = 0; i < HD_N_KV_GROUPS; i++) HD_TRY(check_group(d, &d->groups[i], err));
    return HD_OK;
}
