/* export.c - see export.h. */
#include "comm/export.h"

#include <string.h>

enum { MAGIC = 0x58454448, VERSION = 1 };

hd_status hd_export_make(hd_export *out, hd_device *d, void *block, size_t bytes, hd_err *err) {
    *out = (hd_export){.magic = MAGIC,
                       .version = VERSION,
                       .address = (uint64_t)(uintptr_t)block,
                       .bytes = bytes,
                       .place = hd_place_here()};
    return hd_device_share(d, block, out->handle, out->gpu, err);
}

hd_status hd_export_check(const hd_export *e, int32_t rank, uint64_t at_least,
                          const hd_place *here, hd_err *err) {
    if (e->magic != MAGIC || e->version != VERSION) {
        return HD_FAIL(err, HD_EFORMAT, "rank %d told of no memory of its GPU", rank);
    }
    if (e->bytes < at_least || e->address == 0 || e->address > UINT64_MAX - e->bytes) {
        return HD_FAIL(
            err, HD_EFORMAT,
            "rank %d shares %llu bytes of its GPU's memory, of which %llu are needed", rank,
            (unsigned long long)e->bytes, (unsigned long long)at_least);
    }
    if (!here->host || e->place.host != here->host) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "rank %d is on another host, or in another container: ranks on GPUs read "
            "each other's memory by CUDA IPC, and nothing carries rows between hosts",
            rank);
    }
    if (!hd_place_is_of_user(&e->place)) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "rank %d says that it is process %d, which is none of this user", rank,
                       e->place.pid);
    }
    return HD_OK;
}

hd_status hd_export_open(const hd_export *e, int32_t rank, hd_device *d, const void **out,
                         hd_err *err) {
    size_t bytes = 0;
    hd_err why = {0};
    hd_status st = hd_device_check_access(d, e->gpu, &why);
    if (st == HD_OK) st = hd_device_open_shared(d, out, &bytes, e->handle, &why);
    if (st != HD_OK) return HD_FAIL(err, st, "the GPU of rank %d: %s", rank, why.msg);
    if (bytes >= e->bytes) return HD_OK;
    hd_device_close_shared(d, *out);
    *out = NULL;
    return HD_FAIL(err, HD_EFORMAT, "rank %d shares %llu bytes, and %zu are there", rank,
                   (unsigned long long)e->bytes, bytes);
}
