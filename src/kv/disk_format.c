/* disk_format.c - seals and checks headers and heads; see disk_format.h. */
#include "kv/disk_format.h"

#include <string.h>

#include "base/checksum.h"

enum { ALIGN = 4096, HEAD_MAGIC = 0x6b764864 };

static const char magic[8] = "hadalkv";

size_t hd_disk_stride(size_t page_bytes) {
    return (page_bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static uint64_t header_checksum(const hd_disk_header *h) {
    return hd_checksum(HD_DISK_VERSION, h, offsetof(hd_disk_header, checksum));
}

void hd_disk_header_seal(hd_disk_header *h) {
    memcpy(h->magic, magic, sizeof magic);
    h->version = HD_DISK_VERSION;
    h->checksum = header_checksum(h);
}

static bool is_zero(const uint8_t *bytes, size_t n) {
    size_t i = 0;
    while (i < n && bytes[i] == 0) i++;
    return i == n;
}

hd_status hd_disk_header_read(hd_disk_header *out, const void *bytes, size_t n,
                              const char *where, hd_err *err) {
    hd_disk_header h;
    if (n < sizeof h || is_zero(bytes, sizeof h)) {
        return HD_FAIL(err, HD_EFORMAT, "%s: no header of a store of KV pages", where);
    }
    memcpy(&h, bytes, sizeof h);
    if (memcmp(h.magic, magic, sizeof magic) != 0) {
        return HD_FAIL(err, HD_EINVAL, "%s: not a store of KV pages", where);
    }
    if (h.version != HD_DISK_VERSION) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s: version %u of the format instead of %d; hadal kv drop deletes it",
                       where, h.version, HD_DISK_VERSION);
    }
    if (h.checksum != header_checksum(&h) || !memchr(h.identity, 0, sizeof h.identity)) {
        return HD_FAIL(err, HD_EFORMAT, "%s: the header's checksum is wrong", where);
    }
    *out = h;
    return HD_OK;
}

static uint64_t head_checksum(const hd_disk_head *head) {
    return hd_checksum(HEAD_MAGIC, head, offsetof(hd_disk_head, checksum));
}

/* Bound to the page's name, so that no other page's bytes fit. */
static uint64_t content_checksum(const hd_disk_head *head, const void *page) {
    return hd_checksum(head->name.lo ^ head->group, page, (size_t)head->bytes);
}

void hd_disk_head_seal(hd_disk_head *head, const hd_disk_header *h, const void *page) {
    head->magic = HEAD_MAGIC;
    head->generation = h->generation;
    head->bytes = h->page_bytes[head->group];
    head->content = content_checksum(head, page);
    head->checksum = head_checksum(head);
}

bool hd_disk_head_read(hd_disk_head *out, const void *bytes, const hd_disk_header *h,
                       hd_kv_group group) {
    memcpy(out, bytes, sizeof *out);
    return out->magic == HEAD_MAGIC && out->group == (uint32_t)group &&
           out->generation == h->generation && out->bytes == h->page_bytes[group] &&
           out->checksum == head_checksum(out);
}

bool hd_disk_head_fits(const hd_disk_head *head, const void *page) {
    return head->content == content_checksum(head, page);
}
