/* fuzz_message.c - any bytes as a header of a message between ranks, as a control frame, and as
 * what a member sends to each operation: wrong lengths and shapes must end communication. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "comm/channel.h"
#include "comm/messages.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* A header that is accepted must fit its limits, sealed by a rank of the world or not. */
static void check_message(hd_message m, const void *bytes, uint64_t n) {
    const hd_message_limits limits = {
        .world = 4, .epoch = 1, .max_bytes = 1000, .key = {1, 2}
    };
    if (hd_message_check(&m, &limits, bytes, n, NULL) != HD_OK) return;
    if (m.from < 0 || m.from >= 4 || m.n > 1000 || m.n != n || m.group >= HD_N_GROUPS ||
        m.lane >= HD_N_MESSAGE_LANES) {
        abort();
    }
}

/* ---- a link whose other end sends any bytes under a sealed header ---- */

typedef struct other_end {
    const uint8_t *data;
    size_t n;
    hd_received received;
    float *bytes; /* owned; just as long as the message */
    const char *ended;
} other_end;

static void send_nowhere(void *ctx, int32_t to, hd_message *m, const void *data, int32_t set) {
    (void)ctx;
    (void)to;
    (void)m;
    (void)data;
    (void)set;
}

static void *no_room(void *ctx, hd_group group, hd_message_lane lane, uint64_t ticket,
                     uint64_t n) {
    (void)ctx;
    (void)group;
    (void)lane;
    (void)ticket;
    (void)n;
    return NULL;
}

static bool flush_nothing(void *ctx, int32_t set) {
    (void)ctx;
    (void)set;
    return true;
}

/* The next message: four small numbers as its shape, a length, and the bytes that are left. */
static hd_received *receive(void *ctx, int32_t from, hd_group group, hd_message_lane lane,
                            uint64_t ticket) {
    other_end *o = ctx;
    (void)group;
    (void)lane;
    if (o->ended || o->n < 5) {
        o->ended = "nothing more";
        return NULL;
    }
    const size_t n = o->data[4] < o->n - 5 ? o->data[4] : o->n - 5;
    o->received = (hd_received){
        .head = {.from = from, .ticket = ticket, .n = n},
          .full = true
    };
    for (int i = 0; i < 4; i++) o->received.head.shape[i] = (int8_t)o->data[i];
    free(o->bytes);
    o->bytes = malloc(n + 1);
    if (!o->bytes) abort();
    memcpy(o->bytes, o->data + 5, n);
    o->received.data = n ? o->bytes : NULL;
    o->data += 5 + n;
    o->n -= 5 + n;
    return &o->received;
}

static void keep(void *ctx, hd_received *r) {
    (void)ctx;
    (void)r;
}

static void end(void *ctx, const char *why) {
    (void)why;
    ((other_end *)ctx)->ended = "ended";
}

static const char *ended(void *ctx) {
    return ((const other_end *)ctx)->ended;
}

enum { COLS = 3, ROWS = 4, SLOTS = 2, IN_ROWS = 6 };

static void make_calls(const hd_comm *c, hd_stream *s, const uint8_t *order, size_t n) {
    float x[ROWS * COLS] = {0}, y[ROWS * COLS] = {0}, in[IN_ROWS * COLS] = {0};
    float weight[ROWS] = {0}, in_weight[IN_ROWS];
    int32_t offset[2 * SLOTS + 1] = {0, 1, 2, 3, 4}, choice[ROWS] = {0, 1, 2, 3};
    int32_t in_offset[SLOTS + 1] = {0};
    const hd_dispatch_args out = {.x = hd_f32(x),
                                  .weight = weight,
                                  .offset = offset,
                                  .assignment = choice,
                                  .rows = ROWS,
                                  .cols = COLS,
                                  .top_k = 1,
                                  .in_x = hd_f32(in),
                                  .in_weight = in_weight,
                                  .in_offset = in_offset,
                                  .in_rows = IN_ROWS,
                                  .n_slots = SLOTS};
    const hd_combine_args back = {.in_y = hd_f32(in),
                                  .y = hd_f32(y),
                                  .rows = ROWS,
                                  .cols = COLS,
                                  .top_k = 1,
                                  .in_rows = IN_ROWS};
    for (size_t i = 0; i < n; i++) {
        switch (order[i] % 5) {
        case 0:
            hd_comm_all_reduce(c, s, &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(x), 5});
            break;
        case 1:
            hd_comm_reduce_scatter(c, s,
                                   &(hd_reduce_scatter_args){HD_GROUP_TP, hd_f32(x), 5, 1, 2});
            break;
        case 2:
            hd_comm_all_gather(c, s,
                               &(hd_all_gather_args){HD_GROUP_TP, x, ROWS, COLS, 0, 1, false});
            break;
        case 3:
            hd_comm_broadcast(c, s, &(hd_broadcast_args){HD_GROUP_TP, x, sizeof x});
            break;
        default:
            hd_comm_dispatch_send(c, s, &out);
            hd_comm_dispatch_arrive(c, s, &out);
            hd_comm_combine_send(c, s, &back);
            hd_comm_combine_arrive(c, s, &back);
        }
    }
}

static void check_operations(const uint8_t *data, size_t n) {
    static hd_device *device;
    const hd_parallel_config two = hd_parallel_tensor(2);
    hd_parallel_config parallel = two;
    other_end o = {.data = data + 4, .n = n - 4};
    const hd_link link = {.send = send_nowhere,
                          .room = no_room,
                          .flush = flush_nothing,
                          .wait = receive,
                          .release = keep,
                          .abort = end,
                          .ended = ended,
                          .ctx = &o};
    hd_stream *s;
    hd_messages *m;
    parallel.ep = 2;
    parallel.etp = 1;
    if (!device && hd_device_open_cpu(&device, &(hd_cpu_options){.n_threads = 1}, NULL))
        abort();
    if (hd_stream_open(&s, device, NULL)) abort();
    if (hd_messages_open(&m, &link, &parallel, (int32_t)(data[0] % 2), NULL, NULL)) abort();
    make_calls(hd_messages_comm(m), s, data, 4);
    hd_messages_close(m);
    hd_stream_close(s);
    free(o.bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    hd_message m;
    hd_frame f;
    if (n >= sizeof m) {
        const uint8_t *bytes = data + sizeof m;
        memcpy(&m, data, sizeof m);
        check_message(m, bytes, n - sizeof m);
        m.n = n - sizeof m;
        hd_message_seal(&m,
                        &(hd_message_limits){
                            .epoch = 1, .key = {1, 2}
        },
                        bytes);
        check_message(m, bytes, n - sizeof m);
    }
    if (n >= sizeof f) {
        memcpy(&f, data, sizeof f);
        if (hd_frame_check(&f, &hd_rank_frames, NULL) == HD_OK && f.n > HD_CHANNEL_MAX_PAYLOAD)
            abort();
    }
    if (n >= 4) check_operations(data, n);
    return 0;
}
