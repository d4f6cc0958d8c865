/* backup.c - writes the memory of a checkpoint to a file without a name, and reads it again. */
#define _GNU_SOURCE /* O_TMPFILE */
#include "weights/backup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "weights/safetensors.h"
#include "weights/update.h"
#include "weights/weights_internal.h"

struct hd_weights_backup {
    int fd;
    bool saved; /* it has the values of all tensors */
};

hd_status hd_weights_backup_open(hd_weights_backup **out, const char *dir, hd_err *err) {
    hd_weights_backup *b = calloc(1, sizeof *b);
    *out = b;
    if (!b) return HD_FAIL(err, HD_ENOMEM, "no memory for a backup of weights");
    b->fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (b->fd >= 0) return HD_OK;
    const int why = errno;
    free(b);
    *out = NULL;
    return HD_FAIL(err, HD_EINVAL, "%s: no file without a name can be made there: %s", dir,
                   strerror(why));
}

void hd_weights_backup_close(hd_weights_backup *b) {
    if (!b) return;
    close(b->fd);
    free(b);
}

/* The file's space is free again. */
static void forget(hd_weights_backup *b) {
    b->saved = false;
    if (ftruncate(b->fd, 0) != 0) return; /* the next save writes over it */
}

/* ---- copies ---- */

/* Moves part of memory[n] to or from byte `at` of the file. Returns as write() does. */
typedef ssize_t mover(int fd, uint8_t *memory, size_t n, off_t at);

static ssize_t put(int fd, uint8_t *memory, size_t n, off_t at) {
    return pwrite(fd, memory, n, at);
}

static ssize_t get(int fd, uint8_t *memory, size_t n, off_t at) {
    return pread(fd, memory, n, at);
}

/* Returns 0 or an errno. */
static int move_map(int fd, mover *move, const hd_map *m, off_t at) {
    size_t done = 0;
    while (done < m->bytes) {
        const ssize_t n =
            move(fd, hd_map_writable(m) + done, m->bytes - done, at + (off_t)done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EIO;
        done += (size_t)n;
    }
    return 0;
}

static int move_all(const hd_weights_backup *b, mover *move, const hd_weights *w) {
    off_t at = 0;
    int why = 0;
    for (int32_t s = 0; !why && s < hd_checkpoint_shards(w->checkpoint); s++) {
        const hd_map m = hd_checkpoint_memory(w->checkpoint, s);
        why = move_map(b->fd, move, &m, at);
        at += (off_t)m.bytes;
    }
    return why;
}

hd_status hd_weights_backup_save(hd_weights_backup *b, const hd_weights *w, hd_err *err) {
    if (hd_weights_lost(w)) return HD_OK;
    const int why = move_all(b, put, w);
    if (why) {
        forget(b);
        return HD_REFUSE(err, HD_EAGAIN, "backup_failed", NULL,
                         "the backup of the weights could not be written: %s", strerror(why));
    }
    b->saved = true;
    return HD_OK;
}

hd_status hd_weights_backup_restore(hd_weights_backup *b, hd_weights *w, hd_err *err) {
    if (!b->saved) return HD_OK;
    const int why = move_all(b, get, w);
    forget(b);
    if (why) {
        return HD_REFUSE(err, HD_EAGAIN, "backup_failed", NULL,
                         "the backup of the weights could not be read: %s", strerror(why));
    }
    weights_find_all(w);
    return HD_OK;
}
