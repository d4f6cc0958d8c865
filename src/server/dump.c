/* dump.c - see dump.h. Dumps are removed by an operator only, except for the oldest beyond
 * the limit. */
#include "server/dump.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"

enum { MAX_NAME = PATH_MAX + 8, MAX_COMMAND = MAX_NAME + 1024 };

/* Number 0 is path itself. */
static void name_of(char *out, const char *path, int number) {
    if (number) {
        snprintf(out, MAX_NAME, "%s.%d", path, number);
    } else {
        snprintf(out, MAX_NAME, "%s", path);
    }
}

static bool is_there(const char *path, int number) {
    char name[MAX_NAME];
    struct stat st;
    name_of(name, path, number);
    return lstat(name, &st) == 0;
}

/* Another server that starts at the same time may have moved it first. */
static hd_status move(const char *path, int number, hd_err *err) {
    char from[MAX_NAME], to[MAX_NAME];
    name_of(from, path, number);
    name_of(to, path, number + 1);
    if (rename(from, to) == 0 || errno == ENOENT) return HD_OK;
    return HD_FAIL(err, HD_EIO, "cannot keep %s, a crash dump of an earlier run, as %s: %s",
                   from, to, strerror(errno));
}

static hd_status keep(const char *path, hd_err *err) {
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size == 0) return HD_OK;
    int last = 1; /* the first unused number */
    while (last < DUMPS_KEPT && is_there(path, last)) last++;
    for (int number = last; number > 0; number--) HD_TRY(move(path, number - 1, err));
    return HD_OK;
}

static void tell(const char *path, const char *model_dir) {
    char file[MAX_NAME], command[MAX_COMMAND];
    int n = 0, newest = 0;
    for (int number = DUMPS_KEPT; number > 0; number--) {
        if (!is_there(path, number)) continue;
        newest = number;
        n++;
    }
    if (n == 0) return;
    name_of(file, path, newest);
    snprintf(command, sizeof command, "hadal replay %s %s", file, model_dir);
    HD_LOG(HD_LOG_WARN, "crash_dump_kept", hd_log_int("dumps", n), hd_log_text("newest", file),
           hd_log_text("replay", command));
}

hd_status dump_keep_earlier(const char *path, const char *model_dir, hd_err *err) {
    if (!path) return HD_OK;
    HD_TRY(keep(path, err));
    tell(path, model_dir);
    return HD_OK;
}
