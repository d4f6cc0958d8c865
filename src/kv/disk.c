/* disk.c - a store: its files, its index of them, and who may use both when. */
#include "kv/disk.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/checked.h"
#include "kv/disk_index.h"

enum { NONE = -1, SCAN_HEADS = 4096, MOST_PAGES = 1 << 30 };

struct hd_disk {
    hd_disk_files files;
    char *where;
    uint64_t session[2]; /* drawn when it was opened */

    pthread_mutex_t lock; /* guards what follows, but the header's key, which never changes */
    pthread_cond_t rest;  /* n_transfers is 0; it is cleared */
    int32_t n_owners, n_transfers;
    bool clearing; /* transfers wait */
    hd_disk_header header;
    uint64_t tick;
    hd_disk_index groups[HD_N_KV_GROUPS];
    size_t stride[HD_N_KV_GROUPS]; /* read-only after open */
};

/* ---- the index ---- */

bool hd_disk_has(hd_disk *d, hd_kv_group group, hd_page_name name) {
    pthread_mutex_lock(&d->lock);
    const bool has = hd_disk_index_find(&d->groups[group], name) != NONE;
    pthread_mutex_unlock(&d->lock);
    return has;
}

uint64_t hd_disk_begin_use(hd_disk *d) {
    pthread_mutex_lock(&d->lock);
    const uint64_t time = ++d->tick;
    pthread_mutex_unlock(&d->lock);
    return time;
}

bool hd_disk_use(hd_disk *d, hd_kv_group group, hd_page_name name, uint64_t time) {
    pthread_mutex_lock(&d->lock);
    hd_disk_index *g = &d->groups[group];
    const int32_t x = hd_disk_index_find(g, name);
    const bool has = x != NONE && !g->extents[x].lost;
    if (has) {
        g->extents[x].used = time;
        hd_disk_index_update(g, x);
    }
    pthread_mutex_unlock(&d->lock);
    return has;
}

int32_t hd_disk_begin_read(hd_disk *d, hd_kv_group group, hd_page_name name) {
    pthread_mutex_lock(&d->lock);
    hd_disk_index *g = &d->groups[group];
    int32_t x = hd_disk_index_find(g, name);
    if (x != NONE && g->extents[x].lost) x = NONE;
    if (x != NONE) {
        g->extents[x].n_readers++;
        hd_disk_index_update(g, x);
    }
    pthread_mutex_unlock(&d->lock);
    return x;
}

void hd_disk_end_read(hd_disk *d, hd_kv_group group, int32_t extent, bool good) {
    pthread_mutex_lock(&d->lock);
    hd_disk_index *g = &d->groups[group];
    hd_disk_extent *e = &g->extents[extent];
    e->n_readers--;
    e->lost = e->lost || !good;
    if (e->lost && e->n_readers == 0) {
        hd_disk_index_drop(g, extent);
    } else {
        hd_disk_index_update(g, extent);
    }
    pthread_mutex_unlock(&d->lock);
}

int32_t hd_disk_begin_write(hd_disk *d, hd_kv_group group, hd_page_name name, int32_t page) {
    pthread_mutex_lock(&d->lock);
    hd_disk_index *g = &d->groups[group];
    const int32_t x = hd_disk_index_take(g);
    if (x != NONE) {
        g->extents[x] = (hd_disk_extent){.state = HD_EXTENT_WRITING,
                                         .name = name,
                                         .page = page,
                                         .used = d->tick,
                                         .next = NONE};
        hd_disk_index_update(g, x);
    }
    pthread_mutex_unlock(&d->lock);
    return x;
}

void hd_disk_end_write(hd_disk *d, hd_kv_group group, int32_t extent, bool good) {
    pthread_mutex_lock(&d->lock);
    hd_disk_index *g = &d->groups[group];
    hd_disk_extent *e = &g->extents[extent];
    if (good && !e->lost && hd_disk_index_find(g, e->name) == NONE) {
        hd_disk_index_add(g, extent);
    } else {
        *e = (hd_disk_extent){.state = HD_EXTENT_FREE};
        hd_disk_index_update(g, extent);
    }
    pthread_mutex_unlock(&d->lock);
}

/* ---- bytes ---- */

static uint64_t head_at(int32_t extent) {
    return (uint64_t)extent * sizeof(hd_disk_head);
}

static uint64_t page_at(const hd_disk *d, hd_kv_group group, int32_t extent) {
    return (uint64_t)extent * d->stride[group];
}

/* Returns whether a transfer may run, and what its head and extent belong to. */
static int begin_transfer(hd_disk *d, const hd_disk_index *g, int32_t extent, hd_disk_extent *e,
                          hd_disk_header *h) {
    pthread_mutex_lock(&d->lock);
    while (d->clearing) pthread_cond_wait(&d->rest, &d->lock);
    if (e) *e = g->extents[extent];
    if (h) *h = d->header;
    const bool lost = e && e->lost;
    d->n_transfers += !lost;
    pthread_mutex_unlock(&d->lock);
    return lost ? ECANCELED : 0;
}

static void end_transfer(hd_disk *d) {
    pthread_mutex_lock(&d->lock);
    if (--d->n_transfers == 0) pthread_cond_broadcast(&d->rest);
    pthread_mutex_unlock(&d->lock);
}

static int read_page(const hd_disk *d, hd_kv_group group, int32_t extent,
                     const hd_disk_extent *e, const hd_disk_header *h, void *page) {
    const hd_disk_files *f = &d->files;
    uint8_t bytes[sizeof(hd_disk_head)];
    hd_disk_head head;
    int why = f->read(f->ctx, (hd_disk_file)(HD_DISK_HEADS + group), bytes, sizeof bytes,
                      head_at(extent));
    if (why) return why;
    if (!hd_disk_head_read(&head, bytes, h, group) || !hd_page_name_equal(head.name, e->name)) {
        return EBADMSG;
    }
    why = f->read(f->ctx, (hd_disk_file)(HD_DISK_PAGES + group), page, (size_t)head.bytes,
                  page_at(d, group, extent));
    if (why) return why;
    return hd_disk_head_fits(&head, page) ? 0 : EBADMSG;
}

int hd_disk_read(hd_disk *d, hd_kv_group group, int32_t extent, void *page) {
    hd_disk_extent e;
    hd_disk_header h;
    int why = begin_transfer(d, &d->groups[group], extent, &e, &h);
    if (why) return why;
    why = read_page(d, group, extent, &e, &h, page);
    end_transfer(d);
    return why;
}

static int write_page(const hd_disk *d, hd_kv_group group, int32_t extent,
                      const hd_disk_extent *e, const hd_disk_header *h, const void *page) {
    const hd_disk_files *f = &d->files;
    hd_disk_head head = {
        .group = (uint32_t)group, .name = e->name, .used = e->used, .page = (uint32_t)e->page};
    hd_disk_head_seal(&head, h, page);
    const int why = f->write(f->ctx, (hd_disk_file)(HD_DISK_PAGES + group), page,
                             (size_t)head.bytes, page_at(d, group, extent));
    if (why) return why;
    return f->write(f->ctx, (hd_disk_file)(HD_DISK_HEADS + group), &head, sizeof head,
                    head_at(extent));
}

int hd_disk_write(hd_disk *d, hd_kv_group group, int32_t extent, const void *page) {
    hd_disk_extent e;
    hd_disk_header h;
    int why = begin_transfer(d, &d->groups[group], extent, &e, &h);
    if (why) return why;
    why = write_page(d, group, extent, &e, &h, page);
    end_transfer(d);
    return why;
}

int hd_disk_sync(hd_disk *d) {
    int first = begin_transfer(d, NULL, 0, NULL, NULL);
    for (int f = HD_DISK_HEADS; f < HD_N_DISK_FILES; f++) {
        const int why = d->files.sync(d->files.ctx, (hd_disk_file)f);
        if (!first) first = why;
    }
    end_transfer(d);
    return first;
}

/* ---- opening ---- */

static hd_status failed(const hd_disk *d, hd_disk_file f, int why, hd_err *err) {
    return HD_FAIL(err, HD_EIO, "%s/%s: %s", d->where, hd_disk_file_name(f), strerror(why));
}

/* Half of the bytes for each group that the model has. */
static hd_status open_index(hd_disk *d, const hd_disk_options *o, hd_err *err) {
    const uint64_t parts = o->page_bytes[HD_KV_WINDOW] ? 2 : 1;
    const uint64_t room = o->bytes > sizeof d->header ? o->bytes - sizeof d->header : 0;
    for (int i = 0; i < HD_N_KV_GROUPS; i++) {
        if (!o->page_bytes[i]) continue;
        d->stride[i] = hd_disk_stride(o->page_bytes[i]);
        const uint64_t n = room / parts / (d->stride[i] + sizeof(hd_disk_head));
        if (n == 0) {
            return HD_FAIL(err, HD_EINVAL, "%s: %llu bytes hold no page of %zu bytes", d->where,
                           (unsigned long long)o->bytes, o->page_bytes[i]);
        }
        HD_TRY(
            hd_disk_index_open(&d->groups[i], (int32_t)(n < MOST_PAGES ? n : MOST_PAGES), err));
    }
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
        const hd_disk_index *g = &d->groups[i];
        why = f->cut(f->ctx, (hd_disk_file)(HD_DISK_HEADS + i), head_at(g->n));
        if (!why) {
            why = f->cut(f->ctx, (hd_disk_file)(HD_DISK_PAGES + i),
                         (uint64_t)g->n * d->stride[i]);
        }
    }
    return why ? failed(d, HD_DISK_PAGES, why, err) : HD_OK;
}

static void take_head(hd_disk *d, hd_kv_group group, int32_t x, const hd_disk_head *bytes) {
    hd_disk_index *g = &d->groups[group];
    hd_disk_head head;
    if (!hd_disk_head_read(&head, bytes, &d->header, group)) return;
    if (head.used >> (63 - HD_DISK_DEPTH_BITS) || head.page >> HD_DISK_DEPTH_BITS) return;
    if (hd_disk_index_find(g, head.name) != NONE) return;
    g->extents[x].name = head.name;
    g->extents[x].page = (int32_t)head.page;
    g->extents[x].used = head.used;
    if (d->tick < head.used) d->tick = head.used;
    hd_disk_index_add(g, x);
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
    HD_TRY(draw(d->session, sizeof d->session, err));
    HD_TRY(open_index(d, o, err));
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
    d->n_owners = 1;
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->rest, NULL);
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

hd_disk *hd_disk_share(hd_disk *d) {
    pthread_mutex_lock(&d->lock);
    d->n_owners++;
    pthread_mutex_unlock(&d->lock);
    return d;
}

void hd_disk_close(hd_disk *d) {
    if (!d) return;
    pthread_mutex_lock(&d->lock);
    const bool last = --d->n_owners == 0;
    pthread_mutex_unlock(&d->lock);
    if (!last) return;
    for (int i = 0; i < HD_N_KV_GROUPS; i++) {
        hd_disk_index_close(&d->groups[i]);
    }
    d->files.close(d->files.ctx);
    pthread_mutex_destroy(&d->lock);
    pthread_cond_destroy(&d->rest);
    free(d->where);
    free(d);
}

const uint64_t *hd_disk_key(const hd_disk *d) {
    return d->header.key;
}

hd_page_name hd_disk_root(const hd_disk *d, uint64_t weights) {
    const hd_page_name none = {0, 0};
    return weights ? hd_page_name_of(d->session, none, weights, NULL, 0) : none;
}

/* New heads get another generation than those that may still be on the disk. */
static int clear_files(hd_disk *d) {
    const hd_disk_files *f = &d->files;
    hd_err err = {0};
    if (draw(&d->header.generation, sizeof d->header.generation, &err) != HD_OK) {
        d->header.generation++;
    }
    hd_disk_header_seal(&d->header);
    int first = write_header(d, &d->header);
    for (int i = HD_DISK_HEADS; i < HD_N_DISK_FILES; i++) {
        const int cut = f->cut(f->ctx, (hd_disk_file)i, 0);
        if (!first) first = cut;
    }
    return first;
}

int hd_disk_clear(hd_disk *d) {
    pthread_mutex_lock(&d->lock);
    while (d->clearing) pthread_cond_wait(&d->rest, &d->lock);
    d->clearing = true;
    while (d->n_transfers) pthread_cond_wait(&d->rest, &d->lock);
    for (int i = 0; i < HD_N_KV_GROUPS; i++) hd_disk_index_drop_all(&d->groups[i]);
    const int why = clear_files(d);
    d->clearing = false;
    pthread_cond_broadcast(&d->rest);
    pthread_mutex_unlock(&d->lock);
    return why;
}

/* ---- figures and checks ---- */

hd_disk_stats hd_disk_read_stats(hd_disk *d) {
    hd_disk_stats s = {.bytes = sizeof d->header};
    pthread_mutex_lock(&d->lock);
    for (int i = 0; i < HD_N_KV_GROUPS; i++) {
        const hd_disk_index *g = &d->groups[i];
        s.extents[i] = g->n;
        s.used[i] = g->n_pages;
        s.bytes += (uint64_t)g->n * (d->stride[i] + sizeof(hd_disk_head));
        s.replaced[i] = g->replaced;
    }
    pthread_mutex_unlock(&d->lock);
    return s;
}

hd_status hd_disk_check(hd_disk *d, hd_err *err) {
    hd_status st = HD_OK;
    pthread_mutex_lock(&d->lock);
    for (int i = 0; st == HD_OK && i < HD_N_KV_GROUPS; i++) {
        st = hd_disk_index_check(&d->groups[i], d->where, err);
    }
    pthread_mutex_unlock(&d->lock);
    return st;
}
