/* gpu.h - the GPUs that can be rented, and a CPU, as rows of a table: memory, speed and links.
 *
 * A kernel takes the time of a launch that waits for the one before, and then that of its bytes or
 * of its operations, whichever is longer. An exchange takes its latency, and then the time of what
 * a rank sends on its slower link. docs/plan.md has the source of every number. */
#ifndef HD_CAPACITY_GPU_H
#define HD_CAPACITY_GPU_H

#include <stdbool.h>
#include <stddef.h>

#include "base/dtype.h"
#include "base/status.h"

/* X(field, unit, what it is) of the numbers of a GPU */
#define HD_GPU_NUMBERS(X)                                                      \
    X(memory_gb, "GB", "memory of a rank")                                     \
    X(reserved_gb, "GB", "of it for the driver and recorded graphs")           \
    X(memory_tb_s, "TB/s", "what kernels read of it")                          \
    X(tflops_8bit, "TFLOP/s", "dense products of 8-bit and narrower matrices") \
    X(tflops_16bit, "TFLOP/s", "other dense products, and attention")          \
    X(launch_us, "us", "a kernel that waits for the one before")               \
    X(node, "ranks", "ranks that share a node")                                \
    X(link_gb_s, "GB/s", "what a rank sends to ranks of its node")             \
    X(link_us, "us", "an exchange inside a node")                              \
    X(network_gb_s, "GB/s", "what a rank sends to other nodes")                \
    X(network_us, "us", "an exchange between nodes")                           \
    X(host_gb_s, "GB/s", "what a rank copies from pinned host memory")         \
    X(disk_gb_s, "GB/s", "what a rank reads from its disk")

typedef struct hd_gpu {
    char name[64];
    const char *source; /* of the numbers: static text */
    bool cpu;           /* ranks of a node exchange rows in the memory that they compute in */
#define X(field, unit, what) double field;
    HD_GPU_NUMBERS(X)
#undef X
} hd_gpu;

/* Returns row i of the table, or NULL behind the last. */
const hd_gpu *hd_gpu_at(size_t i);

/* Finds a row by its name, or reads a JSON file of numbers by their names; one that the file does
 * not give is that of the row `like`, which it may name, else all must be given. HD_EINVAL: neither
 * a row nor a file; the error lists the rows, or names what the file has wrong. */
hd_status hd_gpu_find(hd_gpu *out, const char *name, hd_err *err);

/* Seconds of `calls` kernels that move so many bytes and compute so much, all together. type: of the
 * stored matrix, or HD_NONE. */
double hd_gpu_kernel_seconds(const hd_gpu *m, double calls, double bytes, double flops,
                             hd_dtype type);

/* Seconds of `calls` exchanges in which a rank sends so many bytes, all together, to ranks of its
 * node and to others. */
double hd_gpu_exchange_seconds(const hd_gpu *m, double calls, double inside, double outside);

#endif
