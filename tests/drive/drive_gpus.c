/* drive_gpus.c - hadal serve whose GPUs are those of fakes/ipc_device.h: ranks of several processes with
 * --backend cuda compute on the CPU, and exchange rows through memory that they share.
 *
 *     drive_gpus serve MODEL_DIR --backend cuda --no-sandbox [FLAGS...]
 *
 * The linker sends the calls through here first (-Wl,--wrap in the Makefile). */
#include <signal.h>
#include <string.h>

#include "cli/commands.h"
#include "fakes/ipc_device.h"
#include "ops/ops.h"

hd_status __real_hd_ops_open(hd_ops *t, hd_device **d, const char *backend,
                             const hd_ops_options *options, hd_err *err);
hd_status __wrap_hd_ops_open(hd_ops *t, hd_device **d, const char *backend,
                             const hd_ops_options *options, hd_err *err);
hd_status __wrap_hd_device_open_cuda(hd_device **out, int32_t ordinal, hd_cuda_path path,
                                     hd_err *err);
int32_t __wrap_hd_device_count_gpus(void);

hd_status __wrap_hd_device_open_cuda(hd_device **out, int32_t ordinal, hd_cuda_path path,
                                     hd_err *err) {
    (void)ordinal;
    (void)path;
    *out = ipc_device_open();
    return *out ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a device");
}

/* The operators of the CPU, on a device that is none. */
hd_status __wrap_hd_ops_open(hd_ops *t, hd_device **d, const char *backend,
                             const hd_ops_options *options, hd_err *err) {
    if (strcmp(backend, "cuda") != 0) return __real_hd_ops_open(t, d, backend, options, err);
    HD_TRY(__real_hd_ops_open(t, d, "cpu", options, err));
    hd_device_close(*d);
    t->exchange = &ipc_device_exchange;
    return __wrap_hd_device_open_cuda(d, options->gpu, options->cuda_path, err);
}

int32_t __wrap_hd_device_count_gpus(void) {
    return 1;
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    return argc > 1 ? cmd_serve(argc - 1, argv + 1) : 2;
}
