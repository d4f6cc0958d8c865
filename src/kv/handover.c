/* handover.c - a page becomes a message, and a message becomes a page. */
#include "kv/handover.h"

#include <string.h>

#include "base/checked.h"
#include "base/checksum.h"

int32_t hd_handover_pages(const hd_handover *h) {
    return h->n_tokens > 0 ? (h->n_tokens - 1) / h->page_tokens : 0;
}

int32_t hd_page_range_at(const hd_page_range *r, uint32_t i, hd_kv_group *group) {
    const bool full = i < (uint32_t)r->n[HD_KV_FULL];
    *group = full ? HD_KV_FULL : HD_KV_WINDOW;
    return r->first[*group] + (int32_t)i - (full ? 0 : r->n[HD_KV_FULL]);
}

bool hd_page_range_fits(const hd_page_range *r, int32_t all) {
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        if (r->first[g] < 0 || r->n[g] < 0) return false;
        if (r->first[g] > all || r->n[g] > all - r->first[g]) return false;
    }
    return true;
}

static int32_t first_lacking(const hd_handover *h, int32_t from, hd_kv_group group) {
    return hd_cache_first_lacking(h->cache, h->salt, h->tokens, from, hd_handover_pages(h),
                                  group);
}

/* A FULL page is cached only below those before it. Of WINDOW pages, those within the lookback
 * before the end are read. */
void hd_handover_lacking(const hd_handover *h, int32_t lookback, hd_page_range *out) {
    const int32_t all = hd_handover_pages(h);
    const int32_t read = hd_max_i32(0, all * h->page_tokens - lookback) / h->page_tokens;
    out->first[HD_KV_FULL] = first_lacking(h, 0, HD_KV_FULL);
    out->first[HD_KV_WINDOW] = lookback ? first_lacking(h, read, HD_KV_WINDOW) : all;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) out->n[g] = all - out->first[g];
}

size_t hd_handover_bytes(const hd_handover *h, hd_kv_group group) {
    return sizeof(hd_page_head) + h->page_bytes[group];
}

/* A page with the digest belongs to this prompt at this place: entries depend on every token
 * before them. */
static uint64_t digest_of(const hd_handover *h, const hd_page_head *head, const void *bytes) {
    const size_t n = ((size_t)head->page + 1) * (size_t)h->page_tokens;
    const uint64_t place[] = {h->salt, head->group, head->page, head->bytes};
    uint64_t digest = hd_checksum(0, place, sizeof place);
    digest = hd_checksum(digest, h->tokens, n * sizeof *h->tokens);
    return hd_checksum(digest, bytes, (size_t)head->bytes);
}

static hd_status run_copies(const hd_handover *h, hd_err *err) {
    int32_t n;
    const hd_page_copy *copies = hd_cache_copies(h->cache, &n);
    if (h->ranks.copy) {
        h->ranks.copy(h->ranks.ctx, copies, n);
    } else {
        hd_kv_copy(h->kv, h->stream, copies, n);
    }
    hd_cache_copied(h->cache);
    return hd_stream_sync(h->stream, err);
}

void hd_handover_usable(const hd_handover *h, int32_t lookback, hd_page_range *out) {
    const int32_t n = hd_cache_usable(h->cache, h->salt, h->tokens, hd_handover_pages(h));
    const int32_t read = hd_max_i32(0, n * h->page_tokens - lookback) / h->page_tokens;
    *out = (hd_page_range){
        .first = {0, lookback ? read : n    },
          .n = {n, lookback ? n - read : 0}
    };
}

hd_status hd_handover_copy(const hd_handover *h, hd_kv_group group, int32_t page, void *out,
                           hd_err *err) {
    const hd_host_page host = hd_cache_export(h->cache, h->salt, h->tokens, page, group);
    if (host.n < 0) {
        return HD_FAIL(err, HD_EAGAIN, "page %d of the prompt is not in host memory", page);
    }
    HD_TRY(run_copies(h, err));
    size_t bytes;
    const void *data = hd_kv_host_page(h->kv, group, host, &bytes);
    memcpy(out, data, bytes);
    return HD_OK;
}

void hd_handover_seal(const hd_handover *h, hd_kv_group group, int32_t page, void *message) {
    hd_page_head head = {
        .group = (uint32_t)group, .page = (uint32_t)page, .bytes = h->page_bytes[group]};
    head.digest = digest_of(h, &head, (uint8_t *)message + sizeof head);
    memcpy(message, &head, sizeof head);
}

hd_status hd_handover_export(const hd_handover *h, hd_kv_group group, int32_t page, void *out,
                             hd_err *err) {
    HD_TRY(hd_handover_copy(h, group, page, (uint8_t *)out + sizeof(hd_page_head), err));
    hd_handover_seal(h, group, page, out);
    return HD_OK;
}

static hd_status check_head(const hd_handover *h, const hd_page_head *head, size_t n,
                            hd_err *err) {
    if (head->group >= HD_N_KV_GROUPS) {
        return HD_FAIL(err, HD_EFORMAT, "page message: KV group %u; must be below %d",
                       head->group, HD_N_KV_GROUPS);
    }
    if (head->page >= (uint32_t)hd_handover_pages(h)) {
        return HD_FAIL(err, HD_EFORMAT, "page message: page %u; the prompt has %d whole pages",
                       head->page, hd_handover_pages(h));
    }
    const size_t want = h->page_bytes[head->group];
    if (head->bytes != want || n - sizeof *head != want) {
        return HD_FAIL(err, HD_EFORMAT,
                       "page message: %llu bytes announced, %zu sent; a page has %zu",
                       (unsigned long long)head->bytes, n - sizeof *head, want);
    }
    return HD_OK;
}

hd_status hd_handover_check(const hd_handover *h, const void *message, size_t n, hd_err *err) {
    hd_page_head head;
    if (n < sizeof head) {
        return HD_FAIL(err, HD_EFORMAT, "page message: %zu bytes; its head has %zu", n,
                       sizeof head);
    }
    memcpy(&head, message, sizeof head);
    HD_TRY(check_head(h, &head, n, err));
    if (digest_of(h, &head, (const uint8_t *)message + sizeof head) != head.digest) {
        return HD_FAIL(err, HD_EFORMAT, "page message: the digest of page %u is wrong",
                       head.page);
    }
    return HD_OK;
}

hd_status hd_handover_place(const hd_handover *h, const void *message, hd_err *err) {
    hd_page_head head;
    memcpy(&head, message, sizeof head);
    const hd_kv_group group = (hd_kv_group)head.group;
    const int32_t page = (int32_t)head.page;
    HD_TRY(run_copies(h, err)); /* they may read host pages that are about to be reused */
    if (hd_cache_has(h->cache, h->salt, h->tokens, page, group)) return HD_OK;
    const hd_host_page host = hd_cache_import(h->cache, h->salt, h->tokens, page, group);
    if (host.n < 0) {
        return HD_FAIL(err, HD_EAGAIN, "no room in host memory for page %u of the prompt",
                       head.page);
    }
    size_t bytes;
    memcpy(hd_kv_host_page(h->kv, group, host, &bytes), (const uint8_t *)message + sizeof head,
           (size_t)head.bytes);
    if (!h->ranks.copy) return HD_OK;
    h->ranks.spread(h->ranks.ctx, group, host);
    return hd_stream_sync(h->stream, err);
}

hd_status hd_handover_import(const hd_handover *h, const void *message, size_t n, hd_err *err) {
    HD_TRY(hd_handover_check(h, message, n, err));
    return hd_handover_place(h, message, err);
}
