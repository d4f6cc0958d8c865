/* ucx_library.h - the functions of UCX that ucx.c calls, found when the first ranks meet: no other
 * command waits for the library to load, and it need not be installed. */
#ifndef HD_COMM_UCX_LIBRARY_H
#define HD_COMM_UCX_LIBRARY_H

#include <ucp/api/ucp.h>

#include "base/status.h"

#define UCP_CALLS(X)              \
    X(config_read)                \
    X(config_modify)              \
    X(config_release)             \
    X(init_version)               \
    X(cleanup)                    \
    X(worker_create)              \
    X(worker_destroy)             \
    X(worker_get_efd)             \
    X(worker_get_address)         \
    X(worker_release_address)     \
    X(worker_set_am_recv_handler) \
    X(worker_progress)            \
    X(worker_arm)                 \
    X(am_send_nbx)                \
    X(am_data_release)            \
    X(ep_create)                  \
    X(ep_close_nbx)               \
    X(request_check_status)       \
    X(request_free)

typedef struct ucx_library {
#define X(name) __typeof__(ucp_##name) *name;
    UCP_CALLS(X)
#undef X
    __typeof__(ucs_status_string) *status_string;
} ucx_library;

/* Loads the library once; it stays. HD_EUNSUPPORTED: it is not installed, or too old. */
hd_status ucx_library_load(const ucx_library **out, hd_err *err);

#endif
