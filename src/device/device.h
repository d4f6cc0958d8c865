/* device.h - devices (CPU or GPU): memory, streams, events and graphs, without operators.
 *
 * A device owns memory. A stream is an ordered queue of operators and copies on a device. It
 * remembers the first failure of anything queued on it, as FILE does: queueing returns
 * nothing, sync reports the failure. The CPU device is a thread pool behind a stream of
 * depth zero: an operator is finished when its call returns. A CUDA device is one GPU. */
#ifndef HD_DEVICE_DEVICE_H
#define HD_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/random_fill.h"
#include "base/thread_pool.h"
#include "base/status.h"
#include "device/cuda_path.h"

HD_BEGIN_C

typedef struct hd_device hd_device;
typedef struct hd_stream hd_stream;
typedef struct hd_device_event hd_device_event; /* a place in a stream's queue */
typedef struct hd_graph hd_graph; /* captured operators, launched as one (CUDA graph) */

typedef struct hd_cpu_options {
    int32_t n_threads; /* 0: one per core, base/cores.h */
    bool pin;          /* bind threads to cores */
    uint32_t without;  /* instruction sets that operators must not use, base/cpu.h */
    /* Memory takes room when it is written, and there may be more than this machine has: for
     * models whose operators compute nothing. */
    bool untouched;
} hd_cpu_options;

hd_status hd_device_open_cpu(hd_device **out, const hd_cpu_options *options, hd_err *err);

/* Opens GPU number `ordinal` of those that CUDA shows to this process. HD_EUNSUPPORTED if the build has
 * no CUDA, or no code for that GPU and path; HD_EDEVICE: there is none. */
hd_status hd_device_open_cuda(hd_device **out, int32_t ordinal, hd_cuda_path path, hd_err *err);
hd_cuda_path hd_device_cuda_path(const hd_device *d); /* of no GPU: HD_CUDA_AUTO */
int32_t hd_device_count_gpus(void);                   /* that CUDA shows to this process */

/* Binds the calling thread, which will queue operators, if the CPU device was opened with
 * pin. */
void hd_device_bind_thread(const hd_device *d);

void hd_device_close(hd_device *d); /* NULL is fine; after its streams */

/* Allocates device memory: zeroed, aligned to 256 bytes. Never called in a step. */
hd_status hd_device_alloc(hd_device *d, void **out, size_t bytes, const char *what,
                          hd_err *err);
/* Allocates host memory, zeroed, that operators may read and write in place too: pinned for a GPU. */
hd_status hd_device_alloc_host(hd_device *d, void **out, size_t bytes, const char *what,
                               hd_err *err);

/* Lets operators read host memory in place, also a mapped file, until the device is closed; it must
 * stay there. HD_EUNSUPPORTED: this device cannot. */
hd_status hd_device_read_host(hd_device *d, const void *host, size_t bytes, hd_err *err);

/* Pins host memory, also a mapped file, until the device is closed, so that the host and other streams
 * go on while it is copied to the device; it must stay there. A failure has the reason, and copies
 * from it work all the same. Nothing to do if device memory is host memory. */
hd_status hd_device_pin_host(hd_device *d, const void *host, size_t bytes, hd_err *err);

/* Returns the free bytes of device memory now, within the limit; 0: unknown, or none. */
size_t hd_device_free_bytes(const hd_device *d);

/* Takes only so many of the bytes that are free now: what would be more fails with HD_ENOMEM.
 * HD_EUNSUPPORTED: device memory is host memory. */
hd_status hd_device_limit(hd_device *d, size_t bytes, hd_err *err);

void hd_device_release(hd_device *d, void *p); /* device or host memory; NULL is fine */

/* Makes memory that is allocated from now on discardable, where that needs other memory. */
void hd_device_keep_addresses(hd_device *d);

/* Gives device or host memory back to the system and keeps its address; its content is lost. Adds
 * the bytes to *bytes; 0 of pinned memory, and of small blocks of a GPU. Nothing that uses it may be
 * queued until it is restored. p NULL is fine. HD_EUNSUPPORTED: this device cannot. */
hd_status hd_device_discard(hd_device *d, void *p, size_t *bytes, hd_err *err);

/* Takes memory for what was discarded, all zero; else nothing. p NULL is fine. */
hd_status hd_device_restore(hd_device *d, void *p, hd_err *err);

/* ---- memory of other processes: CUDA IPC ---- */

enum { HD_SHARED_HANDLE_BYTES = 64, HD_GPU_ID_BYTES = 16 };

/* Lets other processes of this machine open a block of hd_device_alloc(): fills its
 * cudaIpcMemHandle_t, and the UUID of its GPU. A shared block that is released is freed by
 * hd_device_end_sharing(). HD_EUNSUPPORTED: this device shares none. */
hd_status hd_device_share(hd_device *d, void *p, uint8_t handle[HD_SHARED_HANDLE_BYTES],
                          uint8_t gpu[HD_GPU_ID_BYTES], hd_err *err);
/* Frees the shared blocks that were released: no other process has them open any more. */
void hd_device_end_sharing(hd_device *d);

/* Whether this device reaches memory of the GPU with that UUID. HD_EUNSUPPORTED, with both by name:
 * they are not connected. A GPU that CUDA does not show to this process may still be reached: then opening
 * says. */
hd_status hd_device_check_access(const hd_device *d, const uint8_t gpu[HD_GPU_ID_BYTES],
                                 hd_err *err);

/* Opens memory that another process of this machine shares, of this device or of one that it reaches;
 * handle is the other's cudaIpcMemHandle_t. It is written only if the other process expects that.
 * *bytes: from *out to its end. HD_EUNSUPPORTED: this device shares none; HD_EFORMAT: the handle
 * opens nothing here. */
hd_status hd_device_open_shared(hd_device *d, const void **out, size_t *bytes,
                                const uint8_t handle[HD_SHARED_HANDLE_BYTES], hd_err *err);
void hd_device_close_shared(hd_device *d, const void *p); /* nothing that reads it is queued */

/* Lets everything that is queued on s from now on wait until another process's work before its
 * cudaIpcEventHandle_t is done. */
void hd_stream_wait_shared(hd_stream *s, const uint8_t event[HD_SHARED_HANDLE_BYTES]);

/* Returns whether operators may read any host memory, because device memory is host memory. */
bool hd_device_is_host(const hd_device *d);

/* Lets operators on d read and write the memory of another device of this process. HD_EUNSUPPORTED,
 * with both by name: they are not connected. */
bool hd_device_is_same(const hd_device *d, const hd_device *other); /* one GPU, opened twice */
hd_status hd_device_enable_peer_access(hd_device *d, hd_device *other, hd_err *err);

hd_status hd_stream_open(hd_stream **out, hd_device *d, hd_err *err);
/* Of a GPU: its operators begin before those of other streams, where both could. */
hd_status hd_stream_open_urgent(hd_stream **out, hd_device *d, hd_err *err);
void hd_stream_close(hd_stream *s); /* NULL is fine */

/* Copies host to device, in queue order. The host's bytes are read before the call returns,
 * so the caller may change them at once. A download into them that is still queued would
 * come too late. */
void hd_stream_upload(hd_stream *s, void *device, const void *host, size_t bytes);

/* Copies device to host, in queue order: complete after hd_stream_wait or hd_stream_sync. */
void hd_stream_download(hd_stream *s, void *host, const void *device, size_t bytes);

/* Copies to memory of the stream's device or of hd_device_alloc_host(), from its own memory, from that
 * of another device of this process, or from host memory of hd_device_alloc_host(). `from` must stay
 * until the copy is done. */
void hd_stream_copy(hd_stream *s, void *to, const void *from, size_t bytes);

void hd_stream_clear(hd_stream *s, void *device,
                     size_t bytes); /* all bytes 0, in queue order */

/* Fills device memory with random values. `bytes` is rounded up to a multiple of 8. */
void hd_stream_random_fill(hd_stream *s, void *device, size_t bytes,
                           const hd_random_fill *random_fill);

/* Adds hd_checksum_blocks() of device memory, aligned to 8 bytes, to *sum, in device memory too. */
void hd_stream_checksum(hd_stream *s, uint64_t *sum, uint64_t first, const void *device,
                        size_t bytes);

/* Records a failure; the first one stays. */
void hd_stream_fail(hd_stream *s, hd_status code, const char *what);

/* Records failures of s on main_stream from now on: s is one of several streams of a rank,
 * of which only main_stream is synchronized. One thread queues on both. */
void hd_stream_report_to(hd_stream *s, hd_stream *main_stream);

/* Runs before hd_stream_sync, hd_stream_sync_event and hd_stream_failure return the stream's first
 * failure: may record one, of operators that cannot do it themselves. */
typedef void hd_stream_check_fn(void *ctx, hd_stream *s);
void hd_stream_set_check(hd_stream *s, hd_stream_check_fn *check, void *ctx);

/* Waits for everything queued; failures stay recorded. */
void hd_stream_wait(hd_stream *s);

/* Waits for everything queued, returns its first failure and clears it. */
hd_status hd_stream_sync(hd_stream *s, hd_err *err);

/* The same without waiting: failures so far. */
hd_status hd_stream_failure(hd_stream *s, hd_err *err);

/* ---- events: waiting for a part of the queue, and timing it ---- */

/* Opens an event. timed: for hd_device_event_seconds too; such an event costs a GPU some
 * microseconds. */
hd_status hd_device_event_open(hd_device_event **out, hd_device *d, bool timed, hd_err *err);
void hd_device_event_close(hd_device_event *m); /* NULL is fine; before its device */

/* Records m after everything queued so far; its previous place is forgotten. */
void hd_stream_record_event(hd_stream *s, hd_device_event *m);

/* Lets everything that is queued on s from now on wait, on the device, until everything
 * queued before m's last record is done; the host does not wait. s may be any stream of m's
 * device. An event that was never recorded makes nothing wait, so another thread that waits
 * must know that m was recorded. In a capture, s is captured too from here on, until the
 * stream that began the capture waits for it. */
void hd_stream_wait_event(hd_stream *s, const hd_device_event *m);

/* Waits for everything queued before m, returns the stream's first failure and clears it. */
hd_status hd_stream_sync_event(hd_stream *s, hd_device_event *m, hd_err *err);

/* Whether everything queued before m's last record is done, or m was never recorded; without
 * waiting. */
bool hd_device_event_is_done(hd_device_event *m);

/* Returns the seconds between two timed events that were reached: after the calls above,
 * hd_stream_wait or hd_stream_sync. */
double hd_device_event_seconds(const hd_device_event *from, const hd_device_event *to);

/* Keeps one thread of a GPU busy for about this time: what is queued on the stream begins after it. A CPU does nothing. */
void hd_stream_busy(hd_stream *s, int32_t microseconds);

/* ---- graphs: captured operators, no copies; every launch uses the same arguments ---- */

bool hd_device_has_graphs(const hd_device *d); /* false: the calls below must not be used */

/* Begins a capture: operators queued from here on are captured instead of run. */
void hd_stream_begin_capture(hd_stream *s);
bool hd_stream_captures(const hd_stream *s); /* between begin and end, on that stream */

/* Ends the capture; s must have waited for the other streams that joined it. The stream must
 * outlive the graph. */
hd_status hd_stream_end_capture(hd_stream *s, hd_graph **out, hd_err *err);
void hd_graph_close(hd_graph *g); /* NULL is fine; not while it runs */

/* Returns the device memory of a graph, as the difference of free memory before and after; 0
 * if it fitted into memory that the driver already had. */
size_t hd_graph_bytes(const hd_graph *g);

/* Returns how many kernels and copies a graph launches. */
int32_t hd_graph_launches(const hd_graph *g);

void hd_stream_launch(hd_stream *s, const hd_graph *g);

/* Runs fn for every task in [0, n_tasks), all of them on the host: on the threads of a CPU, or on
 * the caller beside a GPU. Returns when all are done. */
void hd_stream_host_tasks(hd_stream *s, int32_t n_tasks, hd_task_fn *fn, const void *arg);

/* ---- for operators only ---- */

/* CPU: runs fn(arg, task, worker) for every task in [0, n_tasks), returns when all are done. */
void hd_stream_tasks(hd_stream *s, int32_t n_tasks, hd_task_fn *fn, const void *arg);

/* Returns how many workers of an operator may need scratch at once: CPU threads, or GPU
 * blocks. */
int32_t hd_stream_workers(const hd_stream *s);

/* Scratch of one worker in device memory, aligned to 64 bytes. Its size is fixed before the
 * first step and covers every operator of the step. */
hd_status hd_stream_reserve(hd_stream *s, size_t bytes_per_worker, hd_err *err);
void *hd_stream_scratch(const hd_stream *s, int32_t worker, size_t bytes);
/* distance from one worker's scratch to the next */
size_t hd_stream_scratch_bytes(const hd_stream *s);

HD_END_C

#endif
