/* model_files.c - copies small files from one model folder to another. */
#include "train/model_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

enum { MOST_BYTES = 256 << 20 };

static const char *const names[] = {
    "config.json",           "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja",
};

/* in the folder encoding/ */
static const char *const encodings[] = {"encoding_dsv4.py", "encoding_dsv32.py"};

static hd_status refuse_io(const char *what, hd_err *err) {
    return HD_FAIL(err, HD_EIO, "%s: %s", what, strerror(errno));
}

hd_status hd_flushed_write(const char *path, const char *text, size_t n, hd_err *err) {
    FILE *f = fopen(path, "wbe");
    if (!f) return refuse_io(path, err);
    const bool ok = fwrite(text, 1, n, f) == n && fflush(f) == 0 && fsync(fileno(f)) == 0;
    const hd_status st = ok ? HD_OK : refuse_io(path, err);
    return fclose(f) == 0 || st != HD_OK ? st : refuse_io(path, err);
}

static hd_status copy_found(const char *to, const char *from, hd_err *err) {
    char *text;
    size_t n;
    if (!hd_file_exists(from)) return HD_OK;
    HD_TRY(hd_file_read(&text, &n, from, MOST_BYTES, err));
    const hd_status st = hd_flushed_write(to, text, n, err);
    free(text);
    return st;
}

static hd_status copy_file(const char *to_dir, const char *from_dir, const char *name,
                           hd_err *err) {
    char *to = hd_path_join(to_dir, name), *from = hd_path_join(from_dir, name);
    const hd_status st = to && from ? copy_found(to, from, err)
                                    : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    free(to);
    free(from);
    return st;
}

static hd_status flush_folder(const char *name, hd_err *err) {
    const int fd = open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const hd_status st = fd >= 0 && fsync(fd) == 0 ? HD_OK : refuse_io(name, err);
    if (fd >= 0) close(fd);
    return st;
}

static hd_status copy_encodings(const char *to, const char *from, hd_err *err) {
    if (access(from, X_OK) != 0) return HD_OK;
    if (mkdir(to, 0777) != 0 && errno != EEXIST) return refuse_io(to, err);
    for (size_t i = 0; i < HD_LEN(encodings); i++) {
        HD_TRY(copy_file(to, from, encodings[i], err));
    }
    return flush_folder(to, err);
}

hd_status hd_model_files_copy(const char *to, const char *from, hd_err *err) {
    for (size_t i = 0; i < HD_LEN(names); i++) HD_TRY(copy_file(to, from, names[i], err));
    char *to_dir = hd_path_join(to, "encoding"), *from_dir = hd_path_join(from, "encoding");
    const hd_status st = to_dir && from_dir ? copy_encodings(to_dir, from_dir, err)
                                            : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    free(to_dir);
    free(from_dir);
    return st;
}
