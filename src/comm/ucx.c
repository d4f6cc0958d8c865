/* ucx.c - a link (messages.h) of UCX active messages: it opens, closes, and begins an epoch anew.
 *
 * Messages are sent eagerly whatever their size: then no rank ever reads another's memory, and
 * an ended rank leaves nothing half read. Received bytes stay in UCX's buffers until released. */
#include "comm/ucx.h"

#include "base/status.h"

#ifdef HD_UCX

#include <dirent.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/log.h"
#include "base/progress.h"
#include "comm/address.h"
#include "comm/channel.h"
#include "comm/preflight.h"
#include "comm/ucx_internal.h"

enum {
    RETRY_NS = 100000000, /* before ranks try again to connect */
    ALIGNMENT = 64,
    PROBE_NS = 20000, /* of spinning */
    /* As between threads: a sleeper takes 50 us to wake up on a virtual machine, and is late for the next
     * exchange. So a wait spins for half of it at least, unless both ranks are on one core. */
    PROBE_IN_MEMORY_NS = 60000,
    WAIT_MS = 60000,
    NO_WORKER = 1, /* bytes of an address that is none */
    GREETINGS = 2, /* messages of a pair before anything else */
    MEETINGS = 2   /* and then, about the memory that they share */
};

bool hd_comm_ucx_is_built(void) {
    return true;
}
/* ---- opening ---- */

static hd_status check_ucx(const hd_comm_ucx *u, ucs_status_t status, const char *what,
                           hd_err *err) {
    if (status == UCS_OK) return HD_OK;
    const bool blind = status == UCS_ERR_UNREACHABLE && access("/sys/class/net", R_OK) != 0;
    return HD_FAIL(err, HD_EIO, "UCX cannot %s: %s%s", what, u->ucp->status_string(status),
                   blind ? " (it finds no network device without /sys/class/net)" : "");
}

/* Whoever names transports means those of UCX. */
static bool names_transports(const hd_comm_ucx_options *o) {
    return o->transports || getenv("UCX_TLS");
}

/* Shared memory by descriptors of /proc needs the rights of a debugger, which the sandbox gives
 * up; System V's is gone with its last process, however that ends. */
static const char *transports_of(const hd_comm_ucx_options *o) {
    if (names_transports(o)) return o->transports;
    return "^posix,cma,xpmem,knem";
}

/* The interface by which ranks meet: UCX would divide large messages over all that there are, also those by which
 * the others are not reached. With RDMA, whose devices have other names, it chooses itself. */
static const char *devices_of(const hd_comm_ucx_options *o, char name[IF_NAMESIZE]) {
    struct dirent *entry = NULL;
    if (o->devices || getenv("UCX_NET_DEVICES")) return o->devices;
    if (hd_address_is_loopback(o->rendezvous.at)) return "lo";
    DIR *rdma = opendir("/sys/class/infiniband");
    do entry = rdma ? readdir(rdma) : NULL;
    while (entry && entry->d_name[0] == '.');
    if (rdma) closedir(rdma);
    return !entry && hd_address_interface(o->rendezvous.at, name) ? name : NULL;
}

static hd_status open_context(hd_comm_ucx *u, hd_err *err) {
    const hd_comm_ucx_options *o = &u->o;
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    char interface[IF_NAMESIZE];
    const char *devices = devices_of(o, interface), *transports = transports_of(o);
    ucp_config_t *config;
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
        .id = UCX_AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA,
        .cb = ucx_on_message,
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
    ucx_end_all(u, why);
}

/* Alone a rank needs no network. With others it is tried again. */
static hd_status check_network(hd_comm_ucx *u, hd_err *err) {
    for (int32_t i = 0; i < u->limits.world && u->limits.world > 1; i++) {
        char why[80];
        uint32_t n;
        hd_rendezvous_address(u->rendezvous, u->peers[i].number, &n);
        if (n != NO_WORKER + UCX_HOST_BYTES + u->o.card_bytes) continue;
        snprintf(why, sizeof why, "rank %d has no network for messages", u->peers[i].number);
        retry_soon(u, why);
        return HD_FAIL(err, HD_EPEER, "%s", why);
    }
    return HD_OK;
}

static hd_status connect_all(hd_comm_ucx *u, hd_err *err) {
    HD_TRY(check_network(u, err));
    for (int32_t i = 0; i < u->limits.world; i++) {
        ucx_peer *p = &u->peers[i];
        uint32_t n;
        if (i == u->rank) continue;
        const ucp_ep_params_t params = {
            .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                          UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
            .address = hd_rendezvous_address(u->rendezvous, p->number, &n),
            .err_mode = UCP_ERR_HANDLING_MODE_NONE,
            .err_handler = {.cb = ucx_on_lost, .arg = p}
        };
        const ucs_status_t status = u->ucp->ep_create(u->worker, &params, &p->ep);
        if (status == UCS_OK) continue;
        char what[120], why[UCX_REASON];
        snprintf(what, sizeof what, "UCX says '%s' (set UCX_NET_DEVICES or UCX_TLS alike) of",
                 u->ucp->status_string(status));
        ucx_name_pair(why, u, p->number, what);
        return HD_FAIL(err, HD_EIO, "%s", why);
    }
    return HD_OK;
}

/* Every rank tells all others a word. words: [world], with its own. */
static hd_status tell_all(hd_comm_ucx *u, const hd_link *l, uint64_t ticket, int32_t *words,
                          hd_err *err) {
    bool ok = true;
    for (int32_t i = 0; i < u->limits.world; i++) {
        hd_message head = {.lane = HD_MESSAGE_HELLO,
                           .from = u->rank,
                           .ticket = ticket,
                           .shape = {words[u->rank]}};
        if (i != u->rank) l->send(u, i, &head, NULL, 0);
    }
    for (int32_t i = 0; i < u->limits.world && ok; i++) {
        if (i == u->rank) continue;
        hd_received *r = l->wait(u, i, HD_GROUP_TP, HD_MESSAGE_HELLO, ticket);
        ok = r != NULL;
        if (!r) continue;
        words[i] = r->head.shape[0];
        l->release(u, r);
    }
    return ok && l->flush(u, 0) ? HD_OK : HD_FAIL(err, HD_EPEER, "%s", u->why);
}

/* Every pair of ranks exchanges two messages. UCX connects at the first one, for which both ends
 * must work: afterwards a rank may compute or sleep without keeping another from sending. */
static hd_status greet_all(hd_comm_ucx *u, const hd_link *l, hd_err *err) {
    int32_t words[HD_UCX_MAX_RANKS] = {0};
    for (uint64_t round = 0; round < GREETINGS; round++) {
        HD_TRY(tell_all(u, l, round, words, err));
    }
    return HD_OK;
}

/* What came before by UCX has been released. */
static void set_memory(hd_comm_ucx *u, comm_shm *shm) {
    pthread_mutex_lock(&u->mutex);
    u->shm = shm;
    pthread_mutex_unlock(&u->mutex);
}

/* From now on messages travel through shared memory, if all ranks of the epoch can reach that of all others. */
static hd_status share_memory(hd_comm_ucx *u, const hd_link *l, hd_err *err) {
    enum { NONE = -1 };
    int32_t numbers[HD_UCX_MAX_RANKS], can[HD_UCX_MAX_RANKS];
    comm_shm *shm = NULL;
    hd_err why = {0};
    bool all =
        !names_transports(&u->o) && comm_shm_open(&shm, u->rank, &u->limits, &why) == HD_OK;
    numbers[u->rank] = all ? comm_shm_number(shm) : NONE;
    hd_status st = tell_all(u, l, GREETINGS, numbers, err);
    for (int32_t i = 0; i < u->limits.world && all && st == HD_OK; i++) {
        all = i == u->rank || comm_shm_attach(shm, i, numbers[i], &why) == HD_OK;
    }
    can[u->rank] = all;
    if (st == HD_OK) st = tell_all(u, l, GREETINGS + 1, can, err);
    for (int32_t i = 0; i < u->limits.world; i++) all = all && can[i];
    if (st != HD_OK || !all) {
        comm_shm_close(shm);
        if (why.msg[0])
            HD_LOG(HD_LOG_INFO, "rank_memory_not_shared", hd_log_text("why", why.msg));
        return st;
    }
    set_memory(u, shm);
    comm_spin_open(&u->spin, u->limits.world, PROBE_IN_MEMORY_NS, PROBE_IN_MEMORY_NS / 2);
    return HD_OK;
}

/* The first epoch's: also how fast bytes travel between all pairs. Its time is limited. */
static hd_status run_preflight(hd_comm_ucx *u, const hd_link *link, hd_err *err) {
    char why[UCX_REASON];
    const hd_preflight_args args = {.own = u->rank,
                                    .n = u->limits.world,
                                    .ticket = GREETINGS + MEETINGS,
                                    .most = u->limits.max_bytes,
                                    .free_bytes = u->free_bytes};
    hd_preflight_results found = {.rates = u->rates, .ranks = u->ranks};
    u->until_ns = hd_now_ns() + ucx_preflight_ms(u) * 1000000LL;
    hd_status st = greet_all(u, link, err);
    u->greeted = true;
    if (st == HD_OK) st = share_memory(u, link, err);
    if (st == HD_OK && !hd_preflight_run(link, &args, &found)) {
        if (found.other >= 0) {
            ucx_name_pair(why, u, u->peers[found.other].number,
                          "other bytes came than were sent by");
            ucx_end_all(u, why);
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
    const hd_link link = ucx_link(u);
    u->limits.world = u->members.n;
    for (int32_t i = 0; i < u->members.n; i++) {
        u->peers[i] = (ucx_peer){.world = u, .number = u->members.number[i]};
    }
    memcpy(u->limits.key, hd_rendezvous_session(u->rendezvous), sizeof u->limits.key);
    HD_TRY(hd_messages_open(&u->messages, &link, parallel, u->rank, &u->figures, err));
    HD_TRY(connect_all(u, err));
    const int32_t wait_ms = u->wait_ms;
    u->wait_ms = WAIT_MS; /* other ranks come when they can */
    hd_status st = first ? run_preflight(u, &link, err) : greet_all(u, &link, err);
    if (st == HD_OK && !first) st = share_memory(u, &link, err);
    if (st == HD_OK && u->gpu)
        st = comm_ipc_connect(u->gpu, hd_messages_comm(u->messages), err);
    u->wait_ms = wait_ms;
    return st;
}

/* What ranks tell each other: the address of a worker, which says itself where it ends, or a byte if there
 * is none; the name of the host; then a card. Returns the bytes. */
static uint32_t write_offer(const hd_comm_ucx *u, const void *address, size_t n,
                            uint8_t out[HD_CHANNEL_MAX_ADDRESS], hd_err *err) {
    const size_t named = n + UCX_HOST_BYTES;
    if (named + u->o.card_bytes > HD_CHANNEL_MAX_ADDRESS) {
        HD_FAIL(err, HD_EUNSUPPORTED, "UCX's address of %zu bytes is too long", n);
        return 0;
    }
    memcpy(out, address, n);
    memset(out + n, 0, UCX_HOST_BYTES);
    gethostname((char *)out + n, UCX_HOST_BYTES - 1);
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
        if (!at || n < UCX_HOST_BYTES + u->o.card_bytes) continue;
        memcpy(u->hosts[i], at + n - u->o.card_bytes - UCX_HOST_BYTES, UCX_HOST_BYTES - 1);
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

bool hd_comm_ucx_read_rank(const hd_comm_ucx *u, int32_t number, hd_preflight_rank *out) {
    if (!u->ranks) return false;
    *out = u->ranks[number];
    return true;
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
    return hd_rendezvous_watch(u->rendezvous, ucx_end_here, u, err);
}

/* A rank that comes late is in no epoch: its communication has ended before it began. */
static hd_status come_late(hd_comm_ucx *u, hd_err *err) {
    const hd_link link = ucx_link(u);
    char why[60];
    if (!u->o.layout_of) {
        return HD_FAIL(err, HD_EPEER, "rank %d has come too late", u->o.rendezvous.rank);
    }
    snprintf(why, sizeof why, "rank %d has come", u->o.rendezvous.rank);
    ucx_end_here(u, 0, why);
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
    comm_spin_open(&u->spin, o->rendezvous.world, PROBE_NS, COMM_LEAST_SPIN_NS);
    const size_t world = (size_t)o->rendezvous.world;
    u->peers = calloc(world, sizeof *u->peers);
    u->hosts = calloc(world, sizeof *u->hosts);
    u->free_bytes = hd_device_free_bytes(device);
    if (o->rendezvous.rank == 0) {
        u->rates = calloc(world * world, sizeof *u->rates);
        u->ranks = calloc(world, sizeof *u->ranks);
    }
    u->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    hd_status st = copy_options(u, o, err);
    if (st == HD_OK && (!u->peers || !u->hosts || u->wake_fd < 0 ||
                        (o->rendezvous.rank == 0 && (!u->rates || !u->ranks)))) {
        st = HD_FAIL(err, HD_ENOMEM, "no memory or descriptor for rank %d", o->rendezvous.rank);
    }
    if (st == HD_OK && !hd_device_is_host(device))
        st = comm_ipc_open(&u->gpu, device, stream, ops, err);
    if (st == HD_OK) st = open_all(u, err);
    if (st != HD_OK) {
        if (u->rendezvous)
            ucx_end_all(u, err->status == HD_EIO ? err->msg : "a rank could not connect");
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
    if (ucx_is_over(u)) return;
    hd_rendezvous_leave(u->rendezvous);
    while (!hd_rendezvous_done(u->rendezvous) && !ucx_is_over(u)) {
        if (!u->worker || !u->ucp->worker_progress(u->worker)) ucx_sleep(u, UCX_CLOSE_MS);
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
    const hd_link link = ucx_link(u);
    for (int32_t i = 0; i < u->limits.world; i++) {
        for (int32_t k = 0; k < UCX_PLACES; k++) link.release(u, &u->peers[i].at[k]);
    }
}

/* Closes all that belongs to an epoch, but the interface. */
static void close_worker(hd_comm_ucx *u) {
    if (u->worker) {
        disconnect(u);
        release_all(u);
        u->ucp->worker_destroy(u->worker);
    }
    comm_shm *shm = u->shm;
    set_memory(u, NULL);
    comm_shm_close(shm);
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
    for (ucx_outgoing *o = u->free, *next; o; o = next) {
        next = o->next;
        free(o);
    }
    pthread_mutex_destroy(&u->mutex);
    free_options(u);
    free(u->peers);
    free(u->hosts);
    free(u->rates);
    free(u->ranks);
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
