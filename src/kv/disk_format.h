/* disk_format.h - what the files of the disk tier contain, and whether bytes are that.
 *
 * A store is five files of a folder. `store` has one header. For each KV group, `*.heads` is an
 * array of heads and `*.pages` one of extents, a page in each, hd_disk_stride() bytes apart. Head
 * i says which page extent i has, and has a checksum of it. So no order of writes matters: what a
 * crash leaves half done has a wrong checksum, and a head with the extent it belongs to is a page
 * with its name, whenever they were written. All integers are of this machine's byte order. */
#ifndef HD_KV_DISK_FORMAT_H
#define HD_KV_DISK_FORMAT_H

#include <stddef.h>

#include "base/status.h"
#include "hadal_types.h"
#include "kv/page_name.h"

enum { HD_DISK_VERSION = 1, HD_DISK_IDENTITY = 400 };

typedef struct hd_disk_header {
    char magic[8];
    uint32_t version, page_tokens;
    uint64_t page_bytes[HD_N_KV_GROUPS]; /* 0: the model has no such pages */
    uint64_t key[2];                     /* of names */
    uint64_t generation;                 /* heads of others are of pages that were dropped */
    char identity[HD_DISK_IDENTITY];     /* text: model, weights and what computed the pages */
    uint64_t checksum;                   /* of what precedes it */
} hd_disk_header;
_Static_assert(sizeof(hd_disk_header) == 464, "the header as it lies in the file");

typedef struct hd_disk_head {
    uint32_t magic, group;
    uint64_t generation;
    hd_page_name name;
    uint64_t used; /* the larger, the later it was written */
    uint32_t page; /* of its prefix */
    uint32_t zero;
    uint64_t bytes, content; /* of the page, and their checksum */
    uint64_t unused[7];      /* 0 */
    uint64_t checksum;       /* of what precedes it */
} hd_disk_head;
_Static_assert(sizeof(hd_disk_head) == 128, "a head never crosses a sector");

/* Bytes from one extent to the next. */
size_t hd_disk_stride(size_t page_bytes);

/* Sets magic, version and checksum. */
void hd_disk_header_seal(hd_disk_header *h);

/* HD_EINVAL: bytes[n] are something else, or of another version. HD_EFORMAT: a header that was not
 * written to its end. where: the file, for the error. */
hd_status hd_disk_header_read(hd_disk_header *out, const void *bytes, size_t n,
                              const char *where, hd_err *err);

/* Sets magic, generation, bytes, content and checksum for a page that lies at `page`. */
void hd_disk_head_seal(hd_disk_head *head, const hd_disk_header *h, const void *page);

/* Whether bytes[sizeof *out] are a head of a page of the group in this store. */
bool hd_disk_head_read(hd_disk_head *out, const void *bytes, const hd_disk_header *h,
                       hd_kv_group group);

/* Whether page[head->bytes] is the page that the head was written for. */
bool hd_disk_head_fits(const hd_disk_head *head, const void *page);

#endif
