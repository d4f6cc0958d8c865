/* export.h - what a rank tells the other processes of its host about a block of its GPU's memory, and
 * the check of what they tell. Exports travel in the messages of a world, as they lie in memory. */
#ifndef HD_COMM_EXPORT_H
#define HD_COMM_EXPORT_H

#include <stdint.h>

#include "comm/silence.h"
#include "device/device.h"

typedef struct hd_export {
    uint32_t magic, version;
    uint64_t address, bytes; /* of the block, in its owner */
    hd_place place;          /* of its owner */
    uint8_t gpu[HD_GPU_ID_BYTES];
    uint8_t handle[HD_SHARED_HANDLE_BYTES];
} hd_export;

_Static_assert(sizeof(hd_export) == 120 && sizeof(hd_export) % sizeof(float) == 0,
               "the same on all ranks, and gathered as floats");

/* Shares a block of hd_device_alloc(). */
hd_status hd_export_make(hd_export *out, hd_device *d, void *block, size_t bytes, hd_err *err);

/* Checks what rank `rank` has told. at_least: bytes that its block must have. HD_EFORMAT: no export of
 * this version, or too small; HD_EUNSUPPORTED: of another host, or of another user's process. */
hd_status hd_export_check(const hd_export *e, int32_t rank, uint64_t at_least,
                          const hd_place *here, hd_err *err);

/* Opens it, after the check. */
hd_status hd_export_open(const hd_export *e, int32_t rank, hd_device *d, const void **out,
                         hd_err *err);

#endif
