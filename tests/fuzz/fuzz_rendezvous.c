/* fuzz_rendezvous.c - control frames with any payload, from a rank that has the key: offers and
 * figures to rank 0, tables of addresses to the others. What is wrong must cost the sender its
 * connection, and nothing else. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/rendezvous_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { WORLD = 3, HEAD = 3 };

static void ignore_loss(void *ctx, uint32_t epoch, const char *why) {
    (void)ctx;
    (void)epoch;
    if (strlen(why) >= HD_CHANNEL_MAX_TEXT) abort();
}

static void open_ends(hd_rendezvous *m, hd_channel *far, int32_t other) {
    static const uint64_t key[2] = {1, 2};
    int fd[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fd)) abort();
    pthread_mutex_init(&m->mutex, NULL);
    pthread_cond_init(&m->news, NULL);
    for (int32_t i = 0; i < HD_CHANNEL_MAX_RANKS; i++) m->to[i].fd = -1;
    m->wake[0] = m->wake[1] = -1;
    rendezvous_door_init(&m->door);
    m->lost = ignore_loss;
    hd_channel_init(&m->to[other], fd[0], m->o.rank == 0, key);
    hd_channel_init(far, fd[1], m->o.rank != 0, key);
}

/* Members have addresses that fit, and epochs rise. */
static void check(const hd_rendezvous *m, uint32_t epoch) {
    if (m->table.epoch < epoch) abort();
    for (int32_t i = 0; i < HD_CHANNEL_MAX_RANKS; i++) {
        const rendezvous_address *const all[] = {&m->table.at[i], &m->offer[i]};
        for (int k = 0; k < 2; k++) {
            if (all[k]->n > HD_CHANNEL_MAX_ADDRESS || (all[k]->n && !all[k]->data)) abort();
            if (i >= WORLD && all[k]->data) abort();
        }
        for (int k = 0; k < HD_N_COMM_OPS; k++) {
            if (m->figures[i].of[k].bytes < 0) abort();
        }
    }
}

/* Each frame: its kind, two bytes of its length, and as many bytes as there are. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (n < 2) return 0;
    hd_rendezvous *m = calloc(1, sizeof *m);
    if (!m) return 0;
    hd_channel far;
    m->o.world = WORLD;
    m->o.rank = data[0] % 2;
    m->o.silence_ms = 1;
    const int32_t other = m->o.rank ? 0 : 1 + data[0] / 2 % (WORLD - 1);
    open_ends(m, &far, other);
    m->table.epoch = 1;
    m->over = data[1] % 2;
    for (size_t at = 2; at + HEAD <= n && m->to[other].fd >= 0 && !m->ended;) {
        const size_t left = n - at - HEAD, asked = data[at + 1] | (size_t)data[at + 2] << 8;
        const uint32_t some = (uint32_t)(asked < left ? asked : left);
        const uint32_t epoch = m->table.epoch;
        if (hd_channel_send(&far, (hd_frame_kind)data[at], other, data + at + HEAD, some, 0,
                            NULL) != HD_OK) {
            break;
        }
        rendezvous_take_frames(m, other);
        check(m, epoch);
        m->over |= data[at] % 2;
        at += HEAD + some;
    }
    hd_channel_close(&far);
    hd_rendezvous_close(m);
    return 0;
}
