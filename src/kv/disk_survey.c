/* disk_survey.c - counts pages of a store by their heads; see disk_survey.h. */
#include "kv/disk_survey.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static hd_status failed(const char *where, hd_disk_file f, int why, hd_err *err) {
    return HD_FAIL(err, HD_EIO, "%s/%s: %s", where, hd_disk_file_name(f), strerror(why));
}

static hd_status read_header(hd_disk_survey *s, const hd_disk_files *f, const char *where,
                             hd_err *err) {
    uint8_t bytes[sizeof s->header];
    uint64_t n = 0;
    int why = f->size(f->ctx, HD_DISK_STORE, &n);
    if (n > sizeof bytes) n = sizeof bytes;
    if (!why) why = f->read(f->ctx, HD_DISK_STORE, bytes, (size_t)n, 0);
    if (why) return failed(where, HD_DISK_STORE, why, err);
    return hd_disk_header_read(&s->header, bytes, (size_t)n, where, err);
}

/* Whether a head's extent has its page. */
static bool is_right(const hd_disk_files *f, const hd_disk_head *head, uint64_t at,
                     void *page) {
    const hd_disk_file file = (hd_disk_file)(HD_DISK_PAGES + head->group);
    return f->read(f->ctx, file, page, (size_t)head->bytes, at) == 0 &&
           hd_disk_head_fits(head, page);
}

/* page: memory for one, or NULL. */
static hd_status read_group(hd_disk_survey *s, const hd_disk_files *f, hd_kv_group group,
                            void *page, const char *where, hd_err *err) {
    const hd_disk_file file = (hd_disk_file)(HD_DISK_HEADS + group);
    const uint64_t stride = hd_disk_stride((size_t)s->header.page_bytes[group]);
    uint64_t bytes;
    int why = f->size(f->ctx, file, &bytes);
    for (uint64_t x = 0; !why && (x + 1) * sizeof(hd_disk_head) <= bytes; x++) {
        uint8_t some[sizeof(hd_disk_head)];
        hd_disk_head head;
        why = f->read(f->ctx, file, some, sizeof some, x * sizeof some);
        if (why || !hd_disk_head_read(&head, some, &s->header, group)) continue;
        s->pages[group]++;
        if (page && !is_right(f, &head, x * stride, page)) s->wrong[group]++;
    }
    return why ? failed(where, file, why, err) : HD_OK;
}

static hd_status read_all(hd_disk_survey *s, const hd_disk_files *f, bool check,
                          const char *where, hd_err *err) {
    hd_status st = HD_OK;
    for (int g = 0; st == HD_OK && g < HD_N_KV_GROUPS; g++) {
        const size_t n = (size_t)s->header.page_bytes[g];
        void *page = check ? malloc(n + 1) : NULL;
        if (check && !page) return HD_FAIL(err, HD_ENOMEM, "no memory for a page of %zu", n);
        st = read_group(s, f, (hd_kv_group)g, page, where, err);
        free(page);
    }
    return st;
}

hd_status hd_disk_survey_read(hd_disk_survey *out, const hd_disk_files *f, const char *where,
                              bool check, hd_err *err) {
    *out = (hd_disk_survey){0};
    HD_TRY(read_header(out, f, where, err));
    for (int i = 0; i < HD_N_DISK_FILES; i++) {
        uint64_t n;
        const int why = f->size(f->ctx, (hd_disk_file)i, &n);
        if (why) return failed(where, (hd_disk_file)i, why, err);
        out->bytes += n;
    }
    return read_all(out, f, check, where, err);
}
