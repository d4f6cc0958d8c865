/* backend_cpu.c - host memory and a worker pool that looks like a stream. */
#include "backend/backend.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"

enum { ALIGN = 256, MAX_BLOCKS = 256 };

struct hd_device {
    hd_pool *pool;
    hd_block blocks[MAX_BLOCKS]; /* what alloc gave out */
};

struct hd_stream {
    hd_device *device;
    hd_block scratch;
    size_t scratch_each; /* bytes of one worker */
    hd_err failure;      /* HD_OK while nothing failed */
};

hd_status hd_device_open_cpu(hd_device **out, const hd_cpu_options *options, hd_err *err) {
    *out = NULL;
    hd_device *d = calloc(1, sizeof *d);
    if (!d) return HD_FAIL(err, HD_ENOMEM, "no memory for a device");
    hd_status st = hd_pool_open(&d->pool, options->n_threads, options->pin, err);
    if (st != HD_OK) {
        hd_device_close(d);
        return st;
    }
    *out = d;
    return HD_OK;
}

void hd_device_close(hd_device *d) {
    if (!d) return;
    for (int i = 0; i < MAX_BLOCKS; i++) hd_block_deinit(&d->blocks[i]);
    hd_pool_close(d->pool);
    free(d);
}

hd_status hd_device_alloc(hd_device *d, void **out, size_t bytes, const char *what,
                          hd_err *err) {
    *out = NULL;
    size_t padded;
    if (!hd_add_size(bytes, ALIGN, &padded)) {
        return HD_FAIL(err, HD_ENOMEM, "%s: %zu bytes do not fit in memory", what, bytes);
    }
    for (int i = 0; i < MAX_BLOCKS; i++) {
        hd_block *b = &d->blocks[i];
        if (b->data) continue;
        HD_TRY(hd_block_init(b, padded, what, err));
        uintptr_t at = (uintptr_t)b->data;
        *out = (uint8_t *)b->data + ((0 - at) & (ALIGN - 1));
        return HD_OK;
    }
    return HD_FAIL(err, HD_ENOMEM, "%s: more than %d blocks of device memory", what,
                   MAX_BLOCKS);
}

hd_status hd_device_alloc_host(hd_device *d, void **out, size_t bytes, const char *what,
                               hd_err *err) {
    return hd_device_alloc(d, out, bytes, what, err);
}

void hd_device_release(hd_device *d, void *p) {
    if (!p) return;
    for (int i = 0; i < MAX_BLOCKS; i++) {
        uint8_t *base = d->blocks[i].data;
        if (base && (uint8_t *)p >= base && (uint8_t *)p < base + ALIGN) {
            hd_block_deinit(&d->blocks[i]);
            return;
        }
    }
    assert(false && "released memory that this device never gave out");
}

hd_status hd_stream_open(hd_stream **out, hd_device *d, hd_err *err) {
    *out = calloc(1, sizeof **out);
    if (!*out) return HD_FAIL(err, HD_ENOMEM, "no memory for a stream");
    (*out)->device = d;
    return HD_OK;
}

void hd_stream_close(hd_stream *s) {
    if (!s) return;
    hd_block_deinit(&s->scratch);
    free(s);
}

void hd_stream_upload(hd_stream *s, void *device, const void *host, size_t bytes) {
    (void)s;
    if (bytes) memcpy(device, host, bytes);
}

void hd_stream_download(hd_stream *s, void *host, const void *device, size_t bytes) {
    (void)s;
    if (bytes) memcpy(host, device, bytes);
}

void hd_stream_fail(hd_stream *s, hd_status code, const char *what) {
    HD_FAIL(&s->failure, code, "%s", what);
}

hd_status hd_stream_sync(hd_stream *s, hd_err *err) {
    hd_err failure = s->failure;
    s->failure = (hd_err){0};
    if (failure.code == HD_OK) return HD_OK;
    return HD_FAIL(err, failure.code, "%s", failure.msg);
}

void hd_stream_tasks(hd_stream *s, int32_t n_tasks, hd_task_fn *fn, const void *arg) {
    hd_pool_run(s->device->pool, n_tasks, fn, arg);
}

int32_t hd_stream_workers(const hd_stream *s) {
    return hd_pool_size(s->device->pool);
}

hd_status hd_stream_reserve(hd_stream *s, size_t bytes_per_worker, hd_err *err) {
    size_t each, all;
    if (!hd_align_size(bytes_per_worker, HD_CACHE_LINE, &each) ||
        !hd_mul_size(each, (size_t)hd_stream_workers(s), &all)) {
        return HD_FAIL(err, HD_ENOMEM, "op scratch of %zu bytes per worker", bytes_per_worker);
    }
    hd_block_deinit(&s->scratch);
    HD_TRY(hd_block_init(&s->scratch, all, "op scratch", err));
    s->scratch_each = each;
    return HD_OK;
}

void *hd_stream_scratch(const hd_stream *s, int32_t worker, size_t bytes) {
    assert(bytes <= s->scratch_each);
    (void)bytes;
    return (uint8_t *)s->scratch.data + (size_t)worker * s->scratch_each;
}
