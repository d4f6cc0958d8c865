/* export.c - the header of a safetensors file as JSON, padded to 8 bytes, and the data behind
 * it without gaps. */
#include "weights/export.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"

enum { ALIGN = 8 };

static json_t *describe(const hd_tensor *t, size_t at) {
    json_t *shape = json_array();
    for (int32_t i = 0; i < t->rank; i++) {
        json_array_append_new(shape, json_integer((json_int_t)t->shape[i]));
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", t->dtype_name, "shape", shape,
                     "data_offsets", (json_int_t)at, (json_int_t)(at + t->bytes));
}

/* The header's text, malloc'ed and padded by spaces; NULL without memory. */
static char *header_of(const hd_tensor *tensors, int32_t n, size_t *bytes) {
    json_t *all = json_object();
    size_t at = 0;
    bool ok = all != NULL;
    for (int32_t i = 0; ok && i < n; i++) {
        ok = json_object_set_new(all, tensors[i].name, describe(&tensors[i], at)) == 0;
        at += tensors[i].bytes;
    }
    char *text = ok ? hd_json_write(all, JSON_COMPACT) : NULL;
    json_decref(all);
    if (!text) return NULL;
    const size_t length = strlen(text), padded = (length + ALIGN - 1) / ALIGN * ALIGN;
    char *out = realloc(text, padded + 1);
    if (!out) {
        free(text);
        return NULL;
    }
    memset(out + length, ' ', padded - length);
    *bytes = padded;
    return out;
}

static bool put(int fd, const void *data, size_t n) {
    const uint8_t *at = data;
    while (n > 0) {
        const ssize_t done = write(fd, at, n);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return false;
        at += done;
        n -= (size_t)done;
    }
    return true;
}

static bool put_all(int fd, const char *header, size_t n_header, const hd_tensor *tensors,
                    int32_t n) {
    uint8_t size[8];
    for (int i = 0; i < 8; i++) size[i] = (uint8_t)((uint64_t)n_header >> (8 * i));
    bool ok = put(fd, size, sizeof size) && put(fd, header, n_header);
    for (int32_t i = 0; ok && i < n; i++) ok = put(fd, tensors[i].data, tensors[i].bytes);
    return ok && fsync(fd) == 0;
}

hd_status hd_safetensors_write(const char *path, const hd_tensor *tensors, int32_t n,
                               hd_err *err) {
    size_t n_header;
    char *header = header_of(tensors, n, &n_header);
    if (!header) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for its header", path);
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool ok = fd >= 0 && put_all(fd, header, n_header, tensors, n);
    const int why = errno;
    free(header);
    if (fd >= 0 && close(fd) != 0) ok = false;
    return ok ? HD_OK : HD_FAIL(err, HD_EIO, "%s: %s", path, strerror(why));
}

hd_status hd_weights_write(const char *path, const hd_weights *w, hd_err *err) {
    const hd_checkpoint *c = hd_weights_checkpoint(w);
    return hd_safetensors_write(path, hd_checkpoint_at(c, 0), hd_checkpoint_count(c), err);
}
