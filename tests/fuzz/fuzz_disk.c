/* fuzz_disk.c - any bytes as the files of a store of KV pages: opened or refused, and what is read
 * is a page whose checksum is right. Then the store works.
 *
 * The input is cut in five, at places that its first bytes choose; another first byte makes the
 * header right, so that heads and pages are looked at. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/disk_files.h"
#include "kv/disk.h"
#include "kv/disk_survey.h"

enum { PAGE_BYTES = 96, CUTS = HD_N_DISK_FILES };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool good) {
    if (!good) abort();
}

static void put(fake_disk *f, hd_disk_file file, const void *bytes, size_t n) {
    const hd_disk_files files = fake_disk_files(f);
    must(files.write(f, file, bytes, n, 0) == 0);
}

/* A header of the first store that this program opened. */
static const hd_disk_header *good_header(void) {
    static hd_disk_header h;
    if (h.version == 0) {
        h = (hd_disk_header){
            .page_tokens = 8, .page_bytes = {PAGE_BYTES, PAGE_BYTES},
                 .identity = "fuzz"
        };
        hd_disk_header_seal(&h);
    }
    return &h;
}

/* Heads of the input with a right checksum: everything else in them is any bytes. */
static void seal_heads(fake_disk *f, hd_kv_group group) {
    fake_file *file = &f->files[HD_DISK_HEADS + group];
    uint8_t page[PAGE_BYTES] = {0};
    for (uint64_t at = 0; at + sizeof(hd_disk_head) <= file->n; at += sizeof(hd_disk_head)) {
        hd_disk_head head;
        memcpy(&head, file->now + at, sizeof head);
        head.group = (uint32_t)group;
        hd_disk_head_seal(&head, good_header(), page);
        memcpy(file->now + at, &head, sizeof head);
    }
}

static void use(fake_disk *f, uint8_t name) {
    hd_disk *d;
    const hd_disk_options o = {
        .files = fake_disk_files(f),
        .where = "here",
        .bytes = 1 << 17,
        .page_tokens = 8,
        .page_bytes = {PAGE_BYTES, PAGE_BYTES},
        .identity = "fuzz"
    };
    if (hd_disk_open(&d, &o, NULL) != HD_OK) return;
    must(hd_disk_check(d, NULL) == HD_OK);
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        uint8_t page[PAGE_BYTES];
        const hd_page_name any = {name, name};
        int32_t x = hd_disk_begin_read(d, (hd_kv_group)g, any);
        if (x >= 0) {
            hd_disk_end_read(d, (hd_kv_group)g, x,
                             hd_disk_read(d, (hd_kv_group)g, x, page) == 0);
        }
        if (hd_disk_has(d, (hd_kv_group)g, any)) continue;
        x = hd_disk_begin_write(d, (hd_kv_group)g, any, 0);
        must(x >= 0);
        memset(page, name, sizeof page);
        must(hd_disk_write(d, (hd_kv_group)g, x, page) == 0);
        hd_disk_end_write(d, (hd_kv_group)g, x, true);
        x = hd_disk_begin_read(d, (hd_kv_group)g, any);
        must(x >= 0 && hd_disk_read(d, (hd_kv_group)g, x, page) == 0 && page[0] == name);
        hd_disk_end_read(d, (hd_kv_group)g, x, true);
    }
    must(hd_disk_check(d, NULL) == HD_OK);
    must(fake_disk_bytes(f) <= o.bytes);
    hd_disk_close(d);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (n < CUTS + 2) return 0;
    fake_disk f;
    const uint8_t *cuts = data + 2;
    const bool sealed = data[0] & 1, heads = data[0] & 2;
    const uint8_t name = data[1];
    data += CUTS + 2;
    n -= CUTS + 2;
    fake_disk_init(&f, 0);
    for (int i = 0; i < HD_N_DISK_FILES; i++) {
        const size_t most = (size_t)cuts[i] * 16, some = n < most ? n : most;
        put(&f, (hd_disk_file)i, data, some);
        data += some;
        n -= some;
    }
    if (sealed) put(&f, HD_DISK_STORE, good_header(), sizeof(hd_disk_header));
    for (int g = 0; heads && g < HD_N_KV_GROUPS; g++) seal_heads(&f, (hd_kv_group)g);
    hd_disk_survey survey;
    const hd_disk_files files = fake_disk_files(&f);
    (void)hd_disk_survey_read(&survey, &files, "here", true, NULL);
    use(&f, name);
    fake_disk_deinit(&f);
    return 0;
}
