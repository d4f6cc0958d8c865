/* device.c - forwards device and stream calls to the backend, and keeps a stream's first
 * failure. */
#include "device/device.h"

#include <assert.h>

#include "base/terminal.h"
#include "device/device_internal.h"
#ifdef HD_CUDA
#include "device/gpu_list.h"
#endif

#ifdef HD_CUDA
int32_t hd_device_count_gpus(void) {
    char why[200];
    return hd_cuda_devices(NULL, 0, why, sizeof why);
}
#else
int32_t hd_device_count_gpus(void) {
    return 0;
}

hd_status hd_device_open_cuda(hd_device **out, int32_t ordinal, hd_cuda_path path,
                              hd_err *err) {
    (void)ordinal;
    (void)path;
    *out = NULL;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "no CUDA in this build; make CUDA=1 builds one with it");
}
#endif

void hd_device_close(hd_device *d) {
    if (d) d->table->close(d);
}

hd_cuda_path hd_device_cuda_path(const hd_device *d) {
    return d->cuda_path;
}

bool hd_device_is_host(const hd_device *d) {
    return d->table->host_memory;
}

hd_status hd_device_alloc(hd_device *d, void **out, size_t bytes, const char *what,
                          hd_err *err) {
    if (d->withheld && bytes > hd_device_free_bytes(d)) {
        char wanted[32], free[32];
        return HD_FAIL(err, HD_ENOMEM,
                       "%s: no device memory for %s; %s are free within the limit", what,
                       hd_bytes_text(wanted, sizeof wanted, (double)bytes),
                       hd_bytes_text(free, sizeof free, (double)hd_device_free_bytes(d)));
    }
    return d->table->alloc(d, out, bytes, false, what, err);
}

hd_status hd_device_alloc_host(hd_device *d, void **out, size_t bytes, const char *what,
                               hd_err *err) {
    return d->table->alloc(d, out, bytes, true, what, err);
}

hd_status hd_device_read_host(hd_device *d, const void *host, size_t bytes, hd_err *err) {
    return d->table->host_memory ? HD_OK : d->table->read_host(d, host, bytes, err);
}

hd_status hd_device_pin_host(hd_device *d, const void *host, size_t bytes, hd_err *err) {
    return d->table->host_memory ? HD_OK : d->table->pin_host(d, host, bytes, err);
}

size_t hd_device_free_bytes(const hd_device *d) {
    const size_t free = d->table->free_bytes(d);
    return free > d->withheld ? free - d->withheld : 0;
}

hd_status hd_device_limit(hd_device *d, size_t bytes, hd_err *err) {
    const size_t free = d->table->free_bytes(d);
    if (d->table->host_memory) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "this device has no memory of its own to limit");
    }
    d->withheld = free > bytes ? free - bytes : 0;
    return HD_OK;
}

void hd_device_release(hd_device *d, void *p) {
    if (p) d->table->release(d, p);
}

hd_status hd_device_discard(hd_device *d, void *p, size_t *bytes, hd_err *err) {
    if (!d->table->discard) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "memory of this device cannot be given back");
    }
    if (p) *bytes += d->table->discard(d, p);
    return HD_OK;
}

hd_status hd_device_restore(hd_device *d, void *p, hd_err *err) {
    return p && d->table->restore ? d->table->restore(d, p, err) : HD_OK;
}

void hd_device_keep_addresses(hd_device *d) {
    if (d->table->keep_addresses) d->table->keep_addresses(d);
}

hd_status hd_device_share(hd_device *d, void *p, uint8_t handle[HD_SHARED_HANDLE_BYTES],
                          uint8_t gpu[HD_GPU_ID_BYTES], hd_err *err) {
    if (!d->table->share) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "CUDA IPC needs memory of a GPU");
    }
    return d->table->share(d, p, handle, gpu, err);
}

void hd_device_end_sharing(hd_device *d) {
    if (d->table->end_sharing) d->table->end_sharing(d);
}

hd_status hd_device_check_access(const hd_device *d, const uint8_t gpu[HD_GPU_ID_BYTES],
                                 hd_err *err) {
    return d->table->check_access(d, gpu, err);
}

hd_status hd_device_open_shared(hd_device *d, const void **out, size_t *bytes,
                                const uint8_t handle[HD_SHARED_HANDLE_BYTES], hd_err *err) {
    *out = NULL;
    if (!d->table->open_shared) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "CUDA IPC needs weights on a GPU");
    }
    return d->table->open_shared(d, out, bytes, handle, err);
}

void hd_device_close_shared(hd_device *d, const void *p) {
    if (p) d->table->close_shared(d, p);
}

void hd_stream_wait_shared(hd_stream *s, const uint8_t event[HD_SHARED_HANDLE_BYTES]) {
    s->device->table->wait_shared(s, event);
}

bool hd_device_is_same(const hd_device *d, const hd_device *other) {
    return d->table == other->table && d->table->is_same && d->table->is_same(d, other);
}

hd_status hd_device_enable_peer_access(hd_device *d, hd_device *other, hd_err *err) {
    if (d->table != other->table) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "devices of two kinds");
    }
    return d->table->enable_peer_access ? d->table->enable_peer_access(d, other, err) : HD_OK;
}

hd_status hd_stream_open(hd_stream **out, hd_device *d, hd_err *err) {
    *out = NULL;
    return d->table->open_stream(out, d, false, err);
}

hd_status hd_stream_open_urgent(hd_stream **out, hd_device *d, hd_err *err) {
    *out = NULL;
    return d->table->open_stream(out, d, true, err);
}

void hd_stream_close(hd_stream *s) {
    if (s) s->device->table->close_stream(s);
}

void hd_stream_upload(hd_stream *s, void *device, const void *host, size_t bytes) {
    if (bytes) s->device->table->upload(s, device, host, bytes);
}

void hd_stream_download(hd_stream *s, void *host, const void *device, size_t bytes) {
    if (bytes) s->device->table->download(s, host, device, bytes);
}

void hd_stream_copy(hd_stream *s, void *to, const void *from, size_t bytes) {
    if (bytes) s->device->table->copy(s, to, from, bytes);
}

void hd_stream_clear(hd_stream *s, void *device, size_t bytes) {
    if (bytes) s->device->table->clear(s, device, bytes);
}

void hd_stream_random_fill(hd_stream *s, void *device, size_t bytes,
                           const hd_random_fill *random_fill) {
    if (bytes) s->device->table->random_fill(s, device, bytes, random_fill);
}

void hd_stream_checksum(hd_stream *s, uint64_t *sum, uint64_t first, const void *device,
                        size_t bytes) {
    if (bytes) s->device->table->checksum(s, sum, first, device, bytes);
}

void hd_stream_busy(hd_stream *s, int32_t microseconds) {
    s->device->table->busy(s, microseconds);
}

void hd_stream_fail(hd_stream *s, hd_status code, const char *what) {
    HD_FAIL(s->main_stream ? &s->main_stream->failure : &s->failure, code, "%s", what);
}

void hd_stream_report_to(hd_stream *s, hd_stream *main_stream) {
    assert(s != main_stream && !main_stream->main_stream);
    s->main_stream = main_stream;
}

void hd_stream_wait(hd_stream *s) {
    s->device->table->wait(s);
}

void hd_stream_set_check(hd_stream *s, hd_stream_check_fn *check, void *ctx) {
    s->check = check;
    s->check_ctx = ctx;
}

/* Returns the first failure and clears it. */
static hd_status take_failure(hd_stream *s, hd_err *err) {
    if (s->check) s->check(s->check_ctx, s);
    hd_err failure = s->failure;
    s->failure = (hd_err){0};
    if (failure.status == HD_OK) return HD_OK;
    return HD_FAIL(err, failure.status, "%s", failure.msg);
}

hd_status hd_stream_failure(hd_stream *s, hd_err *err) {
    return take_failure(s, err);
}

hd_status hd_stream_sync(hd_stream *s, hd_err *err) {
    hd_stream_wait(s);
    return take_failure(s, err);
}

hd_status hd_device_event_open(hd_device_event **out, hd_device *d, bool timed, hd_err *err) {
    *out = NULL;
    return d->table->open_device_event(out, d, timed, err);
}

void hd_device_event_close(hd_device_event *m) {
    if (m) m->device->table->close_device_event(m);
}

void hd_stream_record_event(hd_stream *s, hd_device_event *m) {
    s->device->table->device_event(s, m);
}

void hd_stream_wait_event(hd_stream *s, const hd_device_event *m) {
    s->device->table->wait_event(s, m);
}

hd_status hd_stream_sync_event(hd_stream *s, hd_device_event *m, hd_err *err) {
    s->device->table->wait_for(s, m);
    return take_failure(s, err);
}

bool hd_device_event_is_done(hd_device_event *m) {
    return m->device->table->event_is_done(m);
}

double hd_device_event_seconds(const hd_device_event *from, const hd_device_event *to) {
    return from->device->table->event_seconds(from, to);
}

bool hd_device_has_graphs(const hd_device *d) {
    return d->table->record != NULL;
}

void hd_stream_begin_capture(hd_stream *s) {
    s->device->table->record(s);
    s->captures = true;
}

bool hd_stream_captures(const hd_stream *s) {
    return s->captures;
}

hd_status hd_stream_end_capture(hd_stream *s, hd_graph **out, hd_err *err) {
    hd_err why = {0};
    *out = NULL;
    s->captures = false;
    const hd_status st = s->device->table->recorded(s, out, &why);
    if (st == HD_OK) return HD_OK;
    HD_TRY(take_failure(s, err)); /* what an operator said says more */
    return HD_FAIL(err, st, "%s", why.msg);
}

void hd_graph_close(hd_graph *g) {
    if (g) g->device->table->close_graph(g);
}

size_t hd_graph_bytes(const hd_graph *g) {
    return g->bytes;
}

int32_t hd_graph_launches(const hd_graph *g) {
    return g->launches;
}

void hd_stream_launch(hd_stream *s, const hd_graph *g) {
    s->device->table->launch(s, g);
}

int32_t hd_stream_workers(const hd_stream *s) {
    return s->workers;
}

hd_status hd_stream_reserve(hd_stream *s, size_t bytes_per_worker, hd_err *err) {
    return s->device->table->reserve(s, bytes_per_worker, err);
}

void *hd_stream_scratch(const hd_stream *s, int32_t worker, size_t bytes) {
    assert(bytes <= s->scratch_each);
    (void)bytes;
    return s->scratch + (size_t)worker * s->scratch_each;
}

size_t hd_stream_scratch_bytes(const hd_stream *s) {
    return s->scratch_each;
}

void hd_stream_host_tasks(hd_stream *s, int32_t n_tasks, hd_task_fn *fn, const void *arg) {
    if (s->device->table->host_memory) {
        hd_stream_tasks(s, n_tasks, fn, arg);
    } else {
        for (int32_t i = 0; i < n_tasks; i++) fn(arg, i, 0);
    }
}
