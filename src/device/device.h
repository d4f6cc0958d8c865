/* device.h - what a device must be able to do, and no mathematics.
 *
 * A device owns memory. A stream is an ordered queue of work on a device and remembers the
 * first failure of anything queued on it, as FILE does: queueing returns nothing, sync
 * reports. The CPU device is a worker pool behind a stream of depth zero: an op is finished
 * when its call returns, and nothing is left to wait for. A CUDA device is one GPU. */
#ifndef HD_DEVICE_DEVICE_H
#define HD_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/random_fill.h"
#include "base/thread_pool.h"
#include "base/status.h"

HD_BEGIN_C

typedef struct hd_device hd_device;
typedef struct hd_stream hd_stream;
typedef struct hd_device_event hd_device_event; /* a place in a stream's queue */
typedef struct hd_graph hd_graph; /* ops that were recorded, to be launched as one */

typedef struct hd_cpu_options {
    int32_t n_threads; /* 0: one per core, base/cores.h */
    bool pin;          /* bind workers to cores */
    uint32_t without;  /* instruction sets that operators leave alone, base/cpu.h */
} hd_cpu_options;

hd_status hd_device_open_cpu(hd_device **out, const hd_cpu_options *options, hd_err *err);

/* GPU number `ordinal` of those CUDA shows to this process. HD_EUNSUPPORTED where the build or
 * the machine has none. */
hd_status hd_device_open_cuda(hd_device **out, int32_t ordinal, hd_err *err);

/* Called by the thread that will queue the work: a CPU device with pin binds it too. */
void hd_device_bind_thread(const hd_device *d);

void hd_device_close(hd_device *d); /* NULL is fine; after its streams */

/* Device memory: zeroed, aligned to 256 bytes, taken at open and never in a step. */
hd_status hd_device_alloc(hd_device *d, void **out, size_t bytes, const char *what,
                          hd_err *err);
/* Host memory that copies to and from the device start from: pinned where that matters. */
hd_status hd_device_alloc_host(hd_device *d, void **out, size_t bytes, const char *what,
                               hd_err *err);

/* Of device memory, now; 0: unknown. */
size_t hd_device_free_bytes(const hd_device *d);

void hd_device_release(hd_device *d, void *p); /* either kind; NULL is fine */

/* Whether ops may be given any host memory, because device memory is host memory. */
bool hd_device_is_host(const hd_device *d);

hd_status hd_stream_open(hd_stream **out, hd_device *d, hd_err *err);
void hd_stream_close(hd_stream *s); /* NULL is fine */

/* Host to device, in queue order. The host's bytes are read before the call returns, so they
 * may be changed at once; a download into them that is still queued would come too late. */
void hd_stream_upload(hd_stream *s, void *device, const void *host, size_t bytes);

/* Device to host, in queue order: there after hd_stream_wait or hd_stream_sync. */
void hd_stream_download(hd_stream *s, void *host, const void *device, size_t bytes);

/* From one place of the stream's device to another. */
void hd_stream_copy(hd_stream *s, void *to, const void *from, size_t bytes);

/* Makes up device memory where it lies. `bytes` are rounded up to whole words of 8. */
void hd_stream_random_fill(hd_stream *s, void *device, size_t bytes,
                           const hd_random_fill *random_fill);

/* Records a failure; the first one stays. */
void hd_stream_fail(hd_stream *s, hd_status code, const char *what);

/* Waits for everything queued; failures stay recorded. */
void hd_stream_wait(hd_stream *s);

/* Waits for everything queued and gives its first failure, which is then forgotten. */
hd_status hd_stream_sync(hd_stream *s, hd_err *err);

/* ---- waiting for a part of the queue, and measuring it ---- */

/* timed: for hd_device_event_seconds too; such a mark costs a GPU a pause of some microseconds. */
hd_status hd_device_event_open(hd_device_event **out, hd_device *d, bool timed, hd_err *err);
void hd_device_event_close(hd_device_event *m); /* NULL is fine; before its device */

/* Sets m behind everything queued so far; where it was before is forgotten. */
void hd_stream_record_event(hd_stream *s, hd_device_event *m);

/* Waits for what is queued before m and gives the stream's first failure, which is then
 * forgotten. */
hd_status hd_stream_sync_event(hd_stream *s, hd_device_event *m, hd_err *err);

/* Between two timed marks that were reached: after the calls above, hd_stream_wait or _sync. */
double hd_device_event_seconds(const hd_device_event *from, const hd_device_event *to);

/* Keeps a GPU busy for about so long, so that what is queued meanwhile runs without gaps. */
void hd_stream_busy(hd_stream *s, int32_t microseconds);

/* ---- recording: ops only, no copies; they run when the graph is launched, with the same
 * arguments every time ---- */

bool hd_device_has_graphs(const hd_device *d); /* false: the calls below are not for it */

/* What is queued from here on is recorded instead. */
void hd_stream_begin_capture(hd_stream *s);

/* Ends it. The stream must outlive the graph. */
hd_status hd_stream_end_capture(hd_stream *s, hd_graph **out, hd_err *err);
void hd_graph_close(hd_graph *g); /* NULL is fine; not while it runs */

/* Of device memory, as far as seen: what was free before less what is free after, so 0 where it
 * fitted into what the driver had already. */
size_t hd_graph_bytes(const hd_graph *g);

void hd_stream_launch(hd_stream *s, const hd_graph *g);

/* ---- for ops only ---- */

/* CPU: runs fn(arg, task, worker) for every task in [0, n_tasks), returns when all are done. */
void hd_stream_tasks(hd_stream *s, int32_t n_tasks, hd_task_fn *fn, const void *arg);

/* How many parts of an op may need scratch at once: threads of the CPU, blocks on a GPU. */
int32_t hd_stream_workers(const hd_stream *s);

/* Scratch of one worker in device memory, aligned to 64 bytes; the size is fixed before the
 * first step and covers what every op of the step asks for. */
hd_status hd_stream_reserve(hd_stream *s, size_t bytes_per_worker, hd_err *err);
void *hd_stream_scratch(const hd_stream *s, int32_t worker, size_t bytes);
size_t hd_stream_scratch_bytes(const hd_stream *s); /* from one worker's to the next */

HD_END_C

#endif
