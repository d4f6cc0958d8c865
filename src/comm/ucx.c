/* ucx.c - a link (messages.h) of UCX active messages.
 *
 * Messages are sent eagerly whatever their size: then no rank ever reads another's memory, and
 * an ended rank leaves nothing half read. Received bytes stay in UCX's buffers until released. */
#include "comm/ucx.h"

#include "base/status.h"

#ifdef HD_UCX

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/cores.h"
#include "base/cpu.h"
#include "base/progress.h"
#include "comm/address.h"
#include "comm/channel.h"
#include "comm/figures_internal.h"
#include "comm/ipc.h"
#include "comm/messages.h"
#include "comm/preflight.h"
#include "comm/ucx_library.h"

enum {
    AM_ID = 7,
    LEAST_SPIN_NS = 500,
    PROBE_SPIN_NS = 20000, /* more than a sleep and the wake-up cost */
    MOST_SPIN_NS = 40000,
    SLEEPS_PER_PROBE = 32,
    YIELDS = 100, /* while bytes wait for room at the other end */
    NAP_NS = 50000,
    RETRY_NS = 100000000, /* before ranks try again to connect */
    ALIGNMENT = 64,
    CLOSE_MS = 20,
    WAIT_MS = 60000,
    NO_WORKER = 1,    /* bytes of an address that is none */
    HOST_BYTES = 32,  /* of a host's name, behind the address */
    GREETINGS = 2,    /* messages of a pair before anything else */
    BROKEN_MS = 1000, /* what the watch needs to find out that a rank ended */
    REASON = 256,
    PLACES = (int)HD_N_GROUPS * (int)HD_N_MESSAGE_LANES * (int)HD_COMM_MAX_INFLIGHT
};

typedef struct outgoing outgoing;

/* Messages of a peer that have arrived, by group, lane and ticket. */
typedef struct peer {
    hd_comm_ucx *world;
    int32_t number; /* in the world that was opened */
    ucp_ep_h ep;
    hd_received at[PLACES];
} peer;

struct hd_comm_ucx {
    const ucx_library *ucp;
    comm_figures figures; /* of all epochs */
    hd_messages *messages;
    comm_ipc *gpu; /* NULL: the rank computes on a CPU */
    hd_rendezvous *rendezvous;
    ucp_context_h context;
    ucp_worker_h worker;
    peer *peers; /* [limits.world] */
    hd_message_limits limits;
    hd_comm_ucx_options o;
    hd_comm_members members;
    int32_t rank, wait_ms;     /* rank: of members */
    int64_t until_ns;          /* end of the preflight; 0: it is over */
    bool greeted;              /* in it all ranks have sent a first message */
    float *rates;              /* [world, world] of rank 0; NULL: unknown */
    char (*hosts)[HOST_BYTES]; /* [world] */
    bool spins;                /* there is a core for every rank */
    int64_t spin_ns;           /* how long it pays, as of late */
    uint32_t n_sleeps;
    int32_t n_sending; /* of all sets */
    int ucx_fd, wake_fd;
    int32_t sending[HD_LINK_SETS]; /* not complete yet */
    outgoing *free;
    const peer *broken; /* UCX lost the connection to it, at broken_ns */
    int64_t broken_ns;
    pthread_mutex_t mutex; /* of over's change and why */
    _Atomic uint32_t over; /* one more than the last epoch that has ended */
    char why[REASON];      /* that one ended; constant until the next begins */
};

bool hd_comm_ucx_is_built(void) {
    return true;
}

/* ---- the end of communication ---- */

static bool is_over(const hd_comm_ucx *u) {
    return atomic_load(&u->over) > u->limits.epoch;
}

/* Of the watch, or of this rank's thread. The first reason stays. One event for each epoch, before
 * its end is seen: it is read before the next one begins (await_epoch), whose waits would not sleep. */
static void end_here(void *ctx, uint32_t epoch, const char *why) {
    hd_comm_ucx *u = ctx;
    pthread_mutex_lock(&u->mutex);
    if (atomic_load(&u->over) <= epoch) {
        snprintf(u->why, sizeof u->why, "%s", why);
        eventfd_write(u->wake_fd, 1);
        atomic_store(&u->over, epoch + 1);
    }
    pthread_mutex_unlock(&u->mutex);
    if (u->gpu) comm_ipc_end(u->gpu);
    if (u->o.on_end) u->o.on_end(u->o.ctx);
}

static void end_all(void *ctx, const char *why) {
    hd_comm_ucx *u = ctx;
    end_here(u, u->limits.epoch, why);
    hd_rendezvous_abort(u->rendezvous, why);
}

static const char *ended(void *ctx) {
    const hd_comm_ucx *u = ctx;
    return is_over(u) ? u->why : NULL;
}

/* A rank that ended or left has told, or is about to be told by the watch, which knows why. */
static void on_lost_ep(void *arg, ucp_ep_h ep, ucs_status_t status) {
    const peer *p = arg;
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
    end_all(u, why);
}

/* ---- receiving ---- */

static hd_received *place_of(hd_comm_ucx *u, int32_t from, int32_t group, int32_t lane,
                             uint64_t ticket) {
    const int32_t row = group * (int32_t)HD_N_MESSAGE_LANES + lane;
    return &u->peers[from]
                .at[row * HD_COMM_MAX_INFLIGHT + (int32_t)(ticket % HD_COMM_MAX_INFLIGHT)];
}

static ucs_status_t on_message(void *arg, const void *header, size_t header_n, void *data,
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
        char why[120];
        snprintf(why, sizeof why, "rank %d sent rank %d more messages than it may",
                 u->peers[head.from].number, u->o.rendezvous.rank);
        end_all(u, why);
        return UCS_OK;
    }
    *r = (hd_received){.head = head, .data = n ? data : NULL, .full = true};
    return n ? UCS_INPROGRESS : UCS_OK;
}

static void release(void *ctx, hd_received *r) {
    hd_comm_ucx *u = ctx;
    if (r->data) u->ucp->am_data_release(u->worker, (void *)(uintptr_t)r->data);
    *r = (hd_received){0};
}

/* Sleeps until there is something to do, at most limit_ms (-1: no limit). */
static void sleep_until_event(hd_comm_ucx *u, int limit_ms) {
    struct pollfd p[2] = {
        {.fd = u->ucx_fd,  .events = POLLIN},
        {.fd = u->wake_fd, .events = POLLIN}
    };
    if (!u->worker)
        poll(p + 1, 1, limit_ms);
    else if (u->ucp->worker_arm(u->worker) == UCS_OK)
        poll(p, 2, limit_ms);
}

typedef bool ready_fn(const void *what, uint64_t ticket);

/* What a thread waits for; from: the rank that must send it, or -1. */
typedef struct awaited {
    ready_fn *is_ready;
    const void *what;
    uint64_t ticket;
    int32_t from;
    bool for_ever; /* a command, which comes when there is work */
} awaited;

static int32_t preflight_ms(const hd_comm_ucx *u) {
    return u->o.preflight_ms ? u->o.preflight_ms : HD_PREFLIGHT_MS;
}

/* One line, which says what to do. what: behind "rank 0 on a: ", before " rank 1 on b". */
static void name_pair(char why[REASON], const hd_comm_ucx *u, int32_t other, const char *what) {
    const int32_t own = u->o.rendezvous.rank;
    snprintf(why, REASON, "rank %d on %s: %s rank %d on %s", own, u->hosts[own], what, other,
             u->hosts[other]);
}

static void end_preflight(hd_comm_ucx *u, int32_t from) {
    const char *missing = u->greeted ? "not all of 1 MB came (look at MTU and cables)"
                                     : "nothing came (open TCP ports, or set UCX_NET_DEVICES)";
    char what[120], why[REASON];
    snprintf(what, sizeof what, "%s within %g s from",
             from < 0 ? "messages did not leave (look at MTU and cables)" : missing,
             preflight_ms(u) / 1000.0);
    name_pair(why, u, from < 0 ? u->o.rendezvous.rank : u->peers[from].number, what);
    end_all(u, why);
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
    end_all(u, why);
}

/* Nothing wakes a rank when the other end has made room for what it sends. So it looks again: soon
 * at first, for the other may be reading, then with naps, for it may be computing. */
static void wait_for_room(int32_t n_waits) {
    if (n_waits < YIELDS)
        sched_yield();
    else
        nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

/* Spinning pays if the other rank runs meanwhile; on a core that both share it only delays it. So a
 * wait that ended while spinning permits longer ones, and one that had to sleep shorter ones. Now
 * and then a long one finds out whether that has changed. */
static void learn_to_spin(hd_comm_ucx *u, bool slept) {
    if (!u->spins) return;
    if (!slept) {
        u->spin_ns = hd_min_i64(2 * u->spin_ns, MOST_SPIN_NS);
    } else if (++u->n_sleeps % SLEEPS_PER_PROBE == 0) {
        u->spin_ns = PROBE_SPIN_NS;
    } else {
        u->spin_ns = u->spin_ns / 2 + LEAST_SPIN_NS;
    }
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

/* False: communication has ended. */
static bool wait_until(hd_comm_ucx *u, const awaited *a) {
    int64_t since_ns = 0, spin_end_ns = 0;
    bool slept = false;
    for (int32_t n_waits = 0;;) {
        if (is_over(u)) return false;
        if (a->is_ready(a->what, a->ticket)) {
            if (since_ns) learn_to_spin(u, slept);
            return true;
        }
        if (u->ucp->worker_progress(u->worker)) {
            n_waits = 0;
            spin_end_ns = 0;
            continue;
        }
        const int64_t now = hd_now_ns();
        if (!since_ns) since_ns = now;
        if (!spin_end_ns) spin_end_ns = now + u->spin_ns;
        if (now < spin_end_ns) {
            hd_cpu_relax();
        } else if (u->n_sending) {
            wait_for_room(n_waits++);
            check_time(u, a, since_ns);
        } else {
            slept = true;
            sleep_until_event(u, u->broken ? CLOSE_MS : a->for_ever ? -1 : left_ms(u, now));
            check_time(u, a, since_ns);
        }
    }
}

static bool has_come(const void *what, uint64_t ticket) {
    const hd_received *r = what;
    return r->full && r->head.ticket == ticket;
}

/* The first member of a group, whose number is the lowest, broadcasts commands. */
static hd_received *wait_for(void *ctx, int32_t from, hd_group group, hd_message_lane lane,
                             uint64_t ticket) {
    hd_comm_ucx *u = ctx;
    hd_received *r = place_of(u, from, (int32_t)group, (int32_t)lane, ticket);
    const awaited a = {.is_ready = has_come,
                       .what = r,
                       .ticket = ticket,
                       .from = from,
                       .for_ever = lane == HD_MESSAGE_BROADCAST && from < u->rank};
    return wait_until(u, &a) ? r : NULL;
}

/* ---- sending ---- */

/* The header travels before the data and must stay as long. Those that have been sent are kept
 * for the next messages, so that a step allocates nothing. */
struct outgoing {
    hd_message head;
    hd_comm_ucx *world;
    int32_t set;
    outgoing *next; /* of the free ones */
};

static outgoing *take_outgoing(hd_comm_ucx *u) {
    outgoing *o = u->free;
    if (!o) return malloc(sizeof *o);
    u->free = o->next;
    return o;
}

static void on_sent(void *request, ucs_status_t status, void *user) {
    outgoing *o = user;
    hd_comm_ucx *u = o->world;
    (void)status; /* a broken connection is told to on_lost_ep */
    u->sending[o->set]--;
    u->n_sending--;
    o->next = u->free;
    u->free = o;
    if (request) u->ucp->request_free(request);
}

static void send_message(void *ctx, int32_t to, hd_message *m, const void *data, int32_t set) {
    hd_comm_ucx *u = ctx;
    outgoing *o = take_outgoing(u);
    if (!o) {
        end_all(u, "a rank has no memory for its messages");
        return;
    }
    hd_message_seal(m, &u->limits, data);
    *o = (outgoing){.head = *m, .world = u, .set = set};
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
        u->peers[to].ep, AM_ID, &o->head, sizeof o->head, data, (size_t)m->n, &param);
    if (UCS_PTR_IS_PTR(request)) return;
    const ucs_status_t status = UCS_PTR_STATUS(request);
    on_sent(NULL, status, o);
    if (status != UCS_OK) on_lost_ep(&u->peers[to], NULL, status);
}

static bool is_sent(const void *what, uint64_t ticket) {
    (void)ticket;
    return *(const int32_t *)what == 0;
}

static bool flush(void *ctx, int32_t set) {
    hd_comm_ucx *u = ctx;
    return wait_until(u, &(awaited){.is_ready = is_sent, .what = &u->sending[set], .from = -1});
}

/* ---- opening ---- */

static hd_status check_ucx(const hd_comm_ucx *u, ucs_status_t status, const char *what,
                           hd_err *err) {
    if (status == UCS_OK) return HD_OK;
    const bool blind = status == UCS_ERR_UNREACHABLE && access("/sys/class/net", R_OK) != 0;
    return HD_FAIL(err, HD_EIO, "UCX cannot %s: %s%s", what, u->ucp->status_string(status),
                   blind ? " (it finds no network device without /sys/class/net)" : "");
}

/* Shared memory by descriptors of /proc needs the rights of a debugger, which the sandbox gives
 * up; System V's is gone with its last process, however that ends. */
static const char *transports_of(const hd_comm_ucx_options *o) {
    if (o->transports || getenv("UCX_TLS")) return o->transports;
    return "^posix,cma,xpmem,knem";
}

static hd_status open_context(hd_comm_ucx *u, hd_err *err) {
    const hd_comm_ucx_options *o = &u->o;
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    const char *devices = o->devices, *transports = transports_of(o);
    ucp_config_t *config;
    if (!devices && !getenv("UCX_NET_DEVICES") && hd_address_is_loopback(o->rendezvous.at))
        devices = "lo";
    HD_TRY(check_ucx(u, u->ucp->config_read(NULL, NULL, &config), "read its settings", err));
    ucs_status_t st = UCS_OK;
    if (devices) st = u->ucp->config_modify(config, "NET_DEVICES", devices);
    if (st == UCS_OK && transports) st = u->ucp->config_modify(config, "TLS", transports);
    if (st == UCS_OK)
        st = u->ucp->init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &u->context);
    u->ucp->config_release(config);
    return check_ucx(u, st, "start", err);
}

/* Each epoch has a worker of its own: what others sent to an earlier one cannot arrive. */
static hd_status open_worker(hd_comm_ucx *u, hd_err *err) {
    const ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE |
                                                      UCP_WORKER_PARAM_FIELD_AM_ALIGNMENT,
                                        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
                                        .am_alignment = ALIGNMENT};
    const ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA,
        .cb = on_message,
        .arg = u};
    HD_TRY(check_ucx(u, u->ucp->worker_create(u->context, &worker, &u->worker), "open a worker",
                     err));
    HD_TRY(check_ucx(u, u->ucp->worker_get_efd(u->worker, &u->ucx_fd), "wait without polling",
                     err));
    return check_ucx(u, u->ucp->worker_set_am_recv_handler(u->worker, &handler), "receive",
                     err);
}

/* Ends the epoch in which ranks cannot connect. The next one shall not follow at once. */
static void retry_soon(hd_comm_ucx *u, const char *why) {
    nanosleep(&(struct timespec){0, RETRY_NS}, NULL);
    end_all(u, why);
}

/* Alone a rank needs no network. With others it is tried again. */
static hd_status check_network(hd_comm_ucx *u, hd_err *err) {
    for (int32_t i = 0; i < u->limits.world && u->limits.world > 1; i++) {
        char why[80];
        uint32_t n;
        hd_rendezvous_address(u->rendezvous, u->peers[i].number, &n);
        if (n != NO_WORKER + HOST_BYTES + u->o.card_bytes) continue;
        snprintf(why, sizeof why, "rank %d has no network for messages", u->peers[i].number);
        retry_soon(u, why);
        return HD_FAIL(err, HD_EPEER, "%s", why);
    }
    return HD_OK;
}

static hd_status connect_all(hd_comm_ucx *u, hd_err *err) {
    HD_TRY(check_network(u, err));
    for (int32_t i = 0; i < u->limits.world; i++) {
        peer *p = &u->peers[i];
        uint32_t n;
        if (i == u->rank) continue;
        const ucp_ep_params_t params = {
            .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                          UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
            .address = hd_rendezvous_address(u->rendezvous, p->number, &n),
            .err_mode = UCP_ERR_HANDLING_MODE_NONE,
            .err_handler = {.cb = on_lost_ep, .arg = p}
        };
        const ucs_status_t status = u->ucp->ep_create(u->worker, &params, &p->ep);
        if (status == UCS_OK) continue;
        char what[120], why[REASON];
        snprintf(what, sizeof what, "UCX says '%s' (set UCX_NET_DEVICES or UCX_TLS alike) of",
                 u->ucp->status_string(status));
        name_pair(why, u, p->number, what);
        return HD_FAIL(err, HD_EIO, "%s", why);
    }
    return HD_OK;
}

/* Every pair of ranks exchanges two messages. UCX connects at the first one, for which both ends
 * must work: afterwards a rank may compute or sleep without keeping another from sending. */
static hd_status greet_all(hd_comm_ucx *u, hd_err *err) {
    for (uint64_t round = 0; round < GREETINGS; round++) {
        bool ok = true;
        for (int32_t i = 0; i < u->limits.world; i++) {
            hd_message head = {.lane = HD_MESSAGE_HELLO, .from = u->rank, .ticket = round};
            if (i != u->rank) send_message(u, i, &head, NULL, 0);
        }
        for (int32_t i = 0; i < u->limits.world && ok; i++) {
            if (i == u->rank) continue;
            hd_received *r = wait_for(u, i, HD_GROUP_TP, HD_MESSAGE_HELLO, round);
            ok = r != NULL;
            if (r) release(u, r);
        }
        if (!ok || !flush(u, 0)) return HD_FAIL(err, HD_EPEER, "%s", u->why);
    }
    return HD_OK;
}

/* The first epoch's: also how fast bytes travel between all pairs. Its time is limited. */
static hd_status run_preflight(hd_comm_ucx *u, const hd_link *link, hd_err *err) {
    char why[REASON];
    int32_t other;
    u->until_ns = hd_now_ns() + preflight_ms(u) * 1000000LL;
    hd_status st = greet_all(u, err);
    u->greeted = true;
    if (st == HD_OK && !hd_preflight_run(link, u->rank, u->limits.world, GREETINGS,
                                         u->limits.max_bytes, u->rates, &other)) {
        if (other >= 0) {
            name_pair(why, u, u->peers[other].number, "other bytes came than were sent by");
            end_all(u, why);
        }
        st = HD_FAIL(err, HD_EPEER, "%s", u->why);
    }
    u->until_ns = 0;
    return st;
}

/* Who is in the epoch that has begun: the first of them, as many as the layout has ranks. False: too
 * few, or this rank has no place among them. */
static bool take_members(hd_comm_ucx *u, hd_parallel_config *parallel) {
    hd_comm_members *m = &u->members;
    const int32_t world = u->o.rendezvous.world;
    uint32_t bytes;
    *m = (hd_comm_members){.epoch = hd_rendezvous_epoch(u->rendezvous),
                           .losses = hd_rendezvous_count_losses(u->rendezvous)};
    u->limits.epoch = m->epoch;
    int32_t n = 0, own = -1;
    for (int32_t i = 0; i < world; i++) {
        if (!hd_rendezvous_address(u->rendezvous, i, &bytes)) continue;
        if (i == u->o.rendezvous.rank) own = n;
        m->connected |= 1ull << i;
        m->number[n++] = i;
    }
    if (n == world) {
        *parallel = u->o.parallel;
    } else if (!u->o.layout_of || !u->o.layout_of(u->o.ctx, n, parallel)) {
        return false;
    }
    m->n = hd_parallel_world(parallel);
    u->rank = own;
    return own >= 0 && own < m->n;
}

static hd_status connect_members(hd_comm_ucx *u, const hd_parallel_config *parallel, bool first,
                                 hd_err *err) {
    const hd_link link = {send_message, flush, wait_for, release, end_all, ended, u};
    u->limits.world = u->members.n;
    for (int32_t i = 0; i < u->members.n; i++) {
        u->peers[i] = (peer){.world = u, .number = u->members.number[i]};
    }
    memcpy(u->limits.key, hd_rendezvous_session(u->rendezvous), sizeof u->limits.key);
    HD_TRY(hd_messages_open(&u->messages, &link, parallel, u->rank, &u->figures, err));
    HD_TRY(connect_all(u, err));
    const int32_t wait_ms = u->wait_ms;
    u->wait_ms = WAIT_MS; /* other ranks come when they can */
    hd_status st = first ? run_preflight(u, &link, err) : greet_all(u, err);
    if (st == HD_OK && u->gpu)
        st = comm_ipc_connect(u->gpu, hd_messages_comm(u->messages), err);
    u->wait_ms = wait_ms;
    return st;
}

/* What ranks tell each other: the address of a worker, which says itself where it ends, or a byte if there
 * is none; the name of the host; then a card. Returns the bytes. */
static uint32_t write_offer(const hd_comm_ucx *u, const void *address, size_t n,
                            uint8_t out[HD_CHANNEL_MAX_ADDRESS], hd_err *err) {
    const size_t named = n + HOST_BYTES;
    if (named + u->o.card_bytes > HD_CHANNEL_MAX_ADDRESS) {
        HD_FAIL(err, HD_EUNSUPPORTED, "UCX's address of %zu bytes is too long", n);
        return 0;
    }
    memcpy(out, address, n);
    memset(out + n, 0, HOST_BYTES);
    gethostname((char *)out + n, HOST_BYTES - 1);
    if (u->o.card_bytes) memcpy(out + named, u->o.card, u->o.card_bytes);
    return (uint32_t)named + u->o.card_bytes;
}

const void *hd_comm_ucx_card(const hd_comm_ucx *u, int32_t place) {
    uint32_t n = 0;
    if (place >= u->members.n || !u->o.card_bytes) return NULL;
    const uint8_t *at = hd_rendezvous_address(u->rendezvous, u->members.number[place], &n);
    return at && n > u->o.card_bytes ? at + n - u->o.card_bytes : NULL;
}

/* Of the members of an epoch. */
static void read_hosts(hd_comm_ucx *u) {
    for (int32_t i = 0; i < u->o.rendezvous.world; i++) {
        uint32_t n = 0;
        const uint8_t *at = hd_rendezvous_address(u->rendezvous, i, &n);
        if (!at || n < HOST_BYTES + u->o.card_bytes) continue;
        memcpy(u->hosts[i], at + n - u->o.card_bytes - HOST_BYTES, HOST_BYTES - 1);
    }
}

const char *hd_comm_ucx_host(const hd_comm_ucx *u, int32_t number) {
    return u->hosts[number];
}

double hd_comm_ucx_rate(const hd_comm_ucx *u, int32_t a, int32_t b) {
    const int32_t n = u->o.rendezvous.world;
    if (!u->rates) return 0;
    const double one = (double)u->rates[a * n + b], two = (double)u->rates[b * n + a];
    return one < two ? one : two;
}

/* Joins the world with the worker's address, if there is a worker. */
static hd_status join(hd_comm_ucx *u, bool again, hd_err *err) {
    hd_rendezvous_options o = u->o.rendezvous;
    ucp_address_t *address = NULL;
    size_t n = NO_WORKER;
    o.again = again;
    o.figures = &u->figures;
    if (u->worker) {
        HD_TRY(check_ucx(u, u->ucp->worker_get_address(u->worker, &address, &n),
                         "tell its address", err));
    }
    uint8_t offer[HD_CHANNEL_MAX_ADDRESS];
    const uint32_t bytes = write_offer(u, address ? (void *)address : "", n, offer, err);
    if (address) u->ucp->worker_release_address(u->worker, address);
    if (!bytes) return err->status;
    HD_TRY(hd_rendezvous_open(&u->rendezvous, &o, offer, bytes, err));
    u->limits.epoch = hd_rendezvous_epoch(u->rendezvous);
    return hd_rendezvous_watch(u->rendezvous, end_here, u, err);
}

/* A rank that comes late is in no epoch: its communication has ended before it began. */
static hd_status come_late(hd_comm_ucx *u, hd_err *err) {
    const hd_link link = {send_message, flush, wait_for, release, end_all, ended, u};
    char why[60];
    if (!u->o.layout_of) {
        return HD_FAIL(err, HD_EPEER, "rank %d has come too late", u->o.rendezvous.rank);
    }
    snprintf(why, sizeof why, "rank %d has come", u->o.rendezvous.rank);
    end_here(u, 0, why);
    HD_TRY(hd_messages_open(&u->messages, &link, &u->o.parallel, u->o.rendezvous.rank,
                            &u->figures, err));
    if (u->gpu) comm_ipc_come_late(u->gpu, hd_messages_comm(u->messages));
    return HD_OK;
}

static hd_status open_all(hd_comm_ucx *u, hd_err *err) {
    hd_parallel_config parallel;
    HD_TRY(ucx_library_load(&u->ucp, err));
    HD_TRY(open_context(u, err));
    HD_TRY(open_worker(u, err));
    HD_TRY(join(u, false, err));
    if (u->limits.epoch == 0) return come_late(u, err);
    take_members(u, &parallel);
    read_hosts(u);
    return connect_members(u, &parallel, true, err);
}

static hd_status check(const hd_comm_ucx_options *o, const hd_device *device, const hd_ops *ops,
                       hd_err *err) {
    HD_TRY(hd_parallel_check(&o->parallel, err));
    if (hd_parallel_world(&o->parallel) != o->rendezvous.world) {
        return HD_FAIL(err, HD_EINVAL, "%d ranks for a layout of %d", o->rendezvous.world,
                       hd_parallel_world(&o->parallel));
    }
    if (ops->act_type == HD_F32 && (hd_device_is_host(device) || ops->exchange)) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "ranks of several processes exchange float32, not %s",
                   hd_dtype_name(ops->act_type));
}

static hd_status copy_options(hd_comm_ucx *u, const hd_comm_ucx_options *o, hd_err *err) {
    const char **texts[] = {&u->o.rendezvous.at, &u->o.rendezvous.secret, &u->o.transports,
                            &u->o.devices};
    bool ok = true;
    u->o = *o;
    for (size_t i = 0; i < HD_LEN(texts); i++) {
        const char *text = *texts[i];
        *texts[i] = text ? strdup(text) : NULL;
        ok &= !text || *texts[i];
    }
    return ok ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for rank %d", o->rendezvous.rank);
}

static void free_options(hd_comm_ucx *u) {
    const char *texts[] = {u->o.rendezvous.at, u->o.rendezvous.secret, u->o.transports,
                           u->o.devices};
    for (size_t i = 0; i < HD_LEN(texts); i++) free((void *)(uintptr_t)texts[i]);
}

hd_status hd_comm_ucx_open(hd_comm_ucx **out, const hd_comm_ucx_options *o, hd_device *device,
                           hd_stream *stream, const hd_ops *ops, hd_err *err) {
    *out = NULL;
    HD_TRY(check(o, device, ops, err));
    hd_comm_ucx *u = calloc(1, sizeof *u);
    if (!u) return HD_FAIL(err, HD_ENOMEM, "no memory for rank %d", o->rendezvous.rank);
    pthread_mutex_init(&u->mutex, NULL);
    u->limits =
        (hd_message_limits){.max_bytes = o->max_message ? o->max_message : 1u << 30,
                            .authenticates_bytes = !hd_address_is_loopback(o->rendezvous.at)};
    u->wait_ms = o->wait_ms ? o->wait_ms : WAIT_MS;
    u->spins = o->rendezvous.world <= hd_cores_count();
    u->spin_ns = u->spins ? PROBE_SPIN_NS : 0;
    const size_t world = (size_t)o->rendezvous.world;
    u->peers = calloc(world, sizeof *u->peers);
    u->hosts = calloc(world, sizeof *u->hosts);
    if (o->rendezvous.rank == 0) u->rates = calloc(world * world, sizeof *u->rates);
    u->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    hd_status st = copy_options(u, o, err);
    if (st == HD_OK &&
        (!u->peers || !u->hosts || u->wake_fd < 0 || (o->rendezvous.rank == 0 && !u->rates))) {
        st = HD_FAIL(err, HD_ENOMEM, "no memory or descriptor for rank %d", o->rendezvous.rank);
    }
    if (st == HD_OK && !hd_device_is_host(device))
        st = comm_ipc_open(&u->gpu, device, stream, ops, err);
    if (st == HD_OK) st = open_all(u, err);
    if (st != HD_OK) {
        if (u->rendezvous)
            end_all(u, err->status == HD_EIO ? err->msg : "a rank could not connect");
        hd_comm_ucx_close(u);
        return st;
    }
    *out = u;
    return HD_OK;
}

const hd_comm *hd_comm_ucx_interface(const hd_comm_ucx *u) {
    return u->gpu ? comm_ipc_comm(u->gpu) : hd_messages_comm(u->messages);
}

const hd_comm_members *hd_comm_ucx_members(const hd_comm_ucx *u) {
    return &u->members;
}

void hd_comm_ucx_read_figures(const hd_comm_ucx *u, int32_t number, hd_rank_figures *out) {
    if (number == u->o.rendezvous.rank)
        comm_read_figures(&u->figures, out);
    else
        hd_rendezvous_read_figures(u->rendezvous, number, out);
}

void hd_comm_ucx_read_loss(const hd_comm_ucx *u, int32_t number, char *why) {
    hd_rendezvous_read_loss(u->rendezvous, number, why);
}

/* ---- closing ---- */

/* What this rank sent may still be on its way: it works for the others until all have left. */
static void leave(hd_comm_ucx *u) {
    if (is_over(u)) return;
    hd_rendezvous_leave(u->rendezvous);
    while (!hd_rendezvous_done(u->rendezvous) && !is_over(u)) {
        if (!u->worker || !u->ucp->worker_progress(u->worker)) sleep_until_event(u, CLOSE_MS);
    }
}

static void disconnect(hd_comm_ucx *u) {
    const ucp_request_param_t force = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    for (int32_t i = 0; i < u->limits.world; i++) {
        if (!u->peers[i].ep) continue;
        const ucs_status_ptr_t request = u->ucp->ep_close_nbx(u->peers[i].ep, &force);
        while (UCS_PTR_IS_PTR(request) &&
               u->ucp->request_check_status(request) == UCS_INPROGRESS) {
            u->ucp->worker_progress(u->worker);
        }
        if (UCS_PTR_IS_PTR(request)) u->ucp->request_free(request);
        u->peers[i].ep = NULL;
    }
}

static void release_all(hd_comm_ucx *u) {
    for (int32_t i = 0; i < u->limits.world; i++) {
        for (int32_t k = 0; k < PLACES; k++) release(u, &u->peers[i].at[k]);
    }
}

/* Closes all that belongs to an epoch, but the interface. */
static void close_worker(hd_comm_ucx *u) {
    if (u->worker) {
        disconnect(u);
        release_all(u);
        u->ucp->worker_destroy(u->worker);
    }
    u->worker = NULL;
    u->limits.world = 0;
    u->broken = NULL;
    u->n_sending = 0;
    memset(u->sending, 0, sizeof u->sending);
}

void hd_comm_ucx_close(hd_comm_ucx *u) {
    if (!u) return;
    if (u->gpu) comm_ipc_disconnect(u->gpu);
    if (u->rendezvous) leave(u);
    close_worker(u);
    if (u->context) u->ucp->cleanup(u->context);
    hd_rendezvous_close(u->rendezvous);
    comm_ipc_close(u->gpu);
    if (u->wake_fd >= 0) close(u->wake_fd);
    hd_messages_close(u->messages);
    for (outgoing *o = u->free, *next; o; o = next) {
        next = o->next;
        free(o);
    }
    pthread_mutex_destroy(&u->mutex);
    free_options(u);
    free(u->peers);
    free(u->hosts);
    free(u->rates);
    free(u);
}

/* ---- beginning anew ---- */

/* Comes to rank 0 again, which lives but has given up this rank. */
static hd_status come_again(hd_comm_ucx *u, hd_err *err) {
    hd_err why = {0};
    hd_rendezvous_close(u->rendezvous);
    u->rendezvous = NULL;
    atomic_store(&u->over, 0); /* it may be another one that counts anew */
    if (join(u, true, &why) == HD_OK) return HD_OK;
    return HD_FAIL(err, HD_EPEER, "%s", u->why);
}

/* Offers the address of a new worker. While the network is down there is none. */
static hd_rendezvous_news offer_worker(hd_comm_ucx *u) {
    uint8_t offer[HD_CHANNEL_MAX_ADDRESS];
    ucp_address_t *address = NULL;
    size_t n;
    hd_err why = {0};
    hd_status st = open_worker(u, &why);
    if (st == HD_OK) {
        st = check_ucx(u, u->ucp->worker_get_address(u->worker, &address, &n),
                       "tell its address", &why);
    }
    if (st != HD_OK) {
        if (u->worker) u->ucp->worker_destroy(u->worker);
        u->worker = NULL;
        return hd_rendezvous_next(u->rendezvous, offer,
                                  write_offer(u, "", NO_WORKER, offer, &why));
    }
    const uint32_t bytes = write_offer(u, address, n, offer, &why);
    u->ucp->worker_release_address(u->worker, address);
    return hd_rendezvous_next(u->rendezvous, offer, bytes);
}

/* Waits for the next epoch, with a new worker. */
static hd_status await_epoch(hd_comm_ucx *u, hd_err *err) {
    for (;;) {
        eventfd_t woken;
        close_worker(u);
        eventfd_read(u->wake_fd, &woken); /* for the epoch that has ended */
        const hd_rendezvous_news news = offer_worker(u);
        if (news == HD_RENDEZVOUS_EPOCH) return HD_OK;
        if (news == HD_RENDEZVOUS_LEFT) return HD_FAIL(err, HD_EAGAIN, "the ranks have left");
        HD_TRY(come_again(u, err));
        if (u->limits.epoch) return HD_OK; /* that of a new rank 0 */
    }
}

hd_status hd_comm_ucx_begin_anew(hd_comm_ucx *u, hd_parallel_config *out,
                                 void (*waits)(void *ctx), hd_err *err) {
    for (;;) {
        if (u->gpu) comm_ipc_disconnect(u->gpu);
        HD_TRY(await_epoch(u, err));
        if (!take_members(u, out)) {
            u->members.n = 0;
            waits(u->o.ctx);
            continue;
        }
        hd_messages_close(u->messages);
        u->messages = NULL;
        const hd_status st = connect_members(u, out, false, err);
        if (st == HD_OK) return HD_OK;
        if (st == HD_EIO) retry_soon(u, err->msg); /* a worker is closed again */
        if (st != HD_EIO && st != HD_EPEER) return st;
        *err = (hd_err){0};
    }
}

void hd_comm_ucx_leave(hd_comm_ucx *u) {
    hd_rendezvous_leave(u->rendezvous);
}

#endif
