/* line_file.c - see line_file.h. */
#include "server/line_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/log.h"

hd_status line_file_open(int *fd, const char *path, hd_err *err) {
    *fd = -1;
    if (!path) return HD_OK;
    /* Opening and writing a pipe must not block. */
    const int how = O_WRONLY | O_CREAT | O_CLOEXEC | O_APPEND | O_NONBLOCK;
    *fd = open(path, how, 0600);
    if (*fd >= 0) return HD_OK;
    return HD_FAIL(err, HD_EIO, "cannot write %s: %s", path, strerror(errno));
}

void line_file_append(line_file *f, char *line, size_t n) {
    const bool was_broken = atomic_load(&f->broken);
    struct iovec parts[] = {
        {(char[]){'\n'}, 1},
        {line,           n}
    };
    const int skip = was_broken ? 0 : 1;
    const ssize_t wanted = (ssize_t)(was_broken ? n + 1 : n);
    const ssize_t done = writev(f->fd, parts + skip, 2 - skip);
    const bool broken = done != wanted;
    if (atomic_exchange(&f->broken, broken) == broken) return;
    if (broken) {
        HD_LOG(HD_LOG_ERROR, f->failed,
               hd_log_text("why", done < 0 ? strerror(errno) : "the line is not whole"));
    } else {
        hd_log_write(HD_LOG_INFO, f->resumed, NULL, 0);
    }
}

void line_file_close(line_file *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}
