/* backend_internal.h - what a kind of device puts behind the door.
 *
 * A backend embeds hd_device and hd_stream as the first member of its own structs and gives
 * them its table; backend.c calls through it. */
#ifndef HD_BACKEND_BACKEND_INTERNAL_H
#define HD_BACKEND_BACKEND_INTERNAL_H

#include "backend/backend.h"

typedef struct backend_table {
    void (*close)(hd_device *d);
    hd_status (*alloc)(hd_device *d, void **out, size_t bytes, bool on_host, const char *what,
                       hd_err *err);
    void (*release)(hd_device *d, void *p);
    hd_status (*open_stream)(hd_stream **out, hd_device *d, hd_err *err);
    void (*close_stream)(hd_stream *s);
    void (*upload)(hd_stream *s, void *device, const void *host, size_t bytes);
    void (*download)(hd_stream *s, void *host, const void *device, size_t bytes);
    void (*wait)(hd_stream *s); /* failures of queued work go to hd_stream_fail */
    hd_status (*reserve)(hd_stream *s, size_t bytes_per_worker, hd_err *err);
    void (*copy)(hd_stream *s, void *to, const void *from, size_t bytes);
    void (*noise)(hd_stream *s, void *device, size_t bytes, const hd_noise *noise);
    void (*hold)(hd_stream *s, int32_t microseconds);
    hd_status (*open_marks)(hd_marks **out, hd_device *d, int32_t n, hd_err *err);
    void (*close_marks)(hd_marks *m);
    void (*mark)(hd_marks *m, hd_stream *s, int32_t mark);
    double (*between)(const hd_marks *m, int32_t from, int32_t to);
    bool host_memory; /* device memory is host memory */
} backend_table;

struct hd_device {
    const backend_table *table;
};

struct hd_marks {
    hd_device *device;
};

struct hd_stream {
    hd_device *device;
    uint8_t *scratch; /* [workers, scratch_each] device memory */
    size_t scratch_each;
    int32_t workers;
    hd_err failure; /* HD_OK while nothing failed */
};

#endif
