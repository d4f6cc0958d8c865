/* ucx_absent.c - what ucx.h says in a build without UCX. */
#include "comm/ucx.h"

#include "base/status.h"

#ifndef HD_UCX

bool hd_comm_ucx_is_built(void) {
    return false;
}

hd_status hd_comm_ucx_open(hd_comm_ucx **out, const hd_comm_ucx_options *o, hd_device *device,
                           hd_stream *stream, const hd_ops *ops, hd_err *err) {
    (void)o;
    (void)device;
    (void)stream;
    (void)ops;
    *out = NULL;
    return HD_FAIL(
        err, HD_EUNSUPPORTED,
        "ranks of several processes need UCX, and this program is built without UCX");
}

const hd_comm *hd_comm_ucx_interface(const hd_comm_ucx *u) {
    (void)u;
    return NULL;
}

const hd_comm_members *hd_comm_ucx_members(const hd_comm_ucx *u) {
    (void)u;
    return NULL;
}

const void *hd_comm_ucx_card(const hd_comm_ucx *u, int32_t place) {
    (void)u;
    (void)place;
    return NULL;
}

void hd_comm_ucx_read_figures(const hd_comm_ucx *u, int32_t number, hd_rank_figures *out) {
    (void)u;
    (void)number;
    *out = (hd_rank_figures){0};
}

void hd_comm_ucx_read_loss(const hd_comm_ucx *u, int32_t number, char *why) {
    (void)u;
    (void)number;
    why[0] = '\0';
}

double hd_comm_ucx_rate(const hd_comm_ucx *u, int32_t a, int32_t b) {
    (void)u, (void)a, (void)b;
    return 0;
}

const char *hd_comm_ucx_host(const hd_comm_ucx *u, int32_t number) {
    (void)u, (void)number;
    return "";
}

bool hd_comm_ucx_read_rank(const hd_comm_ucx *u, int32_t number, hd_preflight_rank *out) {
    (void)u, (void)number, (void)out;
    return false;
}

hd_status hd_comm_ucx_begin_anew(hd_comm_ucx *u, hd_parallel_config *out,
                                 void (*waits)(void *ctx), hd_err *err) {
    (void)u;
    (void)out;
    (void)waits;
    return HD_FAIL(err, HD_EUNSUPPORTED, "this program is built without UCX");
}

void hd_comm_ucx_leave(hd_comm_ucx *u) {
    (void)u;
}

void hd_comm_ucx_close(hd_comm_ucx *u) {
    (void)u;
}

#endif
