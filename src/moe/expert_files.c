/* expert_files.c - see expert_files.h. */
#define _GNU_SOURCE /* O_DIRECT */
#include "moe/expert_files.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GAP = 64 << 10 }; /* bytes between two pieces that are rather read than skipped */

typedef struct expert_file {
    char *path;
    int fd; /* -1: not open */
    size_t bytes;
    struct timespec changed;
    bool direct;
} expert_file;

struct hd_expert_files {
    expert_file *all;
    int32_t n;
};

/* Bytes of a file that are read at once, whole pages. */
typedef struct span {
    int32_t file;
    size_t at, end;
    size_t to;
} span;

/* ---- spans ---- */

static bool lies_before(const hd_expert_piece *a, const hd_expert_piece *b) {
    return a->file != b->file ? a->file < b->file : a->at < b->at;
}

/* Sorts the pieces that have bytes, by their places. Returns how many. */
static int32_t in_order(const hd_expert_piece *pieces, int32_t n, int32_t *order) {
    int32_t k = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t at = k;
        if (pieces[i].bytes == 0) continue;
        while (at > 0 && lies_before(&pieces[i], &pieces[order[at - 1]])) at--;
        memmove(order + at + 1, order + at, (size_t)(k - at) * sizeof *order);
        order[at] = i;
        k++;
    }
    return k;
}

static size_t page_before(size_t at) {
    return at / HD_EXPERT_PAGE * HD_EXPERT_PAGE;
}

static size_t page_behind(size_t at) {
    return page_before(at + HD_EXPERT_PAGE - 1);
}

/* Joins the pieces into spans. of[i] is the span of piece i, -1: it has no bytes. */
static int32_t make_spans(const hd_expert_piece *pieces, int32_t n, span *spans, int32_t *of) {
    int32_t order[HD_EXPERT_PIECES], n_spans = 0;
    assert(n <= HD_EXPERT_PIECES);
    for (int32_t i = 0; i < n; i++) of[i] = -1;
    const int32_t k = in_order(pieces, n, order);
    for (int32_t i = 0; i < k; i++) {
        const hd_expert_piece *p = &pieces[order[i]];
        span *last = n_spans ? &spans[n_spans - 1] : NULL;
        if (!last || last->file != p->file || p->at > last->end + GAP) {
            last = &spans[n_spans++];
            *last = (span){.file = p->file, .at = page_before(p->at)};
        }
        const size_t end = page_behind(p->at + p->bytes);
        if (end > last->end) last->end = end;
        of[order[i]] = n_spans - 1;
    }
    for (int32_t i = 1; i < n_spans; i++) {
        spans[i].to = spans[i - 1].to + (spans[i - 1].end - spans[i - 1].at);
    }
    return n_spans;
}

size_t hd_expert_files_plan(hd_expert_piece *pieces, int32_t n) {
    span spans[HD_EXPERT_PIECES];
    int32_t of[HD_EXPERT_PIECES];
    const int32_t n_spans = make_spans(pieces, n, spans, of);
    for (int32_t i = 0; i < n; i++) {
        if (of[i] < 0) continue;
        pieces[i].to = spans[of[i]].to + (pieces[i].at - spans[of[i]].at);
    }
    if (n_spans == 0) return 0;
    const span *last = &spans[n_spans - 1];
    return last->to + (last->end - last->at);
}

/* ---- opening ---- */

/* Whether the file system reads with O_DIRECT; some find out only when they are asked to. */
static bool reads_directly(int fd, size_t bytes) {
    void *page = NULL;
    if (bytes == 0 || posix_memalign(&page, HD_EXPERT_PAGE, HD_EXPERT_PAGE) != 0) return false;
    const ssize_t got = pread(fd, page, HD_EXPERT_PAGE, 0);
    free(page);
    return got > 0;
}

static void open_fd(expert_file *f, bool direct) {
    const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
    f->fd = direct ? open(f->path, flags | O_DIRECT) : -1;
    f->direct = f->fd >= 0 && reads_directly(f->fd, f->bytes);
    if (f->direct) return;
    if (f->fd >= 0) close(f->fd);
    f->fd = open(f->path, flags);
}

static hd_status refuse(const expert_file *f, const char *why, hd_err *err) {
    return HD_FAIL(err, HD_EIO, "%s: %s", f->path, why);
}

static hd_status open_file(expert_file *f, const char *path, size_t bytes, bool direct,
                           hd_err *err) {
    struct stat info;
    f->path = strdup(path);
    f->bytes = bytes;
    if (!f->path) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for its name", path);
    open_fd(f, direct);
    if (f->fd < 0 || fstat(f->fd, &info) != 0) return refuse(f, strerror(errno), err);
    if (!S_ISREG(info.st_mode) || (size_t)info.st_size != bytes) {
        return refuse(f, "was changed while it was opened", err);
    }
    f->changed = info.st_mtim;
    return HD_OK;
}

hd_status hd_expert_files_open(hd_expert_files **out, const char *const *paths,
                               const size_t *bytes, int32_t n, bool direct, hd_err *err) {
    hd_expert_files *f = calloc(1, sizeof *f);
    hd_status st = HD_OK;
    *out = NULL;
    if (f) f->all = calloc((size_t)n + 1, sizeof *f->all);
    if (!f || !f->all) {
        hd_expert_files_close(f);
        return HD_FAIL(err, HD_ENOMEM, "no memory for %d files of experts", n);
    }
    for (int32_t i = 0; i < n; i++) f->all[i].fd = -1;
    f->n = n;
    for (int32_t i = 0; i < n && st == HD_OK; i++) {
        st = open_file(&f->all[i], paths[i], bytes[i], direct, err);
    }
    if (st == HD_OK) {
        *out = f;
    } else {
        hd_expert_files_close(f);
    }
    return st;
}

void hd_expert_files_close(hd_expert_files *f) {
    if (!f) return;
    for (int32_t i = 0; f->all && i < f->n; i++) {
        if (f->all[i].fd >= 0) close(f->all[i].fd);
        free(f->all[i].path);
    }
    free(f->all);
    free(f);
}

int32_t hd_expert_files_direct(const hd_expert_files *f) {
    int32_t n = 0;
    for (int32_t i = 0; i < f->n; i++) n += f->all[i].direct;
    return n;
}

/* ---- reading ---- */

/* Writers change a file's time before its bytes, so this follows the reading. */
static hd_status check_unchanged(const expert_file *f, hd_err *err) {
    struct stat info;
    if (fstat(f->fd, &info) != 0) return refuse(f, strerror(errno), err);
    if ((size_t)info.st_size != f->bytes) {
        return HD_FAIL(err, HD_EIO, "%s: has %lld bytes; it had %zu when it was opened",
                       f->path, (long long)info.st_size, f->bytes);
    }
    if (info.st_mtim.tv_sec == f->changed.tv_sec && info.st_mtim.tv_nsec == f->changed.tv_nsec)
        return HD_OK;
    return refuse(f, "was changed since it was opened; the server must be started again", err);
}

/* The last page of a file may be shorter than a page. */
static hd_status read_span(const expert_file *f, const span *s, uint8_t *to, hd_err *err) {
    const size_t end = s->end < f->bytes ? s->end : f->bytes;
    for (size_t at = s->at; at < end;) {
        const ssize_t got = pread(f->fd, to + (at - s->at), s->end - at, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            return HD_FAIL(err, HD_EIO, "%s: byte %zu: %s", f->path, at, strerror(errno));
        }
        if (got == 0) {
            return HD_FAIL(err, HD_EIO, "%s: ends after %zu of %zu bytes: it was cut short",
                           f->path, at, f->bytes);
        }
        at += (size_t)got;
    }
    return check_unchanged(f, err);
}

hd_status hd_expert_files_read(const hd_expert_files *f, const hd_expert_piece *pieces,
                               int32_t n, uint8_t *to, hd_err *err) {
    span spans[HD_EXPERT_PIECES];
    int32_t of[HD_EXPERT_PIECES];
    const int32_t n_spans = make_spans(pieces, n, spans, of);
    for (int32_t i = 0; i < n_spans; i++) {
        HD_TRY(read_span(&f->all[spans[i].file], &spans[i], to + spans[i].to, err));
    }
    return HD_OK;
}
