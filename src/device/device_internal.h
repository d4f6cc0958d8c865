/* device_internal.h - the function table of a device backend (CPU or CUDA).
 *
 * A backend embeds hd_device and hd_stream as the first member of its own structs and sets
 * their table; device.c calls through it. */
#ifndef HD_DEVICE_DEVICE_INTERNAL_H
#define HD_DEVICE_DEVICE_INTERNAL_H

#include "device/device.h"

typedef struct backend_table {
    void (*close)(hd_device *d);
    hd_status (*alloc)(hd_device *d, void **out, size_t bytes, bool on_host, const char *what,
                       hd_err *err);
    /* NULL: host_memory */
    hd_status (*read_host)(hd_device *d, const void *host, size_t bytes, hd_err *err);
    /* NULL: host_memory */
    hd_status (*pin_host)(hd_device *d, const void *host, size_t bytes, hd_err *err);
    size_t (*free_bytes)(const hd_device *d);
    void (*release)(hd_device *d, void *p);
    void (*keep_addresses)(hd_device *d);     /* NULL: all memory can be discarded */
    size_t (*discard)(hd_device *d, void *p); /* NULL: memory cannot be given back */
    hd_status (*restore)(hd_device *d, void *p,
                         hd_err *err); /* NULL: it comes when it is written */
    /* NULL, like the next two: other processes cannot open its memory */
    hd_status (*share)(hd_device *d, void *p, uint8_t *handle, uint8_t *gpu, hd_err *err);
    void (*end_sharing)(hd_device *d);
    hd_status (*check_access)(const hd_device *d, const uint8_t *gpu, hd_err *err);
    /* NULL, like the next two: memory of other processes cannot be opened */
    hd_status (*open_shared)(hd_device *d, const void **out, size_t *bytes,
                             const uint8_t *handle, hd_err *err);
    void (*close_shared)(hd_device *d, const void *p);
    void (*wait_shared)(hd_stream *s, const uint8_t *event);
    /* NULL, like the next: all memory is in reach */
    bool (*is_same)(const hd_device *d, const hd_device *other);
    hd_status (*enable_peer_access)(hd_device *d, hd_device *other, hd_err *err);
    hd_status (*open_stream)(hd_stream **out, hd_device *d, bool urgent, hd_err *err);
    void (*close_stream)(hd_stream *s);
    void (*upload)(hd_stream *s, void *device, const void *host, size_t bytes);
    void (*download)(hd_stream *s, void *host, const void *device, size_t bytes);
    void (*wait)(hd_stream *s); /* failures of queued operators go to hd_stream_fail */
    hd_status (*reserve)(hd_stream *s, size_t bytes_per_worker, hd_err *err);
    hd_status (*open_device_event)(hd_device_event **out, hd_device *d, bool timed,
                                   hd_err *err);
    void (*close_device_event)(hd_device_event *m);
    void (*device_event)(hd_stream *s, hd_device_event *m);
    void (*wait_for)(hd_stream *s, hd_device_event *m); /* failures go to hd_stream_fail */
    void (*wait_event)(hd_stream *s, const hd_device_event *m);
    bool (*event_is_done)(hd_device_event *m);
    double (*event_seconds)(const hd_device_event *from, const hd_device_event *to);
    void (*busy)(hd_stream *s, int32_t microseconds);
    /* NULL, like the next three, if the backend has no graphs */
    void (*record)(hd_stream *s);
    hd_status (*recorded)(hd_stream *s, hd_graph **out, hd_err *err);
    void (*close_graph)(hd_graph *g);
    void (*launch)(hd_stream *s, const hd_graph *g);
    void (*copy)(hd_stream *s, void *to, const void *from, size_t bytes);
    void (*clear)(hd_stream *s, void *device, size_t bytes);
    void (*random_fill)(hd_stream *s, void *device, size_t bytes,
                        const hd_random_fill *random_fill);
    void (*checksum)(hd_stream *s, uint64_t *sum, uint64_t first, const void *device,
                     size_t bytes);
    bool host_memory; /* device memory is host memory */
} backend_table;

struct hd_device {
    const backend_table *table;
    size_t withheld;        /* bytes of device memory that stay free; 0: no limit */
    hd_cuda_path cuda_path; /* of a GPU: not auto */
};

struct hd_device_event {
    hd_device *device;
};

struct hd_graph {
    hd_device *device;
    size_t bytes;     /* device memory that the driver allocated for it */
    int32_t launches; /* its nodes: kernels and copies */
};

struct hd_stream {
    hd_device *device;
    uint8_t *scratch; /* [workers, scratch_each] device memory */
    size_t scratch_each;
    int32_t workers;
    bool captures;
    hd_stream_check_fn *check; /* NULL: none */
    void *check_ctx;
    hd_stream *main_stream; /* keeps the failures; NULL: this one */
    hd_err failure;         /* HD_OK if nothing failed */
};

#endif
