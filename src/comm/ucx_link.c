/* ucx_link.c - a link of UCX active messages, or of shared memory, while it is open: messages come and leave,
 * threads wait for them, and an epoch ends. */
#include "comm/ucx.h"

#ifdef HD_UCX

#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/progress.h"
#include "base/status.h"
#include "comm/preflight.h"
#include "comm/ucx_internal.h"

enum {
    YIELDS = 100, /* while bytes wait for room at the other end */
    NAP_NS = 50000,
    BROKEN_MS = 1000 /* what the watch needs to find out that a rank ended */
};

/* ---- the end of communication ---- */

void ucx_end_here(void *ctx, uint32_t epoch, const char *why) {
    hd_comm_ucx *u = ctx;
    pthread_mutex_lock(&u->mutex);
    if (atomic_load(&u->over) <= epoch) {
        snprintf(u->why, sizeof u->why, "%s", why);
        eventfd_write(u->wake_fd, 1);
        atomic_store(&u->over, epoch + 1);
        if (u->shm) comm_shm_wake(u->shm);
    }
    pthread_mutex_unlock(&u->mutex);
    if (u->gpu) comm_ipc_end(u->gpu);
    if (u->o.on_end) u->o.on_end(u->o.ctx);
}

void ucx_end_all(hd_comm_ucx *u, const char *why) {
    ucx_end_here(u, u->limits.epoch, why);
    hd_rendezvous_abort(u->rendezvous, why);
}

static void end_all(void *ctx, const char *why) {
    ucx_end_all(ctx, why);
}

static const char *ended(void *ctx) {
    const hd_comm_ucx *u = ctx;
    return ucx_is_over(u) ? u->why : NULL;
}

void ucx_on_lost(void *arg, ucp_ep_h ep, ucs_status_t status) {
    const ucx_peer *p = arg;
    (void)ep;
    (void)status;
    if (p->world->broken) return;
    p->world->broken = p;
    p->world->broken_ns = hd_now_ns();
}

/* The watch has found nothing wrong with the rank whose connection broke. */
static void look_for_broken(hd_comm_ucx *u) {
    if (!u->broken || hd_now_ns() - u->broken_ns < BROKEN_MS * 1000000LL) return;
    char why[120];
    snprintf(why, sizeof why, "rank %d is lost: UCX lost the connection to it",
             u->broken->number);
    ucx_end_all(u, why);
}

/* ---- receiving ---- */

static hd_received *place_of(hd_comm_ucx *u, int32_t from, int32_t group, int32_t lane,
                             uint64_t ticket) {
    const int32_t row = group * (int32_t)HD_N_MESSAGE_LANES + lane;
    return &u->peers[from]
                .at[row * HD_COMM_MAX_INFLIGHT + (int32_t)(ticket % HD_COMM_MAX_INFLIGHT)];
}

static void end_by_wrong(hd_comm_ucx *u, int32_t from, const char *what) {
    char why[120];
    snprintf(why, sizeof why, "rank %d sent rank %d %s", u->peers[from].number,
             u->o.rendezvous.rank, what);
    ucx_end_all(u, why);
}

ucs_status_t ucx_on_message(void *arg, const void *header, size_t header_n, void *data,
                            size_t n, const ucp_am_recv_param_t *param) {
    hd_comm_ucx *u = arg;
    const bool stays = param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA;
    hd_message head;
    hd_err err = {0};
    if (header_n != sizeof head) return UCS_OK;
    memcpy(&head, header, sizeof head);
    /* what no rank of this world and epoch has made changes nothing */
    if (hd_message_check(&head, &u->limits, data, n, &err) != HD_OK) return UCS_OK;
    hd_received *r = place_of(u, head.from, head.group, head.lane, head.ticket);
    if (r->full || (n && !stays)) {
        end_by_wrong(u, head.from, "more messages than it may");
        return UCS_OK;
    }
    *r = (hd_received){.head = head, .data = n ? data : NULL, .full = true};
    return n ? UCS_INPROGRESS : UCS_OK;
}

static void release(void *ctx, hd_received *r) {
    hd_comm_ucx *u = ctx;
    if (r->data && !u->shm) u->ucp->am_data_release(u->worker, (void *)(uintptr_t)r->data);
    *r = (hd_received){0};
}

void ucx_sleep(hd_comm_ucx *u, int limit_ms) {
    struct pollfd p[2] = {
        {.fd = u->ucx_fd,  .events = POLLIN},
        {.fd = u->wake_fd, .events = POLLIN}
    };
    if (!u->worker)
        poll(p + 1, 1, limit_ms);
    else if (u->ucp->worker_arm(u->worker) == UCS_OK)
        poll(p, 2, limit_ms);
}

typedef struct awaited awaited;

typedef bool ready_fn(hd_comm_ucx *u, const awaited *a);

/* What a thread waits for. */
struct awaited {
    ready_fn *is_ready;
    hd_received *message; /* NULL: that a set is sent */
    hd_group group;
    hd_message_lane lane;
    uint64_t ticket;
    int32_t from; /* the rank that must send it, or -1 */
    int32_t set;
    bool for_ever; /* a command, which comes when there is work */
};

int32_t ucx_preflight_ms(const hd_comm_ucx *u) {
    return u->o.preflight_ms ? u->o.preflight_ms : HD_PREFLIGHT_MS;
}

void ucx_name_pair(char why[UCX_REASON], const hd_comm_ucx *u, int32_t other,
                   const char *what) {
    const int32_t own = u->o.rendezvous.rank;
    snprintf(why, UCX_REASON, "rank %d on %s: %s rank %d on %s", own, u->hosts[own], what,
             other, u->hosts[other]);
}

static void end_preflight(hd_comm_ucx *u, int32_t from) {
    const char *missing =
        u->greeted ? "not all of 1 MB came (look at MTU and cables, or set UCX_NET_DEVICES)"
                   : "nothing came (open TCP ports, or set UCX_NET_DEVICES)";
    char what[120], why[UCX_REASON];
    snprintf(what, sizeof what, "%s within %g s from",
             from < 0 ? "messages did not leave (look at MTU and cables)" : missing,
             ucx_preflight_ms(u) / 1000.0);
    ucx_name_pair(why, u, from < 0 ? u->o.rendezvous.rank : u->peers[from].number, what);
    ucx_end_all(u, why);
}

/* Its watch may live while the rank itself hangs. */
static void end_by_time(hd_comm_ucx *u, int32_t from) {
    char why[160];
    if (u->until_ns) {
        end_preflight(u, from);
        return;
    }
    if (from < 0) {
        snprintf(why, sizeof why, "rank %d could not send within %d s", u->o.rendezvous.rank,
                 u->wait_ms / 1000);
    } else {
        snprintf(why, sizeof why, "rank %d is lost: rank %d waited %d s for its message",
                 u->peers[from].number, u->o.rendezvous.rank, u->wait_ms / 1000);
    }
    ucx_end_all(u, why);
}

/* Nothing wakes a rank when the other end has made room for what it sends. So it looks again: soon
 * at first, for the other may be reading, then with naps, for it may be computing. */
static void wait_for_room(int32_t n_waits) {
    if (n_waits < YIELDS)
        sched_yield();
    else
        nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

static void check_time(hd_comm_ucx *u, const awaited *a, int64_t since_ns) {
    const int64_t now = hd_now_ns();
    look_for_broken(u);
    if (u->until_ns ? now < u->until_ns
                    : a->for_ever || now - since_ns < u->wait_ms * 1000000LL) {
        return;
    }
    end_by_time(u, a->from);
}

static int32_t left_ms(const hd_comm_ucx *u, int64_t now) {
    if (!u->until_ns) return u->wait_ms;
    return (int32_t)hd_max_i64(1, (u->until_ns - now) / 1000000 + 1);
}

/* Until the message has come, communication has ended, or limit_ms have passed. */
static void sleep_in_memory(hd_comm_ucx *u, const awaited *a, int limit_ms) {
    const uint32_t bell = comm_shm_lie_down(u->shm, a->from);
    if (!ucx_is_over(u) && !a->is_ready(u, a)) comm_shm_sleep(u->shm, bell, limit_ms);
    comm_shm_get_up(u->shm);
}

/* False: communication has ended. */
static bool wait_until(hd_comm_ucx *u, const awaited *a) {
    int64_t since_ns = 0, spin_end_ns = 0;
    bool slept = false, blocked = false;
    for (int32_t n_waits = 0;;) {
        if (ucx_is_over(u)) return false;
        if (a->is_ready(u, a)) {
            if (since_ns && !blocked) comm_spin_learn(&u->spin, slept);
            return true;
        }
        if (!u->shm && u->ucp->worker_progress(u->worker)) {
            n_waits = 0;
            spin_end_ns = 0;
            continue;
        }
        const int64_t now = hd_now_ns();
        if (!since_ns) since_ns = now;
        if (!spin_end_ns) spin_end_ns = now + comm_spin_ns(&u->spin);
        blocked = u->shm && comm_shm_shares_core(u->shm, a->from);
        if (now < spin_end_ns && !blocked) {
            hd_cpu_relax();
        } else if (u->n_sending) {
            wait_for_room(n_waits++);
            check_time(u, a, since_ns);
        } else {
            const int limit_ms = a->for_ever ? -1 : left_ms(u, now);
            slept = true;
            if (u->shm)
                sleep_in_memory(u, a, limit_ms);
            else
                ucx_sleep(u, u->broken ? UCX_CLOSE_MS : limit_ms);
            check_time(u, a, since_ns);
        }
    }
}

static bool has_come(hd_comm_ucx *u, const awaited *a) {
    hd_received *r = a->message;
    if (!u->shm) return r->full && r->head.ticket == a->ticket;
    const comm_shm_news news = comm_shm_look(u->shm, a->from, a->group, a->lane, a->ticket, r);
    if (news == COMM_SHM_WRONG)
        end_by_wrong(u, a->from, "a message too early, or outside the memory that it shares");
    return news == COMM_SHM_CAME;
}

/* The first member of a group, whose number is the lowest, broadcasts commands. */
static hd_received *wait_for(void *ctx, int32_t from, hd_group group, hd_message_lane lane,
                             uint64_t ticket) {
    hd_comm_ucx *u = ctx;
    hd_received *r = place_of(u, from, (int32_t)group, (int32_t)lane, ticket);
    const awaited a = {.is_ready = has_come,
                       .message = r,
                       .group = group,
                       .lane = lane,
                       .ticket = ticket,
                       .from = from,
                       .for_ever = lane == HD_MESSAGE_BROADCAST && from < u->rank};
    return wait_until(u, &a) ? r : NULL;
}

/* ---- sending ---- */

static ucx_outgoing *take_outgoing(hd_comm_ucx *u) {
    ucx_outgoing *o = u->free;
    if (!o) return malloc(sizeof *o);
    u->free = o->next;
    return o;
}

static void on_sent(void *request, ucs_status_t status, void *user) {
    ucx_outgoing *o = user;
    hd_comm_ucx *u = o->world;
    (void)status; /* a broken connection is told to ucx_on_lost */
    u->sending[o->set]--;
    u->n_sending--;
    o->next = u->free;
    u->free = o;
    if (request) u->ucp->request_free(request);
}

static void send_message(void *ctx, int32_t to, hd_message *m, const void *data, int32_t set) {
    hd_comm_ucx *u = ctx;
    if (u->shm) {
        if (!comm_shm_send(u->shm, to, m, data))
            ucx_end_all(u, "a rank's shared memory is full");
        return;
    }
    ucx_outgoing *o = take_outgoing(u);
    if (!o) {
        ucx_end_all(u, "a rank has no memory for its messages");
        return;
    }
    hd_message_seal(m, &u->limits, data);
    *o = (ucx_outgoing){.head = *m, .world = u, .set = set};
    const ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb = {.send = on_sent},
        .user_data = o,
    };
    u->sending[set]++;
    u->n_sending++;
    const ucs_status_ptr_t request = u->ucp->am_send_nbx(
        u->peers[to].ep, UCX_AM_ID, &o->head, sizeof o->head, data, (size_t)m->n, &param);
    if (UCS_PTR_IS_PTR(request)) return;
    const ucs_status_t status = UCS_PTR_STATUS(request);
    on_sent(NULL, status, o);
    if (status != UCS_OK) ucx_on_lost(&u->peers[to], NULL, status);
}

static void *room(void *ctx, hd_group group, hd_message_lane lane, uint64_t ticket,
                  uint64_t n) {
    hd_comm_ucx *u = ctx;
    return u->shm ? comm_shm_room(u->shm, group, lane, ticket, n) : NULL;
}

static bool streams(void *ctx, uint64_t n) {
    const hd_comm_ucx *u = ctx;
    return comm_shm_streams(u->shm, n);
}

static void was_read(void *ctx, uint64_t n, int64_t ns) {
    hd_comm_ucx *u = ctx;
    comm_shm_was_read(u->shm, n, ns);
}

static bool is_sent(hd_comm_ucx *u, const awaited *a) {
    return u->sending[a->set] == 0;
}

static bool flush(void *ctx, int32_t set) {
    return wait_until(ctx, &(awaited){.is_ready = is_sent, .set = set, .from = -1});
}

hd_link ucx_link(hd_comm_ucx *u) {
    return (hd_link){.send = send_message,
                     .room = room,
                     .streams = u->shm ? streams : NULL,
                     .was_read = u->shm ? was_read : NULL,
                     .flush = flush,
                     .wait = wait_for,
                     .release = release,
                     .abort = end_all,
                     .ended = ended,
                     .ctx = u};
}

#endif
