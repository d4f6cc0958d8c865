/* blob.c - downloads one file of the hub to its blob: resumes, counts, verifies and renames.
 * The partial file and the lock have the names that other programs of this cache use, so
 * that two programs never write one file. Bytes received earlier are hashed in pieces, so
 * that other connections make progress meanwhile. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "hub/hub_internal.h"

enum { HASH_BYTES = 32 << 20, READ_BYTES = 1 << 13, LOCK_WAIT_NS = 500000000 };

static hub_blob *blob_of(hub_job *job) {
    return (hub_blob *)job;
}

static hd_status disk_failed(const hub_blob *b, const char *path, hd_err *err) {
    const bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
    return HD_FAIL(err, HD_EIO, "cannot write %s: %s%s", path, strerror(errno),
                   full && b->counted ? "; what is there is kept: make room and pull again"
                                      : "");
}

static void note(const hub_blob *b, const char *text) {
    const hub_options *o = b->job.options;
    if (o->on_note) o->on_note(o->user, text);
}

static void count(hub_blob *b, int64_t bytes) {
    const hub_options *o = b->job.options;
    *b->done_bytes += bytes - b->counted;
    b->counted = bytes;
    if (o->on_progress) o->on_progress(o->user, *b->done_bytes);
}

static int64_t size_of(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) ? (int64_t)info.st_size : -1;
}

static bool is_there(const hub_blob *b) {
    return size_of(b->path) == b->file->bytes;
}

/* ---- the sink ---- */

static hd_status take_lock(hub_blob *b, hd_err *err) {
    if (b->lock_fd >= 0) return HD_OK;
    HD_TRY(hub_make_folders(b->lock_path, err));
    b->lock_fd = open(b->lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (b->lock_fd < 0) return disk_failed(b, b->lock_path, err);
    if (flock(b->lock_fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return HD_OK;
    close(b->lock_fd);
    b->lock_fd = -1;
    if (!b->waited) {
        char text[400];
        snprintf(text, sizeof text, "%.300s: another program downloads it; waiting",
                 b->file->path);
        note(b, text);
    }
    b->waited = true;
    b->job.wait_ns = LOCK_WAIT_NS;
    return HD_EAGAIN;
}

/* Opens the existing file: the blob to be verified, or the partial file. */
static hd_status open_file(hub_blob *b, hd_err *err) {
    struct stat info;
    b->verifying = is_there(b);
    if (b->verifying) {
        b->fd = open(b->path, O_RDONLY | O_CLOEXEC);
    } else {
        HD_TRY(hub_make_folders(b->partial, err));
        b->fd = open(b->partial, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    }
    const char *path = b->verifying ? b->path : b->partial;
    if (b->fd < 0 || fstat(b->fd, &info) != 0) return disk_failed(b, path, err);
    b->kept = (int64_t)info.st_size;
    if (b->kept > b->file->bytes) {
        if (ftruncate(b->fd, 0) != 0) return disk_failed(b, path, err);
        b->kept = 0;
    }
    b->hashed = 0;
    return hub_digest_begin(&b->digest, b->file->kind, b->file->bytes, err);
}

/* Hashes a piece of the existing bytes; HD_EAGAIN: there are more. */
static hd_status hash_kept(hub_blob *b, hd_err *err) {
    unsigned char bytes[READ_BYTES];
    for (int64_t n = 0; n < HASH_BYTES && b->hashed < b->kept;) {
        const int64_t rest = b->kept - b->hashed;
        const ssize_t got =
            pread(b->fd, bytes, rest < READ_BYTES ? (size_t)rest : READ_BYTES, b->hashed);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            return HD_FAIL(err, HD_EIO, "cannot read %s: %s",
                           b->verifying ? b->path : b->partial,
                           got ? strerror(errno) : "it became shorter");
        }
        HD_TRY(hub_digest_add(&b->digest, bytes, (size_t)got, err));
        b->hashed += got;
        n += got;
    }
    return b->hashed < b->kept ? HD_EAGAIN : HD_OK;
}

static hd_status restart(hub_job *job, hd_err *err) {
    hub_blob *b = blob_of(job);
    if (b->fd >= 0 && b->verifying) {
        close(b->fd);
        b->fd = -1;
        if (unlink(b->path) != 0) return disk_failed(b, b->path, err);
        HD_TRY(open_file(b, err));
    }
    if (ftruncate(b->fd, 0) != 0) return disk_failed(b, b->partial, err);
    b->hashed = b->kept = 0;
    count(b, 0);
    return hub_digest_begin(&b->digest, b->file->kind, b->file->bytes, err);
}

static void close_files(hub_blob *b) {
    if (b->fd >= 0) close(b->fd);
    if (b->lock_fd >= 0) close(b->lock_fd);
    b->fd = b->lock_fd = -1;
    hub_digest_deinit(&b->digest);
}

static hd_status keep(hub_blob *b, hd_err *err) {
    if (!b->verifying && (fsync(b->fd) != 0 || rename(b->partial, b->path) != 0)) {
        return disk_failed(b, b->path, err);
    }
    count(b, b->file->bytes);
    close_files(b);
    return HD_OK;
}

static hd_status end(hub_job *job, hd_err *err) {
    hub_blob *b = blob_of(job);
    char hex[HUB_HEX_BYTES];
    hub_digest_end(&b->digest, b->file->kind, hex);
    if (strcmp(hex, b->file->digest) == 0) return keep(b, err);
    if (b->again) {
        unlink(b->partial);
        return HD_FAIL(err, HD_EFORMAT,
                       "%s: its digest is %s, where the hub says %s, twice in a row: the bytes "
                       "are changed on their way or at the server",
                       b->file->path, hex, b->file->digest);
    }
    const char *where = b->verifying ? "this disk" : "its way";
    b->again = true;
    HD_TRY(restart(job, err));
    return HD_FAIL(err, HD_EAGAIN, "%s: damaged on %s", b->file->path, where);
}

/* All bytes existed before: verifies them. If they are wrong, they are downloaded. */
static hd_status check_kept(hub_job *job, hd_err *err) {
    hd_err why = {0};
    const hd_status st = end(job, &why);
    job->over = st == HD_OK;
    if (st == HD_EAGAIN) note(blob_of(job), why.msg);
    return st == HD_OK || st == HD_EAGAIN ? HD_OK : HD_FAIL(err, st, "%s", why.msg);
}

static hd_status begin(hub_job *job, int64_t *from, hd_err *err) {
    hub_blob *b = blob_of(job);
    HD_TRY(take_lock(b, err));
    if (is_there(b) && !job->options->verify) {
        count(b, b->file->bytes);
        close_files(b);
        job->over = true;
        return HD_OK;
    }
    if (b->fd < 0) HD_TRY(open_file(b, err));
    HD_TRY(hash_kept(b, err));
    if (b->hashed == b->file->bytes) HD_TRY(check_kept(job, err));
    *from = b->hashed;
    return HD_OK;
}

static hd_status take(hub_job *job, const char *bytes, size_t n, hd_err *err) {
    hub_blob *b = blob_of(job);
    for (size_t done = 0; done < n;) {
        const ssize_t put = pwrite(b->fd, bytes + done, n - done, b->hashed + (int64_t)done);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return disk_failed(b, b->partial, err);
        done += (size_t)put;
    }
    HD_TRY(hub_digest_add(&b->digest, bytes, n, err));
    b->hashed += (int64_t)n;
    b->kept = b->hashed;
    count(b, b->hashed);
    return HD_OK;
}

/* ---- life ---- */

static const hub_sink sink = {begin, restart, take, end};

/* Bytes of it that are on the disk already. */
static int64_t bytes_there(const hub_blob *b) {
    if (is_there(b)) return b->file->bytes;
    const int64_t partial = size_of(b->partial);
    return partial > 0 && partial <= b->file->bytes ? partial : 0;
}

static char *joined(const char *a, const char *tail) {
    const size_t n = strlen(a) + strlen(tail) + 1;
    char *out = malloc(n);
    if (out) snprintf(out, n, "%s%s", a, tail);
    return out;
}

/* ROOT/.locks/models--ORG--NAME/DIGEST.lock */
static char *lock_path_of(const char *root, const char *repo, const char *digest) {
    char *locks = hd_path_join(root, ".locks");
    char *bare = locks ? hub_cache_path(locks, repo, digest, "") : NULL;
    char *path = bare ? joined(bare, ".lock") : NULL;
    free(bare);
    free(locks);
    return path;
}

hd_status hub_blob_open(hub_blob *b, const hub_file *f, const hub_name *name, char *url,
                        const hub_options *o, int64_t *done_bytes, hd_err *err) {
    *b = (hub_blob){
        .job = {.sink = &sink, .what = f->path, .bytes = f->bytes, .home = url, .options = o},
        .file = f,
        .fd = -1,
        .lock_fd = -1,
        .done_bytes = done_bytes
    };
    b->path = hub_cache_path(o->cache, name->repo, "blobs", f->digest);
    b->partial = b->path ? joined(b->path, ".incomplete") : NULL;
    b->lock_path = lock_path_of(o->cache, name->repo, f->digest);
    if (!url || !b->partial || !b->lock_path) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a file's names");
    }
    b->counted = bytes_there(b);
    *done_bytes += b->counted;
    return HD_OK;
}

void hub_blob_close(hub_blob *b) {
    close_files(b);
    hub_job_deinit(&b->job);
    free(b->path);
    free(b->partial);
    free(b->lock_path);
}
