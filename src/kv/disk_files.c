/* disk_files.c - the files of a store in a folder; see disk_files.h. */
#include "kv/disk_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct folder {
    int fds[HD_N_DISK_FILES];
} folder;

static const char *const names[HD_N_DISK_FILES] = {
    [HD_DISK_STORE] = "store",
    [HD_DISK_HEADS + HD_KV_FULL] = "full.heads",
    [HD_DISK_HEADS + HD_KV_WINDOW] = "window.heads",
    [HD_DISK_PAGES + HD_KV_FULL] = "full.pages",
    [HD_DISK_PAGES + HD_KV_WINDOW] = "window.pages",
};

const char *hd_disk_file_name(hd_disk_file f) {
    return names[f];
}

typedef char file_name[32];

static const char *name_in(file_name out, int32_t store, int f) {
    if (store == 0) return names[f];
    snprintf(out, sizeof(file_name), "%d.%s", store, names[f]);
    return out;
}

static int read_file(void *ctx, hd_disk_file f, void *bytes, size_t n, uint64_t at) {
    const folder *dir = ctx;
    for (size_t done = 0; done < n;) {
        const ssize_t got =
            pread(dir->fds[f], (uint8_t *)bytes + done, n - done, (off_t)(at + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? errno : ENODATA;
        done += (size_t)got;
    }
    return 0;
}

static int write_file(void *ctx, hd_disk_file f, const void *bytes, size_t n, uint64_t at) {
    const folder *dir = ctx;
    for (size_t done = 0; done < n;) {
        const ssize_t put =
            pwrite(dir->fds[f], (const uint8_t *)bytes + done, n - done, (off_t)(at + done));
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return put < 0 ? errno : ENOSPC;
        done += (size_t)put;
    }
    return 0;
}

static int sync_file(void *ctx, hd_disk_file f) {
    const folder *dir = ctx;
    return fdatasync(dir->fds[f]) == 0 ? 0 : errno;
}

static int size_of_file(void *ctx, hd_disk_file f, uint64_t *bytes) {
    const folder *dir = ctx;
    struct stat st;
    if (fstat(dir->fds[f], &st) != 0) return errno;
    *bytes = (uint64_t)st.st_size;
    return 0;
}

static int cut_file(void *ctx, hd_disk_file f, uint64_t bytes) {
    const folder *dir = ctx;
    uint64_t now = 0;
    const int why = size_of_file(ctx, f, &now);
    if (why || now <= bytes) return why;
    return ftruncate(dir->fds[f], (off_t)bytes) == 0 ? 0 : errno;
}

static void close_files(void *ctx) {
    folder *dir = ctx;
    for (int f = 0; f < HD_N_DISK_FILES; f++) {
        if (dir->fds[f] >= 0) close(dir->fds[f]);
    }
    free(dir);
}

/* A file of another user, or that others may read, could be somebody's trap. */
static hd_status check_file(int fd, const char *dir, const char *name, hd_err *err) {
    struct stat st;
    if (fstat(fd, &st) != 0) {
        return HD_FAIL(err, HD_EIO, "%s/%s: %s", dir, name, strerror(errno));
    }
    if (!S_ISREG(st.st_mode)) {
        return HD_FAIL(err, HD_EINVAL, "%s/%s: not a regular file", dir, name);
    }
    if (st.st_uid != geteuid() || (st.st_mode & (S_IRWXG | S_IRWXO))) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s/%s: mode %04o of user %d; must be this user's alone, 0600", dir,
                       name, (unsigned)(st.st_mode & 07777), (int)st.st_uid);
    }
    return HD_OK;
}

static hd_status open_file(int *out, int at, const char *dir, const char *name, bool writes,
                           hd_err *err) {
    const int flags = writes ? O_RDWR | O_CREAT : O_RDONLY;
    *out = openat(at, name, flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600);
    if (*out < 0) {
        return HD_FAIL(err, !writes && errno == ENOENT ? HD_EINVAL : HD_EIO, "%s/%s: %s", dir,
                       name, strerror(errno));
    }
    return check_file(*out, dir, name, err);
}

static hd_status lock(int fd, const char *dir, hd_err *err) {
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) return HD_OK;
    if (errno == EWOULDBLOCK) {
        return HD_FAIL(err, HD_EAGAIN, "%s: another process uses this store", dir);
    }
    return HD_FAIL(err, HD_EIO, "%s: cannot lock the store: %s", dir, strerror(errno));
}

static hd_status open_files(folder *f, int at, const char *dir, int32_t store, bool writes,
                            hd_err *err) {
    for (int i = 0; i < HD_N_DISK_FILES; i++) {
        file_name name;
        HD_TRY(open_file(&f->fds[i], at, dir, name_in(name, store, i), writes, err));
        if (i == HD_DISK_STORE && writes) HD_TRY(lock(f->fds[i], dir, err));
    }
    return HD_OK;
}

static hd_status open_dir(int *out, const char *dir, hd_err *err) {
    *out = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*out >= 0) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "%s: %s", dir, strerror(errno));
}

hd_status hd_disk_files_open(hd_disk_files *out, const char *dir, int32_t store, bool writes,
                             hd_err *err) {
    int at;
    *out = (hd_disk_files){0};
    HD_TRY(open_dir(&at, dir, err));
    folder *f = malloc(sizeof *f);
    if (!f) {
        close(at);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a store of KV pages");
    }
    for (int i = 0; i < HD_N_DISK_FILES; i++) f->fds[i] = -1;
    const hd_status st = open_files(f, at, dir, store, writes, err);
    close(at);
    if (st != HD_OK) {
        close_files(f);
        return st;
    }
    *out = (hd_disk_files){.ctx = f,
                           .read = read_file,
                           .write = write_file,
                           .sync = sync_file,
                           .size = size_of_file,
                           .cut = cut_file,
                           .close = close_files};
    return HD_OK;
}

/* The store goes last: until then the lock keeps others away. */
static hd_status delete_files(int at, const char *dir, int32_t store, int *n, hd_err *err) {
    for (int i = HD_N_DISK_FILES - 1; i >= 0; i--) {
        file_name own;
        const char *name = name_in(own, store, i);
        if (unlinkat(at, name, 0) == 0) {
            ++*n;
        } else if (errno != ENOENT) {
            return HD_FAIL(err, HD_EIO, "%s/%s: %s", dir, name, strerror(errno));
        }
    }
    return HD_OK;
}

hd_status hd_disk_files_delete(const char *dir, int32_t store, int *n, hd_err *err) {
    file_name name;
    int at, fd;
    *n = 0;
    HD_TRY(open_dir(&at, dir, err));
    hd_status st = open_file(&fd, at, dir, name_in(name, store, HD_DISK_STORE), false, err);
    if (st == HD_OK) st = lock(fd, dir, err);
    if (st == HD_OK) st = delete_files(at, dir, store, n, err);
    if (fd >= 0) close(fd);
    close(at);
    return st;
}
