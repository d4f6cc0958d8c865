/* disk_index.c - extents by the names of their pages, and which is replaced next; see disk_index.h. */
#include "kv/disk_index.h"

#include <stdlib.h>

enum { NONE = -1, LEAST_BUCKETS = 64 };

static int32_t *bucket_of(const hd_disk_index *x, hd_page_name name) {
    return &x->buckets[name.lo & (uint64_t)(x->n_buckets - 1)];
}

int32_t hd_disk_index_find(const hd_disk_index *x, hd_page_name name) {
    if (!x->n) return NONE;
    int32_t i = *bucket_of(x, name);
    while (i != NONE && !hd_page_name_equal(x->extents[i].name, name)) i = x->extents[i].next;
    return i;
}

void hd_disk_index_update(hd_disk_index *x, int32_t extent) {
    const hd_disk_extent *e = &x->extents[extent];
    const int64_t key = (int64_t)(e->used << HD_DISK_DEPTH_BITS) - e->page;
    if (e->state == HD_EXTENT_HAS_PAGE && e->n_readers == 0) {
        hd_heap_put(&x->evictable, extent, key);
    } else {
        hd_heap_remove(&x->evictable, extent);
    }
    if (e->state == HD_EXTENT_FREE) {
        hd_heap_put(&x->free, extent, extent);
    } else {
        hd_heap_remove(&x->free, extent);
    }
}

void hd_disk_index_add(hd_disk_index *x, int32_t extent) {
    hd_disk_extent *e = &x->extents[extent];
    int32_t *bucket = bucket_of(x, e->name);
    e->state = HD_EXTENT_HAS_PAGE;
    e->next = *bucket;
    *bucket = extent;
    x->n_pages++;
    hd_disk_index_update(x, extent);
}

void hd_disk_index_drop(hd_disk_index *x, int32_t extent) {
    hd_disk_extent *e = &x->extents[extent];
    int32_t *at = bucket_of(x, e->name);
    while (*at != extent) at = &x->extents[*at].next;
    *at = e->next;
    *e = (hd_disk_extent){.state = HD_EXTENT_FREE};
    x->n_pages--;
    hd_disk_index_update(x, extent);
}

int32_t hd_disk_index_take(hd_disk_index *x) {
    if (!x->n) return NONE;
    int32_t extent = hd_heap_min(&x->free);
    if (extent != NONE) return extent;
    extent = hd_heap_min(&x->evictable);
    if (extent == NONE) return NONE;
    hd_disk_index_drop(x, extent);
    x->replaced++;
    return extent;
}

void hd_disk_index_drop_all(hd_disk_index *x) {
    for (int32_t i = 0; i < x->n; i++) {
        hd_disk_extent *e = &x->extents[i];
        if (e->state == HD_EXTENT_HAS_PAGE && e->n_readers == 0) {
            hd_disk_index_drop(x, i);
        } else if (e->state != HD_EXTENT_FREE) {
            e->lost = true;
        }
    }
}

hd_status hd_disk_index_open(hd_disk_index *x, int32_t n, hd_err *err) {
    x->n_buckets = LEAST_BUCKETS;
    while (x->n_buckets < n) x->n_buckets *= 2;
    x->extents = calloc((size_t)n, sizeof *x->extents);
    x->buckets = calloc((size_t)x->n_buckets, sizeof *x->buckets);
    if (!x->extents || !x->buckets) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for an index of %d pages", n);
    }
    HD_TRY(hd_heap_init(&x->free, n, err));
    HD_TRY(hd_heap_init(&x->evictable, n, err));
    for (int32_t b = 0; b < x->n_buckets; b++) x->buckets[b] = NONE;
    for (x->n = 0; x->n < n; x->n++) hd_disk_index_update(x, x->n);
    return HD_OK;
}

void hd_disk_index_close(hd_disk_index *x) {
    free(x->extents);
    free(x->buckets);
    hd_heap_deinit(&x->free);
    hd_heap_deinit(&x->evictable);
}

static hd_status broken(const char *where, const char *what, int32_t i, hd_err *err) {
    return HD_FAIL(err, HD_EINVAL, "%s: %s (%d)", where, what, i);
}

hd_status hd_disk_index_check(const hd_disk_index *x, const char *where, hd_err *err) {
    int32_t n_pages = 0;
    for (int32_t i = 0; i < x->n; i++) {
        const hd_disk_extent *e = &x->extents[i];
        const bool has = e->state == HD_EXTENT_HAS_PAGE, idle = has && e->n_readers == 0;
        if (hd_heap_has(&x->free, i) != (e->state == HD_EXTENT_FREE)) {
            return broken(where, "a free extent is miscounted", i, err);
        }
        if (hd_heap_has(&x->evictable, i) != idle) {
            return broken(where, "a page that may leave is miscounted", i, err);
        }
        if (has && hd_disk_index_find(x, e->name) != i) {
            return broken(where, "a page is not found", i, err);
        }
        if (!has && e->n_readers) return broken(where, "readers without a page", i, err);
        n_pages += has;
    }
    return n_pages == x->n_pages ? HD_OK : broken(where, "pages are miscounted", n_pages, err);
}
