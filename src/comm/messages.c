/* messages.c - collectives, dispatch and combine over a link. */
#include "comm/messages.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "base/siphash.h"
#include "comm/figures_internal.h"
#include "comm/rounds_internal.h"
#include "comm/stream_internal.h"
#include "comm/tree_sum.h"

/* Up to ONE_SHOT floats every member gets all terms, which saves a second exchange. */
enum { MAGIC = 0x4d484443, ONE_SHOT = 16384 };

typedef struct buffer {
    void *data;
    size_t room;
} buffer;

/* A dispatch between send and combine_arrive. */
typedef struct inflight {
    buffer out[HD_MESSAGE_MAX_RANKS];  /* what is dispatched to each member */
    size_t own_bytes;                  /* of that, to this rank */
    buffer back[HD_MESSAGE_MAX_RANKS]; /* results for each member */
    buffer counts;                     /* int32 [members, n_slots]: rows received */
    hd_dispatch_args args;
} inflight;

struct hd_messages {
    hd_comm comm;
    hd_link link;
    uint64_t begun[HD_N_GROUPS];     /* collectives */
    uint64_t broadcast[HD_N_GROUPS]; /* broadcasts */
    uint64_t sent, dispatched, returned, combined;
    inflight inflight[HD_COMM_MAX_INFLIGHT];
    buffer packed;
    buffer row_places; /* int32 [rows]: where a row is in the message that is packed */
};

/* ---- headers ---- */

static uint64_t mac_of(const hd_message *m, const hd_message_limits *limits, const void *bytes,
                       uint64_t n) {
    hd_siphash s;
    hd_siphash_init(&s, limits->key);
    hd_siphash_add(&s, m, offsetof(hd_message, mac));
    if (limits->authenticates_bytes && n) hd_siphash_add(&s, bytes, n);
    return hd_siphash_value(&s);
}

void hd_message_seal(hd_message *m, const hd_message_limits *limits, const void *bytes) {
    m->magic = MAGIC;
    m->version = HD_MESSAGE_VERSION;
    m->epoch = limits->epoch;
    m->mac = mac_of(m, limits, bytes, m->n);
}

hd_status hd_message_check(const hd_message *m, const hd_message_limits *limits,
                           const void *bytes, uint64_t n, hd_err *err) {
    if (m->magic != MAGIC || m->version != HD_MESSAGE_VERSION) {
        return HD_FAIL(err, HD_EFORMAT, "not a message of a rank of this version");
    }
    if (m->mac != mac_of(m, limits, bytes, n)) {
        return HD_FAIL(err, HD_EFORMAT, "a message was not made by a rank of this world");
    }
    if (m->epoch != limits->epoch) {
        return m->epoch < limits->epoch
                   ? HD_EAGAIN
                   : HD_FAIL(err, HD_EFORMAT, "a message of epoch %u in epoch %u", m->epoch,
                             limits->epoch);
    }
    if (m->group >= HD_N_GROUPS || m->lane >= HD_N_MESSAGE_LANES || m->from < 0 ||
        m->from >= limits->world) {
        return HD_FAIL(err, HD_EFORMAT, "a message of rank %d, group %u, lane %u", m->from,
                       m->group, m->lane);
    }
    if (m->n != n || m->n > limits->max_bytes) {
        return HD_FAIL(err, HD_EFORMAT,
                       "a message says it has %llu bytes and has %llu, at most %llu",
                       (unsigned long long)m->n, (unsigned long long)n,
                       (unsigned long long)limits->max_bytes);
    }
    return HD_OK;
}

/* ---- help for all ---- */

static const hd_rank_group *group_of(const hd_messages *m, hd_group g) {
    return &m->comm.groups[g];
}

static int32_t rank_at(const hd_rank_group *g, int32_t i) {
    return g->first + i * g->stride;
}

static float *floats(hd_rows x) {
    return x.data; /* hd_comm_ucx_open has checked */
}

static void abort_all(void *ctx, const char *why) {
    const hd_messages *m = ctx;
    m->link.abort(m->link.ctx, why);
}

static const char *ended(void *ctx) {
    const hd_messages *m = ctx;
    return m->link.ended(m->link.ctx);
}

static void fail(const hd_messages *m, hd_stream *s) {
    const char *why = m->link.ended(m->link.ctx);
    hd_stream_fail(s, HD_EPEER, why ? why : "communication has ended");
}

static bool is_over(const hd_messages *m, hd_stream *s) {
    if (!m->link.ended(m->link.ctx)) return false;
    fail(m, s);
    return true;
}

/* Ends communication: a member does not what this rank does. */
static void disagree(const hd_messages *m, hd_stream *s, const hd_received *r) {
    char why[160];
    snprintf(why, sizeof why,
             "rank %d sent rank %d another shape than it expects: %d, %d, %d, %d", r->head.from,
             m->comm.rank, r->head.shape[0], r->head.shape[1], r->head.shape[2],
             r->head.shape[3]);
    abort_all((void *)(uintptr_t)m, why);
    fail(m, s);
}

/* Returns at least n bytes, or NULL after ending communication. */
static void *room_in(const hd_messages *m, buffer *b, size_t n) {
    if (n <= b->room && b->data) return b->data;
    free(b->data);
    b->room = n + n / 2 + 64;
    b->data = malloc(b->room);
    if (b->data) return b->data;
    b->room = 0;
    abort_all((void *)(uintptr_t)m, "a rank has no memory for its messages");
    return NULL;
}

/* Where a message is packed: memory of the link, or else this buffer. */
static void *pack_in(const hd_messages *m, hd_group g, hd_message_lane lane, uint64_t ticket,
                     buffer *otherwise, size_t n) {
    void *room = m->link.room(m->link.ctx, g, lane, ticket, n);
    return room ? room : room_in(m, otherwise, n);
}

/* How n bytes are copied to where they are sent from. */
typedef void copy_fn(void *to, const void *from, size_t n);

static void copy_plain(void *to, const void *from, size_t n) {
    if (n) memcpy(to, from, n);
}

static void copy_streamed(void *to, const void *from, size_t n) {
    comm_stream(to, from, n);
}

static copy_fn *copy_for(const hd_messages *m, size_t n) {
    return m->link.streams && m->link.streams(m->link.ctx, n) ? copy_streamed : copy_plain;
}

/* Copies what several members get to where it is sent from, if the link has such memory. */
static const void *put(const hd_messages *m, hd_group g, hd_message_lane lane, uint64_t ticket,
                       const void *data, size_t n) {
    if (n == 0 || !data) return data;
    void *room = m->link.room(m->link.ctx, g, lane, ticket, n);
    if (!room) return data;
    copy_for(m, n)(room, data, n);
    return room;
}

typedef struct shape {
    int32_t at[4];
} shape;

static void send_to(const hd_messages *m, hd_group g, hd_message_lane lane, uint64_t ticket,
                    int32_t member, shape says, const void *data, size_t n, int32_t set) {
    hd_message head = {.group = (uint8_t)g,
                       .lane = (uint8_t)lane,
                       .from = m->comm.rank,
                       .ticket = ticket,
                       .n = n};
    memcpy(head.shape, says.at, sizeof head.shape);
    m->link.send(m->link.ctx, rank_at(group_of(m, g), member), &head, data, set);
}

/* Waits for a member's message. NULL: communication has ended. */
static hd_received *wait_for(const hd_messages *m, hd_group g, hd_message_lane lane,
                             int32_t member, uint64_t ticket) {
    const int64_t since_ns = hd_now_ns();
    hd_received *r =
        m->link.wait(m->link.ctx, rank_at(group_of(m, g), member), g, lane, ticket);
    comm_count_wait(m->comm.figures, hd_now_ns() - since_ns);
    if (r) comm_count_bytes(m->comm.figures, (int64_t)r->head.n);
    return r;
}

/* ---- collectives ---- */

/* An exchange: every member sends to every other one. */
typedef struct exchange {
    hd_messages *m;
    hd_stream *s;
    hd_group g;
    uint64_t ticket;
    hd_received *from[HD_MESSAGE_MAX_RANKS]; /* by member; NULL for this rank */
} exchange;

static exchange begin(hd_messages *m, hd_stream *s, hd_group g) {
    return (exchange){.m = m, .s = s, .g = g, .ticket = m->begun[g]++};
}

static const float *put_part(const exchange *e, const float *x, int64_t n) {
    return put(e->m, e->g, HD_MESSAGE_COLLECTIVE, e->ticket, x, (size_t)n * sizeof *x);
}

static void say(const exchange *e, int32_t member, shape says, const float *data, int64_t n) {
    send_to(e->m, e->g, HD_MESSAGE_COLLECTIVE, e->ticket, member, says, data,
            (size_t)n * sizeof *data, 0);
}

static void end(exchange *e) {
    for (int32_t k = 0; k < group_of(e->m, e->g)->n; k++) {
        if (e->from[k]) e->m->link.release(e->m->link.ctx, e->from[k]);
        e->from[k] = NULL;
    }
}

/* Waits for all members, and until what was sent may change. */
static bool hear(exchange *e) {
    const hd_link *l = &e->m->link;
    const hd_rank_group *g = group_of(e->m, e->g);
    bool ok = true;
    for (int32_t k = 0; k < g->n && ok; k++) {
        if (k == g->index) continue;
        e->from[k] = wait_for(e->m, e->g, HD_MESSAGE_COLLECTIVE, k, e->ticket);
        ok = e->from[k] != NULL;
    }
    ok = ok && l->flush(l->ctx, 0);
    if (ok) return true;
    end(e);
    fail(e->m, e->s);
    return false;
}

/* Compares what a member says; false: communication has ended. */
static bool agrees(exchange *e, int32_t k, int32_t at0, int32_t at1, int64_t n) {
    const hd_message *head = &e->from[k]->head;
    if (head->shape[0] == at0 && head->shape[1] == at1 &&
        head->n == (uint64_t)n * sizeof(float)) {
        return true;
    }
    disagree(e->m, e->s, e->from[k]);
    end(e);
    return false;
}

/* x[first .. first + n - 1] = the sum of it and what the members sent. */
static void add_up(const exchange *e, float *x, int64_t first, int64_t n) {
    const hd_rank_group *g = group_of(e->m, e->g);
    const float *terms[HD_MESSAGE_MAX_RANKS] = {0};
    float sum[HD_TREE_SUM_BLOCK];
    for (int32_t k = 0; k < g->n; k++) {
        terms[k] = k == g->index ? x + first : (const float *)e->from[k]->data;
    }
    for (int64_t i = 0; i < n; i += HD_TREE_SUM_BLOCK) {
        const int32_t block = (int32_t)hd_min_i64(HD_TREE_SUM_BLOCK, n - i);
        hd_tree_sum(sum, terms, g->n, i, block);
        memcpy(x + first + i, sum, (size_t)block * sizeof *sum);
    }
}

typedef struct span {
    int64_t first, n;
} span;

static span part_of(int64_t n, int32_t k, int32_t members) {
    const int64_t first = n * k / members;
    return (span){first, n * (k + 1) / members - first};
}

/* The first round of a sum: own parts. Parts of the others are parts[]; those of equal ones are sent once. */
static bool sum_parts(hd_messages *m, hd_stream *s, hd_group group, float *x, int64_t n,
                      const span *parts) {
    const hd_rank_group *g = group_of(m, group);
    const span own = parts[g->index];
    exchange e = begin(m, s, group);
    const float *from = NULL;
    span last = {0, 0};
    for (int32_t k = 0; k < g->n; k++) {
        const span p = parts[k];
        if (k == g->index) continue;
        if (!from || p.first != last.first || p.n != last.n)
            from = put_part(&e, x + p.first, p.n);
        last = p;
        say(&e, k,
            (shape){
                {(int32_t)n, (int32_t)p.first, 0, 0}
        },
            from, p.n);
    }
    if (!hear(&e)) return false;
    for (int32_t k = 0; k < g->n; k++) {
        if (k != g->index && !agrees(&e, k, (int32_t)n, (int32_t)own.first, own.n))
            return false;
    }
    add_up(&e, x, own.first, own.n);
    end(&e);
    return true;
}

static void gather_parts(hd_messages *m, hd_stream *s, hd_group group, float *x, int64_t n,
                         const span *parts) {
    const hd_rank_group *g = group_of(m, group);
    const span own = parts[g->index];
    exchange e = begin(m, s, group);
    const float *from = put_part(&e, x + own.first, own.n);
    for (int32_t k = 0; k < g->n; k++) {
        if (k != g->index)
            say(&e, k,
                (shape){
                    {(int32_t)n, (int32_t)own.first, 0, 0}
            },
                from, own.n);
    }
    if (!hear(&e)) return;
    for (int32_t k = 0; k < g->n; k++) {
        if (k == g->index) continue;
        if (!agrees(&e, k, (int32_t)n, (int32_t)parts[k].first, parts[k].n)) return;
        if (parts[k].n)
            memcpy(x + parts[k].first, e.from[k]->data, (size_t)parts[k].n * sizeof *x);
    }
    end(&e);
}

static void all_reduce(void *ctx, hd_stream *s, const hd_all_reduce_args *a) {
    hd_messages *m = ctx;
    const hd_rank_group *g = group_of(m, a->group);
    float *x = floats(a->x);
    span parts[HD_MESSAGE_MAX_RANKS] = {0};
    if (is_over(m, s) || g->n == 1) return;
    if (a->n > ONE_SHOT && g->n > 2) {
        for (int32_t k = 0; k < g->n; k++) parts[k] = part_of(a->n, k, g->n);
        if (sum_parts(m, s, a->group, x, a->n, parts)) {
            gather_parts(m, s, a->group, x, a->n, parts);
        }
        return;
    }
    for (int32_t k = 0; k < g->n; k++) parts[k] = (span){0, a->n};
    sum_parts(m, s, a->group, x, a->n, parts);
}

/* Members say first which part they want. */
static void reduce_scatter(void *ctx, hd_stream *s, const hd_reduce_scatter_args *a) {
    hd_messages *m = ctx;
    const hd_rank_group *g = group_of(m, a->group);
    span parts[HD_MESSAGE_MAX_RANKS] = {0};
    if (is_over(m, s) || g->n == 1) return;
    exchange e = begin(m, s, a->group);
    const shape says = {
        {(int32_t)a->n, (int32_t)a->first, (int32_t)a->own, 0}
    };
    for (int32_t k = 0; k < g->n; k++) {
        parts[k] = (span){a->first, a->own};
        if (k != g->index) say(&e, k, says, NULL, 0);
    }
    if (!hear(&e)) return;
    for (int32_t k = 0; k < g->n; k++) {
        if (k == g->index) continue;
        const int32_t *told = e.from[k]->head.shape;
        if (told[1] < 0 || told[2] < 0 || (int64_t)told[1] + told[2] > a->n) told = says.at;
        parts[k] = (span){told[1], told[2]};
        if (told == says.at || !agrees(&e, k, (int32_t)a->n, told[1], 0)) {
            if (e.from[k]) disagree(m, s, e.from[k]);
            end(&e);
            return;
        }
    }
    end(&e);
    sum_parts(m, s, a->group, floats(a->x), a->n, parts);
}

/* Columns of a row-major matrix, packed one row after the other. */
static void copy_columns(copy_fn *copy, float *to, int64_t to_stride, const float *from,
                         int64_t from_stride, int32_t rows, int32_t n) {
    if (!n) return; /* a rank without columns may have no memory */
    for (int32_t i = 0; i < rows; i++) {
        copy(to + i * to_stride, from + i * from_stride, (size_t)n * sizeof *to);
    }
}

/* The columns of another member, which its message has. */
static void take_columns(const hd_messages *m, const hd_all_gather_args *a,
                         const hd_received *r, int32_t first, int32_t n) {
    const int64_t since_ns = hd_now_ns();
    copy_columns(copy_plain, a->x + first, a->cols, r->data, n, a->rows, n);
    if (m->link.was_read) m->link.was_read(m->link.ctx, r->head.n, hd_now_ns() - since_ns);
}

static void all_gather(void *ctx, hd_stream *s, const hd_all_gather_args *a) {
    hd_messages *m = ctx;
    const hd_rank_group *g = group_of(m, a->group);
    if (is_over(m, s) || g->n == 1) return;
    const int64_t n = (int64_t)a->rows * a->own;
    const float *own = a->x + a->first;
    exchange e = begin(m, s, a->group);
    if (a->rows > 1) {
        float *packed = pack_in(m, a->group, HD_MESSAGE_COLLECTIVE, e.ticket, &m->packed,
                                (size_t)n * sizeof *packed);
        if (!packed) {
            fail(m, s);
            return;
        }
        copy_columns(copy_for(m, (size_t)n * sizeof *packed), packed, a->own, own, a->cols,
                     a->rows, a->own);
        own = packed;
    } else {
        own = put_part(&e, own, n);
    }
    for (int32_t k = 0; k < g->n; k++) {
        if (k != g->index)
            say(&e, k,
                (shape){
                    {a->rows, a->cols, a->first, a->own}
            },
                own, n);
    }
    if (!hear(&e)) return;
    for (int32_t k = 0; k < g->n; k++) {
        if (k == g->index) continue;
        const int32_t first = e.from[k]->head.shape[2], cols = e.from[k]->head.shape[3];
        if (first < 0 || cols < 0 || first > a->cols - cols) {
            disagree(m, s, e.from[k]);
            end(&e);
            return;
        }
        if (!agrees(&e, k, a->rows, a->cols, (int64_t)a->rows * cols)) return;
        take_columns(m, a, e.from[k], first, cols);
    }
    end(&e);
}

/* The first member need not wait for the others, but must not be further ahead of any than the
 * messages that may travel at once: each answers. */
static bool await_answers(const hd_messages *m, hd_group g, uint64_t ticket) {
    const hd_link *l = &m->link;
    for (int32_t k = 1; k < group_of(m, g)->n; k++) {
        hd_received *r = wait_for(m, g, HD_MESSAGE_BROADCAST, k, ticket);
        if (!r) return false;
        l->release(l->ctx, r);
    }
    return true;
}

static bool send_broadcast(const hd_messages *m, const hd_broadcast_args *a, uint64_t ticket,
                           shape says) {
    if (ticket >= HD_COMM_MAX_INFLIGHT &&
        !await_answers(m, a->group, ticket - HD_COMM_MAX_INFLIGHT)) {
        return false;
    }
    const void *data = put(m, a->group, HD_MESSAGE_BROADCAST, ticket, a->data, a->bytes);
    for (int32_t k = 1; k < group_of(m, a->group)->n; k++) {
        send_to(m, a->group, HD_MESSAGE_BROADCAST, ticket, k, says, data, a->bytes, 0);
    }
    return m->link.flush(m->link.ctx, 0);
}

static void broadcast(void *ctx, hd_stream *s, const hd_broadcast_args *a) {
    hd_messages *m = ctx;
    const hd_link *l = &m->link;
    const hd_rank_group *g = group_of(m, a->group);
    const shape says = {{0}};
    if (is_over(m, s) || g->n == 1) return;
    const uint64_t ticket = m->broadcast[a->group]++;
    if (g->index == 0) {
        if (!send_broadcast(m, a, ticket, says)) fail(m, s);
        return;
    }
    hd_received *r = wait_for(m, a->group, HD_MESSAGE_BROADCAST, 0, ticket);
    if (!r) {
        fail(m, s);
        return;
    }
    const bool fits = r->head.n == a->bytes;
    if (fits && a->bytes) memcpy(a->data, r->data, a->bytes);
    if (!fits) disagree(m, s, r);
    l->release(l->ctx, r);
    if (fits) send_to(m, a->group, HD_MESSAGE_BROADCAST, ticket, 0, says, NULL, 0, 0);
}

/* ---- dispatch and combine ---- */

/* Bytes of a row that travels. */
static size_t row_bytes(const hd_dispatch_args *a) {
    return a->format.code ? hd_packed_row_bytes(a->format, a->cols)
                          : (size_t)a->cols * sizeof(float);
}

/* A dispatch message: int32 [n_slots] counts; of each choice its weight and int32 which row it is of; then the
 * rows, each once however many experts of the receiver it chose. */
static size_t dispatch_bytes(const hd_dispatch_args *a, int64_t choices, int64_t rows) {
    return ((size_t)a->n_slots + 2 * (size_t)choices) * sizeof(float) +
           (size_t)rows * row_bytes(a);
}

/* Writes for each choice of a part which row of its message it is of, if rows_of is not NULL, and the rows in
 * their order, if rows is not NULL. Returns how many rows there are. */
static int32_t list_rows(int32_t *rows_of, uint8_t *rows, int32_t *places,
                         const hd_dispatch_args *a, comm_places p) {
    const size_t bytes = row_bytes(a);
    int32_t n = 0;
    for (int32_t i = p.first; i < p.end; i++) places[a->assignment[i] / a->top_k] = -1;
    for (int32_t i = p.first; i < p.end; i++) {
        const int32_t row = a->assignment[i] / a->top_k;
        if (places[row] < 0) {
            if (rows)
                memcpy(rows + (size_t)n * bytes,
                       (const uint8_t *)a->x.data + (size_t)row * bytes, bytes);
            places[row] = n++;
        }
        if (rows_of) rows_of[i - p.first] = places[row];
    }
    return n;
}

/* Those of this round that member `from`, this rank, sends to member k. */
static void pack_rows(void *to, int32_t *places, const hd_dispatch_args *a, int32_t from,
                      int32_t k) {
    int32_t *counts = to;
    const comm_places p = comm_places_of(a, from, k);
    const int32_t n = p.end - p.first;
    float *weight = (float *)to + a->n_slots;
    int32_t *rows_of = counts + a->n_slots + n;
    for (int32_t e = 0; e < a->n_slots; e++) {
        const comm_places at = comm_places_at(a, from, k * a->n_slots + e);
        counts[e] = at.end - at.first;
    }
    for (int32_t i = 0; i < n; i++) weight[i] = a->weight[a->assignment[p.first + i]];
    list_rows(rows_of, (uint8_t *)(rows_of + n), places, a, p);
}

static void dispatch_send(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    hd_messages *m = ctx;
    const hd_rank_group *g = group_of(m, HD_GROUP_EP);
    const uint64_t ticket = m->sent++;
    const int32_t at = (int32_t)(ticket % HD_COMM_MAX_INFLIGHT);
    inflight *f = &m->inflight[at];
    assert(ticket < m->combined + HD_COMM_MAX_INFLIGHT);
    if (is_over(m, s)) return;
    f->args = *a;
    const int32_t rounds = comm_rounds_of(a, g->index, g->n);
    int32_t *places = room_in(m, &m->row_places, (size_t)a->rows * sizeof *places);
    if (!places) {
        fail(m, s);
        return;
    }
    for (int32_t k = 0; k < g->n; k++) {
        const comm_places p = comm_places_of(a, g->index, k);
        const int32_t choices = p.end - p.first;
        const size_t n = dispatch_bytes(a, choices, list_rows(NULL, NULL, places, a, p));
        void *packed =
            k == g->index ? room_in(m, &f->out[k], n)
                          : pack_in(m, HD_GROUP_EP, HD_MESSAGE_DISPATCH, ticket, &f->out[k], n);
        if (!packed) {
            fail(m, s);
            return;
        }
        pack_rows(packed, places, a, g->index, k);
        if (k == g->index) {
            f->own_bytes = n;
            continue;
        }
        send_to(m, HD_GROUP_EP, HD_MESSAGE_DISPATCH, ticket, k,
                (shape){
                    {a->n_slots, a->cols, choices, rounds}
        },
                packed, n, 1 + at);
    }
}

/* What a member sent in a dispatch. */
typedef struct packet {
    hd_received *received; /* NULL: this rank itself */
    const int32_t *counts, *rows_of;
    const float *weight;
    const uint8_t *rows;
} packet;

/* Reads a packet of n bytes after checking that its counts and rows are those of its bytes. */
static bool open_packet(packet *p, const void *data, uint64_t n, const hd_dispatch_args *a,
                        int32_t choices) {
    const uint64_t fixed = dispatch_bytes(a, choices, 0), each = row_bytes(a);
    int64_t sum = 0;
    if (n < fixed || (n - fixed) % each) return false;
    const uint64_t rows = (n - fixed) / each;
    if (rows > (uint64_t)choices) return false;
    p->counts = data;
    for (int32_t e = 0; e < a->n_slots; e++) {
        if (p->counts[e] < 0) return false;
        sum += p->counts[e];
    }
    if (sum != choices) return false;
    p->weight = (const float *)data + a->n_slots;
    p->rows_of = p->counts + a->n_slots + choices;
    p->rows = (const uint8_t *)(p->rows_of + choices);
    for (int32_t i = 0; i < choices; i++) {
        if (p->rows_of[i] < 0 || (uint64_t)p->rows_of[i] >= rows) return false;
    }
    return true;
}

static bool take_packets(hd_messages *m, hd_stream *s, const hd_dispatch_args *a,
                         uint64_t ticket, packet *packets) {
    const hd_rank_group *g = group_of(m, HD_GROUP_EP);
    inflight *f = &m->inflight[ticket % HD_COMM_MAX_INFLIGHT];
    for (int32_t k = 0; k < g->n; k++) {
        if (k == g->index) {
            const comm_places p = comm_places_of(a, k, k);
            open_packet(&packets[k], f->out[k].data, f->own_bytes, a, p.end - p.first);
            continue;
        }
        hd_received *r = wait_for(m, HD_GROUP_EP, HD_MESSAGE_DISPATCH, k, ticket);
        packets[k].received = r;
        if (!r) {
            fail(m, s);
            return false;
        }
        const int32_t *told = r->head.shape;
        if (told[0] != a->n_slots || told[1] != a->cols || told[2] < 0 || told[3] < 1 ||
            (told[3] > 1 && !a->most) ||
            !open_packet(&packets[k], r->data, r->head.n, a, told[2])) {
            disagree(m, s, r);
            return false;
        }
    }
    return true;
}

/* Places the rows by slot, then by member. */
static void place_rows(const hd_messages *m, const hd_dispatch_args *a, packet *packets) {
    const int32_t members = group_of(m, HD_GROUP_EP)->n;
    for (int32_t e = 0; e < a->n_slots; e++) {
        int32_t to = a->in_offset[e];
        for (int32_t k = 0; k < members; k++) {
            packet *p = &packets[k];
            assert(p->counts && p->weight && p->rows);
            const int32_t n = p->counts[e];
            memcpy(a->in_weight + to, p->weight, (size_t)n * sizeof(float));
            for (int32_t i = 0; i < n; i++, to++) {
                const uint8_t *row = p->rows + (size_t)p->rows_of[i] * row_bytes(a);
                float *x = floats(a->in_x) + (int64_t)to * a->cols;
                if (a->format.code)
                    hd_unpack_row(x, row, a->format, a->cols);
                else
                    memcpy(x, row, row_bytes(a));
            }
            p->weight += n;
            p->rows_of += n;
        }
    }
}

/* Counts received rows; false: more than fit, and communication has ended. */
static bool count_rows(hd_messages *m, hd_stream *s, const hd_dispatch_args *a, inflight *f,
                       const packet *packets) {
    const int32_t members = group_of(m, HD_GROUP_EP)->n;
    int32_t *counts =
        room_in(m, &f->counts, (size_t)members * (size_t)a->n_slots * sizeof *counts);
    int64_t n = 0;
    if (!counts) {
        fail(m, s);
        return false;
    }
    for (int32_t k = 0; k < members; k++) {
        assert(packets[k].counts);
        memcpy(counts + (int64_t)k * a->n_slots, packets[k].counts,
               (size_t)a->n_slots * sizeof *counts);
    }
    for (int32_t e = 0; e < a->n_slots; e++) {
        a->in_offset[e] = (int32_t)hd_min_i64(n, INT32_MAX);
        for (int32_t k = 0; k < members; k++) n += packets[k].counts[e];
    }
    a->in_offset[a->n_slots] = (int32_t)hd_min_i64(n, INT32_MAX);
    if (n <= a->in_rows) return true;
    char why[160];
    snprintf(why, sizeof why, "rank %d receives %lld rows for its experts, at most %d fit",
             m->comm.rank, (long long)n, a->in_rows);
    abort_all(m, why);
    memset(a->in_offset, 0, ((size_t)a->n_slots + 1) * sizeof *a->in_offset);
    fail(m, s);
    return false;
}

/* Each member has said how many rounds its rows need. */
static void count_rounds(const hd_messages *m, const hd_dispatch_args *a,
                         const packet *packets) {
    const hd_rank_group *g = group_of(m, HD_GROUP_EP);
    if (!a->rounds) return;
    *a->rounds = comm_rounds_of(a, g->index, g->n);
    for (int32_t k = 0; k < g->n; k++) {
        const hd_received *r = packets[k].received;
        if (r) *a->rounds = hd_max_i32(*a->rounds, r->head.shape[3]);
    }
}

static void dispatch_arrive(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    hd_messages *m = ctx;
    const uint64_t ticket = m->dispatched++;
    packet packets[HD_MESSAGE_MAX_RANKS] = {{0}};
    inflight *f = &m->inflight[ticket % HD_COMM_MAX_INFLIGHT];
    if (is_over(m, s)) return;
    if (take_packets(m, s, a, ticket, packets) && count_rows(m, s, a, f, packets)) {
        place_rows(m, a, packets);
        count_rounds(m, a, packets);
    }
    for (int32_t k = 0; k < group_of(m, HD_GROUP_EP)->n; k++) {
        if (packets[k].received) m->link.release(m->link.ctx, packets[k].received);
    }
}

/* The results of member k's rows, slot by slot: the order in which it sent them. */
static int64_t pack_results(float *to, const hd_messages *m, const inflight *f,
                            const hd_combine_args *a, int32_t k) {
    const int32_t n_slots = f->args.n_slots;
    const int32_t *counts = f->counts.data;
    int64_t packed = 0;
    (void)m;
    for (int32_t e = 0; e < n_slots; e++) {
        int64_t from = f->args.in_offset[e];
        for (int32_t other = 0; other < k; other++) from += counts[other * n_slots + e];
        const int32_t n = counts[k * n_slots + e];
        if (to)
            memcpy(to + packed * a->cols, floats(a->in_y) + from * a->cols,
                   (size_t)n * (size_t)a->cols * sizeof *to);
        packed += n;
    }
    return packed;
}

static void combine_send(void *ctx, hd_stream *s, const hd_combine_args *a) {
    hd_messages *m = ctx;
    const hd_rank_group *g = group_of(m, HD_GROUP_EP);
    const uint64_t ticket = m->returned++;
    const int32_t at = (int32_t)(ticket % HD_COMM_MAX_INFLIGHT);
    inflight *f = &m->inflight[at];
    if (is_over(m, s)) return;
    for (int32_t k = 0; k < g->n; k++) {
        const int64_t rows = pack_results(NULL, m, f, a, k);
        const size_t n = (size_t)rows * (size_t)a->cols * sizeof(float);
        float *packed =
            k == g->index ? room_in(m, &f->back[k], n)
                          : pack_in(m, HD_GROUP_EP, HD_MESSAGE_COMBINE, ticket, &f->back[k], n);
        if (!packed) {
            fail(m, s);
            return;
        }
        pack_results(packed, m, f, a, k);
        if (k == g->index) continue;
        send_to(m, HD_GROUP_EP, HD_MESSAGE_COMBINE, ticket, k,
                (shape){
                    {a->cols, (int32_t)rows, 0, 0}
        },
                packed, n, 1 + HD_COMM_MAX_INFLIGHT + at);
    }
}

/* Places sent to a member's slots lie together, in the order in which it sends results. */
static void combine_arrive(void *ctx, hd_stream *s, const hd_combine_args *a) {
    hd_messages *m = ctx;
    const hd_link *l = &m->link;
    const hd_rank_group *g = group_of(m, HD_GROUP_EP);
    const uint64_t ticket = m->combined++;
    const int32_t at = (int32_t)(ticket % HD_COMM_MAX_INFLIGHT);
    const inflight *f = &m->inflight[at];
    if (is_over(m, s)) return;
    for (int32_t k = 0; k < g->n; k++) {
        const comm_places p = comm_places_of(&f->args, g->index, k);
        const size_t n = (size_t)(p.end - p.first) * (size_t)a->cols * sizeof(float);
        float *to = floats(a->y) + (int64_t)p.first * a->cols;
        if (k == g->index) {
            memcpy(to, f->back[k].data, n);
            continue;
        }
        hd_received *r = wait_for(m, HD_GROUP_EP, HD_MESSAGE_COMBINE, k, ticket);
        if (!r) {
            fail(m, s);
            return;
        }
        const bool fits = r->head.shape[0] == a->cols && r->head.n == n;
        if (fits && n) memcpy(to, r->data, n);
        if (!fits) disagree(m, s, r);
        l->release(l->ctx, r);
        if (!fits) return;
    }
    if (!l->flush(l->ctx, 1 + at) || !l->flush(l->ctx, 1 + HD_COMM_MAX_INFLIGHT + at))
        fail(m, s);
}

/* ---- opening ---- */

static const hd_comm_table table = {.all_reduce = all_reduce,
                                    .reduce_scatter = reduce_scatter,
                                    .all_gather = all_gather,
                                    .broadcast = broadcast,
                                    .dispatch_send = dispatch_send,
                                    .dispatch_arrive = dispatch_arrive,
                                    .combine_send = combine_send,
                                    .combine_arrive = combine_arrive,
                                    .abort = abort_all,
                                    .ended = ended};

hd_status hd_messages_open(hd_messages **out, const hd_link *link,
                           const hd_parallel_config *parallel, int32_t rank,
                           comm_figures *figures, hd_err *err) {
    hd_messages *m = calloc(1, sizeof *m);
    *out = m;
    if (!m) return HD_FAIL(err, HD_ENOMEM, "no memory for the messages of rank %d", rank);
    m->link = *link;
    m->comm = hd_comm_of(&table, m, parallel, rank);
    m->comm.figures = figures;
    return HD_OK;
}

const hd_comm *hd_messages_comm(const hd_messages *m) {
    return &m->comm;
}

void hd_messages_close(hd_messages *m) {
    if (!m) return;
    for (int32_t i = 0; i < HD_COMM_MAX_INFLIGHT; i++) {
        for (int32_t k = 0; k < HD_MESSAGE_MAX_RANKS; k++) {
            free(m->inflight[i].out[k].data);
            free(m->inflight[i].back[k].data);
        }
        free(m->inflight[i].counts.data);
    }
    free(m->packed.data);
    free(m->row_places.data);
    free(m);
}
