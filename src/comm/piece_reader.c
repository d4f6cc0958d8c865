/* piece_reader.c - the thread that reads pieces of experts from one rank of another host (pieces.h). Reads
 * are cut into pieces, of which a few are asked for ahead. If the connection fails, the rest of a read is
 * copied from the file, and so are the next ones until it is time to try again. */
#include "comm/pieces.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/progress.h"
#include "comm/address.h"

enum {
    AHEAD = 8,         /* pieces that are asked for */
    SILENCE_MS = 1000, /* longest wait for bytes, and for a connection */
    RETRY_MS = 5000,   /* from a failure to the next connection */
    FIRST_READS = 1024 /* of the queue */
};

/* Where a read stands: its number, and bytes of it. */
typedef struct cursor {
    uint64_t read;
    size_t at;
} cursor;

struct hd_piece_reader {
    char address[HD_PIECE_ADDRESS];
    uint64_t key[2];
    int32_t rank;
    pthread_t thread;

    /* guarded by the mutex */
    pthread_mutex_t mutex;
    pthread_cond_t queued, done;
    hd_piece_read *reads; /* [cap] a ring, by number */
    uint64_t n_queued, n_done, cap;
    bool closes;
    char why[HD_CHANNEL_MAX_TEXT];

    /* of the thread */
    hd_channel channel; /* fd -1: none */
    int64_t failed_ns;  /* 0: never */
    cursor asked, got;
    int32_t n_asked;
    _Atomic int64_t bytes, file_bytes, failures;
};

/* ---- the queue ---- */

/* The caller holds the mutex. */
static bool grow(hd_piece_reader *r) {
    if (r->n_queued - r->n_done < r->cap) return true;
    const uint64_t cap = 2 * r->cap;
    hd_piece_read *reads = calloc(cap, sizeof *reads);
    if (!reads) return false;
    for (uint64_t i = r->n_done; i < r->n_queued; i++) reads[i % cap] = r->reads[i % r->cap];
    free(r->reads);
    r->reads = reads;
    r->cap = cap;
    return true;
}

uint64_t hd_piece_reader_queue(hd_piece_reader *r, const hd_piece_read *read) {
    pthread_mutex_lock(&r->mutex);
    const bool fits = grow(r);
    if (fits) r->reads[r->n_queued++ % r->cap] = *read;
    const uint64_t number = r->n_queued;
    pthread_cond_signal(&r->queued);
    pthread_mutex_unlock(&r->mutex);
    if (!fits) memcpy(read->to, read->file, read->bytes);
    return number;
}

void hd_piece_reader_await(hd_piece_reader *r, uint64_t number) {
    pthread_mutex_lock(&r->mutex);
    while (r->n_done < number) pthread_cond_wait(&r->done, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
}

/* Returns whether there is a read of this number. */
static bool look_at(hd_piece_reader *r, uint64_t number, hd_piece_read *out) {
    pthread_mutex_lock(&r->mutex);
    const bool is = number < r->n_queued;
    if (is) *out = r->reads[number % r->cap];
    pthread_mutex_unlock(&r->mutex);
    return is;
}

/* Waits for a read. False: the reader closes, and there is none. */
static bool await_read(hd_piece_reader *r) {
    pthread_mutex_lock(&r->mutex);
    while (r->n_done == r->n_queued && !r->closes) pthread_cond_wait(&r->queued, &r->mutex);
    const bool is = r->n_done < r->n_queued;
    pthread_mutex_unlock(&r->mutex);
    return is;
}

/* ---- the connection ---- */

static void fail(hd_piece_reader *r, const hd_err *why) {
    hd_channel_close(&r->channel);
    r->failed_ns = hd_now_ns();
    atomic_fetch_add(&r->failures, 1);
    pthread_mutex_lock(&r->mutex);
    snprintf(r->why, sizeof r->why, "%.*s", HD_CHANNEL_MAX_TEXT - 1, why->msg);
    pthread_mutex_unlock(&r->mutex);
}

static hd_status await_socket(int fd, short events, hd_err *err) {
    struct pollfd p = {.fd = fd, .events = events};
    if (poll(&p, 1, SILENCE_MS) > 0) return HD_OK;
    return HD_FAIL(err, HD_EPEER, "nothing came for %d ms", SILENCE_MS);
}

static hd_status connect_socket(hd_piece_reader *r, int *fd, hd_err *err) {
    struct addrinfo *found;
    int why = 0;
    socklen_t n = sizeof why;
    HD_TRY(hd_address_resolve(r->address, false, &found, err));
    *fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const int rc = *fd < 0 ? -1 : connect(*fd, found->ai_addr, found->ai_addrlen);
    if (rc != 0) why = errno;
    freeaddrinfo(found);
    if (*fd < 0) return HD_FAIL(err, HD_EIO, "no socket: %s", strerror(why));
    if (rc != 0 && why == EINPROGRESS) {
        HD_TRY(await_socket(*fd, POLLOUT, err));
        getsockopt(*fd, SOL_SOCKET, SO_ERROR, &why, &n);
    }
    if (why == 0) return HD_OK;
    return HD_FAIL(err, HD_EIO, "cannot connect to %s: %s", r->address, strerror(why));
}

/* Waits for a frame of this kind. */
static hd_status await_frame(hd_channel *c, hd_piece_frame kind, hd_err *err) {
    hd_status st;
    while ((st = hd_channel_read(c, err)) == HD_EAGAIN) {
        HD_TRY(await_socket(c->fd, POLLIN, err));
    }
    HD_TRY(st);
    if (c->head.kind == kind) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "a frame of kind %u", c->head.kind);
}

static hd_status say(hd_piece_reader *r, hd_piece_frame kind, const void *payload, uint32_t n,
                     hd_err *err) {
    return hd_channel_send(&r->channel, (hd_frame_kind)kind, r->rank, payload, n, SILENCE_MS,
                           err);
}

static hd_status connect_now(hd_piece_reader *r, hd_err *err) {
    hd_channel *c = &r->channel;
    int fd = -1;
    const hd_status st = connect_socket(r, &fd, err);
    hd_channel_init(c, fd, false, r->key);
    c->limits = hd_piece_limits(false);
    HD_TRY(st);
    hd_address_no_delay(fd);
    HD_TRY(await_frame(c, HD_PIECE_CHALLENGE, err));
    if (getrandom(c->nonce[1], HD_CHANNEL_NONCE, 0) != HD_CHANNEL_NONCE) {
        return HD_FAIL(err, HD_EIO, "no random bytes");
    }
    return say(r, HD_PIECE_JOIN, c->nonce[1], HD_CHANNEL_NONCE, err);
}

/* Connects, unless the last failure is too near. */
static bool is_connected(hd_piece_reader *r) {
    hd_err err = {0};
    if (r->channel.fd >= 0) return true;
    if (r->failed_ns && hd_now_ns() - r->failed_ns < RETRY_MS * 1000000LL) return false;
    if (connect_now(r, &err) == HD_OK) return true;
    fail(r, &err);
    return false;
}

/* ---- reading ---- */

static uint32_t piece_bytes(const hd_piece_read *read, size_t at) {
    const size_t left = read->bytes - at;
    return (uint32_t)(left < HD_PIECE_MOST_BYTES ? left : HD_PIECE_MOST_BYTES);
}

static void pass(cursor *c, const hd_piece_read *read, uint32_t n) {
    c->at += n;
    if (c->at == read->bytes) *c = (cursor){.read = c->read + 1};
}

/* Asks for the next pieces of what is queued. */
static hd_status ask(hd_piece_reader *r, hd_err *err) {
    hd_piece_read read;
    while (r->n_asked < AHEAD && look_at(r, r->asked.read, &read)) {
        const hd_piece p = {.layer = read.layer,
                            .expert = read.expert,
                            .array = read.array,
                            .n = piece_bytes(&read, r->asked.at),
                            .at = read.at + r->asked.at};
        HD_TRY(say(r, HD_PIECE_ASK, &p, sizeof p, err));
        pass(&r->asked, &read, p.n);
        r->n_asked++;
    }
    return HD_OK;
}

static hd_status take_piece(hd_piece_reader *r, const hd_piece_read *read, hd_err *err) {
    HD_TRY(await_frame(&r->channel, HD_PIECE_BYTES, err));
    const uint32_t n = piece_bytes(read, r->got.at);
    if (r->channel.head.n != n) {
        return HD_FAIL(err, HD_EFORMAT, "%u bytes came, not %u", r->channel.head.n, n);
    }
    memcpy((uint8_t *)read->to + r->got.at, r->channel.payload, n);
    atomic_fetch_add(&r->bytes, n);
    pass(&r->got, read, n);
    r->n_asked--;
    return HD_OK;
}

/* What has not come of a read. The next one is asked for anew. */
static void copy_rest(hd_piece_reader *r, const hd_piece_read *read) {
    const size_t at = r->got.at, n = read->bytes - at;
    memcpy((uint8_t *)read->to + at, (const uint8_t *)read->file + at, n);
    atomic_fetch_add(&r->file_bytes, (int64_t)n);
    r->got = r->asked = (cursor){.read = r->got.read + 1};
    r->n_asked = 0;
}

static void finish(hd_piece_reader *r) {
    pthread_mutex_lock(&r->mutex);
    r->n_done = r->got.read;
    pthread_cond_broadcast(&r->done);
    pthread_mutex_unlock(&r->mutex);
}

/* Reads the first of the queue. */
static void read_first(hd_piece_reader *r) {
    const uint64_t number = r->got.read;
    hd_piece_read read;
    if (!look_at(r, number, &read)) return;
    bool comes = is_connected(r);
    while (comes && r->got.read == number) {
        hd_err err = {0};
        comes = ask(r, &err) == HD_OK && take_piece(r, &read, &err) == HD_OK;
        if (!comes) fail(r, &err);
    }
    if (!comes) copy_rest(r, &read);
    finish(r);
}

static void *work(void *arg) {
    hd_piece_reader *r = arg;
    while (await_read(r)) read_first(r);
    return NULL;
}

/* ---- opening ---- */

hd_status hd_piece_reader_open(hd_piece_reader **out, const char *address, const char *secret,
                               int32_t rank, hd_err *err) {
    hd_piece_reader *r = calloc(1, sizeof *r);
    *out = NULL;
    if (r) r->reads = calloc(FIRST_READS, sizeof *r->reads);
    if (!r || !r->reads) {
        free(r);
        return HD_FAIL(err, HD_ENOMEM, "no memory to read experts of other ranks");
    }
    r->cap = FIRST_READS;
    snprintf(r->address, sizeof r->address, "%s", address);
    hd_piece_key(r->key, secret);
    r->rank = rank;
    r->channel.fd = -1;
    pthread_mutex_init(&r->mutex, NULL);
    pthread_cond_init(&r->queued, NULL);
    pthread_cond_init(&r->done, NULL);
    if (pthread_create(&r->thread, NULL, work, r) != 0) {
        free(r->reads);
        free(r);
        return HD_FAIL(err, HD_EIO, "cannot start the thread that reads experts");
    }
    *out = r;
    return HD_OK;
}

void hd_piece_reader_read_figures(hd_piece_reader *r, hd_piece_reader_figures *out) {
    out->bytes = atomic_load(&r->bytes);
    out->file_bytes = atomic_load(&r->file_bytes);
    out->failures = atomic_load(&r->failures);
    pthread_mutex_lock(&r->mutex);
    memcpy(out->why, r->why, sizeof out->why);
    pthread_mutex_unlock(&r->mutex);
}

void hd_piece_reader_close(hd_piece_reader *r) {
    if (!r) return;
    pthread_mutex_lock(&r->mutex);
    r->closes = true;
    pthread_cond_signal(&r->queued);
    pthread_mutex_unlock(&r->mutex);
    pthread_join(r->thread, NULL);
    hd_channel_close(&r->channel);
    pthread_cond_destroy(&r->done);
    pthread_cond_destroy(&r->queued);
    pthread_mutex_destroy(&r->mutex);
    free(r->reads);
    free(r);
}
