/* rendezvous.c - the rendezvous; watch.c has what follows it. */
#include "comm/rendezvous.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/progress.h"
#include "base/siphash.h"
#include "comm/address.h"
#include "comm/rendezvous_internal.h"

enum { START_MS = 60000, SILENCE_MS = 1000, RETRY_MS = 20 };

static rendezvous_join join_of(const hd_rendezvous *m) {
    rendezvous_join j = {.world = m->o.world, .place = m->here};
    for (size_t i = 0; i < HD_LEN(j.facts); i++) j.facts[i] = m->o.facts[i].value;
    return j;
}

const char *rendezvous_difference(const hd_rendezvous *m, const rendezvous_join *other) {
    for (size_t i = 0; i < HD_LEN(other->facts); i++) {
        if (other->facts[i] != m->o.facts[i].value)
            return m->o.facts[i].name ? m->o.facts[i].name : "build";
    }
    return NULL;
}

int64_t rendezvous_now_ms(void) {
    return hd_now_ns() / 1000000;
}

/* ---- options ---- */

static bool number_from(const char *name, int32_t *out) {
    const char *text = getenv(name);
    char *end;
    if (!text || !*text) return false;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (errno || *end || value < 0 || value > INT32_MAX) return false;
    *out = (int32_t)value;
    return true;
}

bool hd_rendezvous_from_environment(int32_t *rank, int32_t *world) {
    static const char *const names[][2] = {
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
        {"PMI_RANK",             "PMI_SIZE"            },
        {"SLURM_PROCID",         "SLURM_STEP_NUM_TASKS"}
    };
    for (size_t i = 0; i < HD_LEN(names); i++) {
        int32_t r, n;
        if (number_from(names[i][0], &r) && number_from(names[i][1], &n) && r < n) {
            *rank = r;
            *world = n;
            return true;
        }
    }
    return false;
}

const char *hd_rendezvous_job(void) {
    static const char *const names[] = {"PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID"};
    for (size_t i = 0; i < HD_LEN(names); i++) {
        const char *job = getenv(names[i]);
        if (job && *job) return job;
    }
    return NULL;
}

static hd_status check(const hd_rendezvous_options *o, uint32_t n, hd_err *err) {
    if (o->world < 1 || o->world > HD_CHANNEL_MAX_RANKS || o->rank < 0 || o->rank >= o->world) {
        return HD_FAIL(err, HD_EINVAL, "rank %d of %d: a world has 1 to %d ranks", o->rank,
                       o->world, HD_CHANNEL_MAX_RANKS);
    }
    if (!o->at || !hd_address_is_valid(o->at)) {
        return HD_FAIL(err, HD_EINVAL, "the rendezvous of ranks is HOST:PORT, not at \"%s\"",
                       o->at ? o->at : "");
    }
    if (!o->secret && !hd_address_is_loopback(o->at)) {
        return HD_FAIL(err, HD_EINVAL,
                       "ranks with a rendezvous at %s, not on the loopback interface, "
                       "need a shared secret",
                       o->at);
    }
    if (n > HD_CHANNEL_MAX_ADDRESS) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "an address of %u bytes; at most %d", n,
                       HD_CHANNEL_MAX_ADDRESS);
    }
    return HD_OK;
}

hd_status rendezvous_draw(void *bytes, size_t n, hd_err *err) {
    if (getrandom(bytes, n, 0) == (ssize_t)n) return HD_OK;
    return HD_FAIL(err, HD_EIO, "no random bytes: %s", strerror(errno));
}

/* ---- the table of addresses ---- */

hd_status rendezvous_keep(rendezvous_address *a, const void *bytes, uint32_t n, hd_err *err) {
    rendezvous_forget(a);
    a->data = malloc(n + 1);
    if (!a->data) return HD_FAIL(err, HD_ENOMEM, "no memory for an address");
    memcpy(a->data, bytes, n);
    a->n = n;
    return HD_OK;
}

void rendezvous_forget(rendezvous_address *a) {
    free(a->data);
    *a = (rendezvous_address){0};
}

void rendezvous_table_deinit(rendezvous_table *t) {
    for (int32_t i = 0; i < HD_CHANNEL_MAX_RANKS; i++) rendezvous_forget(&t->at[i]);
}

static void set_session(const hd_rendezvous *m, rendezvous_table *t,
                        const uint8_t nonce[HD_CHANNEL_NONCE]) {
    uint64_t key[2];
    hd_channel_key(key, m->o.secret);
    for (uint64_t i = 0; i < 2; i++) {
        hd_siphash s;
        hd_siphash_init(&s, key);
        hd_siphash_add(&s, &i, sizeof i);
        hd_siphash_add(&s, nonce, HD_CHANNEL_NONCE);
        t->session[i] = hd_siphash_value(&s);
    }
}

/* Returns the bytes of a table, which the caller frees. */
static uint8_t *pack_table(const hd_rendezvous *m, const rendezvous_table *t,
                           const uint8_t nonce[HD_CHANNEL_NONCE], uint32_t *n) {
    uint8_t *bytes = malloc(HD_CHANNEL_MAX_PAYLOAD);
    if (!bytes) return NULL;
    memcpy(bytes, nonce, HD_CHANNEL_NONCE);
    memcpy(bytes + HD_CHANNEL_NONCE, &t->epoch, sizeof t->epoch);
    memcpy(bytes + HD_CHANNEL_NONCE + sizeof t->epoch, &t->first, sizeof t->first);
    *n = HD_CHANNEL_NONCE + sizeof t->epoch + sizeof t->first;
    for (int32_t i = 0; i < m->o.world; i++) {
        const rendezvous_address *a = &t->at[i];
        memcpy(bytes + *n, &a->n, sizeof a->n);
        if (a->n) memcpy(bytes + *n + sizeof a->n, a->data, a->n);
        *n += (uint32_t)sizeof a->n + a->n;
    }
    return bytes;
}

hd_status rendezvous_send_table(hd_rendezvous *m, rendezvous_table *out, hd_err *err) {
    uint8_t nonce[HD_CHANNEL_NONCE];
    uint32_t n;
    *out = (rendezvous_table){.epoch = m->table.epoch + 1, .first = m->here};
    HD_TRY(rendezvous_draw(nonce, sizeof nonce, err));
    set_session(m, out, nonce);
    memcpy(out->at, m->offer, sizeof out->at);
    uint8_t *bytes = pack_table(m, out, nonce, &n);
    if (!bytes) return HD_FAIL(err, HD_ENOMEM, "no memory for the addresses");
    memset(m->offer, 0, sizeof m->offer);
    for (int32_t i = 1; i < m->o.world; i++) { /* a failure is seen by the watch */
        if (out->at[i].data)
            hd_channel_send(&m->to[i], HD_FRAME_TABLE, 0, bytes, n, m->o.silence_ms, NULL);
    }
    free(bytes);
    return HD_OK;
}

hd_status rendezvous_read_table(const hd_rendezvous *m, rendezvous_table *out,
                                const uint8_t *bytes, uint32_t n, hd_err *err) {
    const uint32_t before = m->table.epoch; /* out may be the table */
    uint32_t at = HD_CHANNEL_NONCE + sizeof out->epoch + sizeof out->first;
    *out = (rendezvous_table){0};
    if (n < at) return HD_FAIL(err, HD_EFORMAT, "the addresses are cut off");
    set_session(m, out, bytes);
    memcpy(&out->epoch, bytes + HD_CHANNEL_NONCE, sizeof out->epoch);
    memcpy(&out->first, bytes + HD_CHANNEL_NONCE + sizeof out->epoch, sizeof out->first);
    if (out->epoch <= before) {
        return HD_FAIL(err, HD_EFORMAT, "addresses of epoch %u after those of epoch %u",
                       out->epoch, before);
    }
    for (int32_t i = 0; i < m->o.world; i++) {
        uint32_t length;
        if (n - at < 4) return HD_FAIL(err, HD_EFORMAT, "the addresses are cut off");
        memcpy(&length, bytes + at, 4);
        at += 4;
        if (length > HD_CHANNEL_MAX_ADDRESS || length > n - at) {
            return HD_FAIL(err, HD_EFORMAT, "rank %d's address has %u bytes", i, length);
        }
        if (length) HD_TRY(rendezvous_keep(&out->at[i], bytes + at, length, err));
        at += length;
    }
    if (at != n) return HD_FAIL(err, HD_EFORMAT, "%u bytes follow the addresses", n - at);
    return HD_OK;
}

/* ---- rank 0 ---- */

static int32_t first_missing(const hd_rendezvous *m) {
    for (int32_t i = 1; i < m->o.world; i++) {
        if (m->to[i].fd < 0) return i;
    }
    return -1;
}

/* A hostile or mistaken connection is dropped; ranks are waited for. */
static hd_status gather(hd_rendezvous *m, hd_err *err) {
    const int64_t end = rendezvous_now_ms() + m->o.start_ms;
    while (first_missing(m) >= 0) {
        struct pollfd p[RENDEZVOUS_DOOR_FDS];
        const int64_t left = end - rendezvous_now_ms();
        if (left <= 0) {
            return HD_FAIL(err, HD_EPEER, "rank %d did not come to %s within %d s",
                           first_missing(m), m->o.at, m->o.start_ms / 1000);
        }
        rendezvous_door_fds(&m->door, p);
        poll(p, RENDEZVOUS_DOOR_FDS, (int)left);
        rendezvous_door_serve(m, p);
    }
    return HD_OK;
}

static hd_status host(hd_rendezvous *m, hd_err *err) {
    HD_TRY(rendezvous_door_open(m, err));
    HD_TRY(gather(m, err));
    return rendezvous_send_table(m, &m->table, err);
}

/* ---- the other ranks ---- */

/* A port from which connections start can meet itself where nobody listens yet: the connection
 * then has one end, and rank 0 could not bind its address. */
static bool met_itself(int fd) {
    struct sockaddr_storage here = {0}, there = {0};
    socklen_t n = sizeof here, k = sizeof there;
    return !getsockname(fd, (struct sockaddr *)&here, &n) &&
           !getpeername(fd, (struct sockaddr *)&there, &k) && n == k &&
           !memcmp(&here, &there, n);
}

static hd_status connect_to_first(hd_rendezvous *m, int64_t end, int *out, hd_err *err) {
    struct addrinfo *found;
    HD_TRY(hd_address_resolve(m->o.at, false, &found, err));
    int fd = -1, why = 0;
    while (fd < 0) {
        fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const int rc = fd < 0 ? -1 : connect(fd, found->ai_addr, found->ai_addrlen);
        if (rc == 0 && !met_itself(fd)) break;
        why = rc ? errno : ECONNREFUSED;
        if (fd >= 0) close(fd);
        fd = -1;
        if (rendezvous_now_ms() > end || (m->o.again && why == ECONNREFUSED)) break;
        nanosleep(&(struct timespec){0, RETRY_MS * 1000000L}, NULL);
    }
    freeaddrinfo(found);
    if (fd < 0) {
        return HD_FAIL(err, HD_EPEER, "rank %d cannot reach rank 0 at %s: %s", m->o.rank,
                       m->o.at, strerror(why));
    }
    hd_address_no_delay(fd);
    *out = fd;
    return HD_OK;
}

/* Waits for a frame of this kind, or of the other one. */
static hd_status await(hd_rendezvous *m, hd_frame_kind kind, hd_frame_kind other, int64_t end,
                       hd_err *err) {
    hd_channel *c = &m->to[0];
    for (;;) {
        const hd_status st = hd_channel_read(c, err);
        if (st == HD_OK && (c->head.kind == kind || c->head.kind == other)) return HD_OK;
        if (st == HD_OK && c->head.kind == HD_FRAME_LOST && c->head.n >= 4) {
            return HD_FAIL(err, HD_EPEER, "rank 0 refuses: %s", (const char *)c->payload + 4);
        }
        if (st == HD_OK) return HD_FAIL(err, HD_EFORMAT, "a message of kind %u", c->head.kind);
        if (st == HD_EIO) {
            return HD_FAIL(err, HD_EPEER, "rank 0 has ended or refuses the secret");
        }
        if (st != HD_EAGAIN) return st;
        const int64_t left = end - rendezvous_now_ms();
        struct pollfd p = {.fd = c->fd, .events = POLLIN};
        if (left <= 0 || poll(&p, 1, (int)left) == 0) {
            return HD_FAIL(err, HD_EPEER, "rank 0 at %s did not gather all ranks in %d s",
                           m->o.at, m->o.start_ms / 1000);
        }
    }
}

static hd_status visit(hd_rendezvous *m, hd_err *err) {
    const int64_t end = rendezvous_now_ms() + m->o.start_ms;
    const rendezvous_join j = join_of(m);
    uint8_t say[HD_CHANNEL_NONCE + sizeof j + HD_CHANNEL_MAX_ADDRESS];
    uint64_t key[2];
    hd_channel *c = &m->to[0];
    int fd = -1;
    HD_TRY(connect_to_first(m, end, &fd, err));
    hd_channel_key(key, m->o.secret);
    hd_channel_init(c, fd, false, key);
    HD_TRY(await(m, HD_FRAME_CHALLENGE, HD_FRAME_CHALLENGE, end, err));
    HD_TRY(rendezvous_draw(c->nonce[1], HD_CHANNEL_NONCE, err));
    memcpy(say, c->nonce[1], HD_CHANNEL_NONCE);
    memcpy(say + HD_CHANNEL_NONCE, &j, sizeof j);
    const rendezvous_address *own = &m->offer[m->o.rank];
    const uint32_t before = HD_CHANNEL_NONCE + sizeof j;
    memcpy(say + before, own->data, own->n);
    HD_TRY(
        hd_channel_send(c, HD_FRAME_JOIN, m->o.rank, say, before + own->n, m->o.start_ms, err));
    HD_TRY(await(m, HD_FRAME_TABLE, HD_FRAME_WELCOME, end, err));
    if (c->head.kind == HD_FRAME_WELCOME && c->head.n == sizeof m->table.first) {
        memcpy(&m->table.first, c->payload, sizeof m->table.first);
        return HD_OK;
    }
    return rendezvous_read_table(m, &m->table, c->payload, c->head.n, err);
}

/* ---- opening ---- */

static hd_status copy_text(const char **text, hd_err *err) {
    if (!*text) return HD_OK;
    *text = strdup(*text);
    return *text ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a rendezvous");
}

static hd_status copy_options(hd_rendezvous *m, const hd_rendezvous_options *o, hd_err *err) {
    m->o = *o;
    m->o.secret = NULL;
    if (!m->o.start_ms) m->o.start_ms = START_MS;
    if (!m->o.silence_ms) m->o.silence_ms = SILENCE_MS;
    HD_TRY(copy_text(&m->o.at, err));
    m->o.secret = o->secret;
    return copy_text(&m->o.secret, err);
}

static hd_status come_together(hd_rendezvous *m, hd_err *err) {
    if (m->o.world > 1) return m->o.rank ? visit(m, err) : host(m, err);
    return rendezvous_send_table(m, &m->table, err);
}

hd_status hd_rendezvous_open(hd_rendezvous **out, const hd_rendezvous_options *o,
                             const void *address, uint32_t n, hd_err *err) {
    *out = NULL;
    HD_TRY(check(o, n, err));
    hd_rendezvous *m = calloc(1, sizeof *m);
    if (!m) return HD_FAIL(err, HD_ENOMEM, "no memory for a world of %d ranks", o->world);
    pthread_mutex_init(&m->mutex, NULL);
    pthread_cond_init(&m->news, NULL);
    m->wake[0] = m->wake[1] = -1;
    m->here = hd_place_here();
    for (int32_t i = 0; i < HD_CHANNEL_MAX_RANKS; i++) m->to[i].fd = -1;
    rendezvous_door_init(&m->door);
    hd_status st = copy_options(m, o, err);
    if (st == HD_OK) st = rendezvous_keep(&m->offer[o->rank], address, n, err);
    if (st == HD_OK) st = come_together(m, err);
    if (st != HD_OK) {
        hd_rendezvous_close(m);
        return st;
    }
    rendezvous_forget(&m->offer[o->rank]);
    m->over = m->table.epoch == 0;
    *out = m;
    return HD_OK;
}

uint32_t hd_rendezvous_epoch(const hd_rendezvous *m) {
    return m->table.epoch;
}

const void *hd_rendezvous_address(const hd_rendezvous *m, int32_t rank, uint32_t *n) {
    *n = m->table.at[rank].n;
    return m->table.at[rank].data;
}

const uint64_t *hd_rendezvous_session(const hd_rendezvous *m) {
    return m->table.session;
}

void hd_rendezvous_close(hd_rendezvous *m) {
    if (!m) return;
    rendezvous_stop_watch(m);
    rendezvous_door_close(&m->door);
    for (int32_t i = 0; i < HD_CHANNEL_MAX_RANKS; i++) {
        hd_channel_close(&m->to[i]);
        rendezvous_forget(&m->offer[i]);
    }
    rendezvous_table_deinit(&m->table);
    rendezvous_forget(&m->own);
    free((void *)(uintptr_t)m->o.at);
    free((void *)(uintptr_t)m->o.secret);
    pthread_cond_destroy(&m->news);
    pthread_mutex_destroy(&m->mutex);
    free(m);
}
