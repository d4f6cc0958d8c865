/* link.c - see link.h. */
#include "pd/link.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

pd_out *pd_out_new(size_t n) {
    if (n > UINT32_MAX) return NULL;
    pd_out *o = malloc(sizeof *o + sizeof(hd_frame) + n);
    if (o) *o = (pd_out){.n = sizeof(hd_frame) + n};
    return o;
}

static uint8_t *bytes_of(pd_out *o) {
    return (uint8_t *)(o + 1);
}

void *pd_out_payload(pd_out *o) {
    return bytes_of(o) + sizeof(hd_frame);
}

void pd_link_close(pd_link *l) {
    while (l->first) {
        pd_out *next = l->first->next;
        free(l->first);
        l->first = next;
    }
    l->last = NULL;
    l->queued = 0;
    hd_channel_close(&l->channel);
}

void pd_link_put(pd_link *l, pd_frame_kind kind, pd_out *o, int64_t now_ns) {
    const uint32_t n = (uint32_t)(o->n - sizeof(hd_frame));
    const hd_frame f = hd_channel_seal(&l->channel, (uint16_t)kind, 0, pd_out_payload(o), n);
    memcpy(bytes_of(o), &f, sizeof f);
    o->next = NULL;
    if (l->last) {
        l->last->next = o;
    } else {
        l->first = o;
    }
    l->last = o;
    l->queued += o->n;
    l->sent_ns = now_ns;
}

hd_status pd_link_say(pd_link *l, pd_frame_kind kind, const void *payload, size_t n,
                      int64_t now_ns) {
    pd_out *o = pd_out_new(n);
    if (!o) return HD_ENOMEM;
    if (n) memcpy(pd_out_payload(o), payload, n);
    pd_link_put(l, kind, o, now_ns);
    return HD_OK;
}

static void drop_first(pd_link *l) {
    pd_out *o = l->first;
    l->first = o->next;
    if (!l->first) l->last = NULL;
    free(o);
}

hd_status pd_link_flush(pd_link *l, hd_err *err) {
    while (l->first) {
        pd_out *o = l->first;
        const ssize_t n = send(l->channel.fd, bytes_of(o) + o->sent, o->n - o->sent,
                               MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return HD_OK;
        if (n < 0) return HD_FAIL(err, HD_EIO, "cannot send: %s", strerror(errno));
        o->sent += (size_t)n;
        l->queued -= (size_t)n;
        l->bytes_out += (size_t)n;
        if (o->sent == o->n) drop_first(l);
    }
    return HD_OK;
}

hd_status pd_link_read(pd_link *l, int64_t now_ns, hd_err *err) {
    const uint32_t before = l->channel.have;
    const hd_status st = hd_channel_read(&l->channel, err);
    if (st == HD_OK) {
        l->bytes_in += sizeof(hd_frame) + l->channel.head.n - before;
    } else if (l->channel.have > before) {
        l->bytes_in += l->channel.have - before;
    }
    if (st == HD_OK || l->channel.have > before) l->heard_ns = now_ns;
    return st;
}
