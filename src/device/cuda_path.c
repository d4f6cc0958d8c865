/* cuda_path.c - see cuda_path.h. */
#include "device/cuda_path.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

const char *const hd_cuda_path_names[] = {"auto", "generic", "sm90", NULL};

hd_status hd_cuda_path_of(hd_cuda_path *out, const char *name, hd_err *err) {
    *out = HD_CUDA_AUTO;
    if (!name) return HD_OK;
    for (int i = 0; hd_cuda_path_names[i]; i++) {
        *out = (hd_cuda_path)i;
        if (strcmp(name, hd_cuda_path_names[i]) == 0) return HD_OK;
    }
    return HD_FAIL(err, HD_EINVAL, "cuda_path '%s' is none of auto, generic, sm90", name);
}

/* Whether there is code for a compute capability, and whether it is of that one alone. */
static bool has_code(const char *archs, int32_t major, int32_t minor, bool *own) {
    bool any = false;
    *own = false;
    while (*archs) {
        char *end;
        const long arch = strtol(archs, &end, 10);
        if (end == archs) break;
        const bool alone = *end == 'a', same = arch == 10 * major + minor;
        any = any || (alone ? same : arch / 10 == major && arch % 10 <= minor);
        *own = *own || (alone && same);
        archs = end + strcspn(end, " ");
        archs += strspn(archs, " ");
    }
    return any;
}

hd_status hd_cuda_path_choose(hd_cuda_path *path, const char *archs, int32_t gpu, int32_t major,
                              int32_t minor, hd_err *err) {
    bool own;
    if (major < 8) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "GPU %d has compute capability %d.%d; hadal needs 8.0 or more", gpu,
                       major, minor);
    }
    if (!has_code(archs, major, minor, &own)) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "GPU %d has compute capability %d.%d; this build has code for %s", gpu,
                       major, minor, archs);
    }
    const bool sm90 = own && major == 9 && minor == 0;
    if (*path == HD_CUDA_SM90 && !sm90) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "cuda_path sm90 is for compute capability 9.0; GPU %d has %d.%d", gpu,
                       major, minor);
    }
    if (*path == HD_CUDA_AUTO) *path = sm90 ? HD_CUDA_SM90 : HD_CUDA_GENERIC;
    return HD_OK;
}
