/* fetch_ref.c - moe_fetch in plain C: which experts a round has, whose rows the host computes, the slots of
 * the others that are missing, and their copies; moe_round and moe_join. */
#include <sched.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "ops/fetch/fetch_internal.h"

static const int64_t MAX_WAIT_NS = HD_HOST_MAX_SECONDS * INT64_C(1000000000);

static int32_t rows_of(const hd_moe_fetch_args *a, int32_t expert) {
    return a->offset ? a->offset[expert + 1] - a->offset[expert] : 1;
}

static bool has_rows(const hd_moe_fetch_args *a, int32_t expert) {
    return rows_of(a, expert) > 0;
}

static bool is_missing(const hd_moe_fetch_args *a, int32_t expert) {
    return has_rows(a, expert) && a->slots.slot[expert] < 0;
}

static int32_t n_empty(const hd_expert_slots *s) {
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_slots; i++) n += s->holder[i] < 0;
    return n;
}

/* Returns where the round ends that begins with expert `first`. */
static int32_t end_of_round(const hd_moe_fetch_args *a, int32_t first) {
    const int32_t most_missing = a->most + (a->set ? n_empty(&a->slots) : 0);
    const int32_t most_selected = a->set ? a->n_experts : a->slots.n_slots;
    int32_t e = first;
    for (int32_t selected = 0, missing = 0; e < a->n_experts; e++) {
        if (!has_rows(a, e)) continue;
        missing += is_missing(a, e);
        if (++selected > most_selected || missing > most_missing) break;
    }
    return e;
}

/* ---- rows that the host computes ---- */

/* Whether the host takes expert x before expert y; both are missing. */
static bool is_sent_first(const hd_moe_fetch_args *a, int64_t now, int32_t x, int32_t y) {
    const int32_t x_rows = rows_of(a, x), y_rows = rows_of(a, y);
    return x_rows != y_rows ? x_rows < y_rows
                            : (x + now) % a->n_experts < (y + now) % a->n_experts;
}

/* Lists the missing experts of the round in that order, and where the rows of each begin; returns how many
 * there are. */
static int32_t list_missing(const hd_moe_fetch_args *a, int32_t first, int32_t end,
                            int64_t now) {
    hd_host_desk *d = a->host.desk;
    int32_t n = 0;
    for (int32_t e = first; e < end; e++) {
        if (!is_missing(a, e)) continue;
        int32_t at = n++;
        for (; at > 0 && is_sent_first(a, now, e, d->expert[at - 1]); at--) {
            d->expert[at] = d->expert[at - 1];
        }
        d->expert[at] = e;
    }
    d->first[0] = 0;
    for (int32_t i = 0; i < n; i++) d->first[i + 1] = d->first[i] + rows_of(a, d->expert[i]);
    return n;
}

/* Of n missing experts, how many the host takes; and what the round takes then. */
static int32_t count_sent(const hd_moe_fetch_args *a, int32_t n, int64_t now,
                          int64_t *predicted) {
    const hd_host_rows *h = &a->host;
    const bool known = h->mail->expert_ns > 0 && h->desk->fetch_ns > 0;
    int32_t best = 0;
    *predicted = n * h->desk->fetch_ns;
    for (int32_t k = 1; k <= n && h->desk->first[k] <= h->most; k++) {
        const int64_t host = k * h->mail->expert_ns + h->desk->first[k] * h->mail->row_ns;
        const int64_t longer = hd_max_i64(host, (n - k) * h->desk->fetch_ns);
        if (!h->always && (!known || now % HD_HOST_PAUSE == 0 || longer >= *predicted))
            continue;
        *predicted = longer;
        best = k;
    }
    return best;
}

static void write_rows(const hd_moe_fetch_args *a) {
    const hd_host_rows *h = &a->host;
    const size_t bytes = (size_t)h->cols * sizeof(float);
    for (int32_t i = 0; i < h->desk->n; i++) {
        const int32_t place = a->offset[h->desk->expert[i]] - h->desk->first[i];
        for (int32_t r = h->desk->first[i]; r < h->desk->first[i + 1]; r++) {
            const int32_t assignment = a->assignment[place + r];
            const float *x = a->x.data;
            memcpy(h->x + (int64_t)r * h->cols, x + (int64_t)(assignment / a->top_k) * h->cols,
                   bytes);
            h->weight[r] = a->weight ? a->weight[assignment] : 1.0f;
        }
    }
}

static void ask_host(const hd_moe_fetch_args *a) {
    hd_host_desk *d = a->host.desk;
    hd_host_mail *m = a->host.mail;
    write_rows(a);
    m->layer = a->layer;
    m->n = d->n;
    memcpy(m->expert, d->expert, (size_t)d->n * sizeof *m->expert);
    memcpy(m->first, d->first, ((size_t)d->n + 1) * sizeof *m->first);
    __atomic_store_n(&m->asked, ++d->asked, __ATOMIC_RELEASE);
}

/* Decides what the host computes of the round, and asks for it. */
static void share(const hd_moe_fetch_args *a, int32_t first, int32_t end, int64_t now) {
    hd_host_desk *d = a->host.desk;
    int64_t predicted;
    d->begun_ns = hd_now_ns();
    d->n = count_sent(a, list_missing(a, first, end, now), now, &predicted);
    d->rows = d->first[d->n];
    if (d->n == 0) return;
    a->counts->sent += d->n;
    a->counts->sent_rows += d->rows;
    a->counts->predicted_ns += predicted;
    ask_host(a);
}

static bool is_sent(const hd_moe_fetch_args *a, int32_t expert) {
    const hd_host_desk *d = a->host.desk;
    for (int32_t i = 0; a->host.mail && i < d->n; i++) {
        if (d->expert[i] == expert) return true;
    }
    return false;
}

/* ---- slots ---- */

/* Whether slot x is given away before slot y. */
static bool goes_first(const hd_moe_fetch_args *a, int32_t end, int32_t x, int32_t y) {
    const hd_expert_slots *s = &a->slots;
    const bool x_later = s->holder[x] >= end && has_rows(a, s->holder[x]);
    const bool y_later = s->holder[y] >= end && has_rows(a, s->holder[y]);
    return x_later != y_later ? y_later : s->used[x] < s->used[y];
}

/* Returns the slot that a missing expert takes; -1: with a set, none. */
static int32_t choose_slot(const hd_moe_fetch_args *a, int32_t first, int32_t end) {
    const hd_expert_slots *s = &a->slots;
    int32_t best = -1;
    for (int32_t i = 0; i < s->n_slots; i++) {
        const int32_t e = s->holder[i];
        if (a->set && e < 0) return i;
        if (a->set || (e >= first && e < end && has_rows(a, e))) continue;
        if (best < 0 || goes_first(a, end, i, best)) best = i;
    }
    return best;
}

static int64_t expert_bytes(const hd_expert_layout *l) {
    int64_t bytes = 0;
    for (int32_t m = 0; m < HD_EXPERT_MATRICES; m++)
        bytes += l->data_bytes[m] + l->scale_bytes[m];
    return bytes;
}

/* at: a slot, or place -1 - at of the set */
static uint8_t *memory_at(const hd_moe_fetch_args *a, int32_t at) {
    const int64_t bytes = a->slots.slot_bytes;
    return at >= 0 ? a->slots.memory + at * bytes : a->set + (-1 - at) * bytes;
}

static void set_table(const hd_moe_fetch_args *a, int32_t expert, int32_t at) {
    const hd_expert_layout *l = &a->layout;
    uint8_t *slot = memory_at(a, at);
    for (int32_t m = 0; m < HD_EXPERT_MATRICES; m++) {
        hd_weight *w = &a->table[m * a->n_experts + expert];
        *w = a->from[m * a->n_experts + expert];
        w->data = slot + l->data_at[m];
        if (l->scale_bytes[m]) w->scale = slot + l->scale_at[m];
    }
}

static void queue_copy(const hd_moe_fetch_args *a, int32_t expert, int32_t at) {
    a->counts->fetched++;
    a->counts->fetched_bytes += expert_bytes(&a->layout);
    const int32_t n = ++a->todo[0];
    a->todo[n] = expert;
    a->todo[a->n_experts + n] = at;
}

static void take_slot(const hd_moe_fetch_args *a, int32_t expert, int32_t at) {
    const hd_expert_slots *s = &a->slots;
    if (s->holder[at] >= 0) s->slot[s->holder[at]] = -1;
    s->holder[at] = expert;
    s->slot[expert] = at;
    s->used[at] = *s->clock;
    queue_copy(a, expert, at);
}

static int32_t clamp(int32_t x, int32_t low, int32_t high) {
    return x < low ? low : x > high ? high : x;
}

void hd_moe_round_ref(hd_stream *s, const hd_moe_round_args *a) {
    const int32_t low = a->offset[a->range[0]], high = a->offset[a->range[1]];
    (void)s;
    for (int32_t e = 0; e <= a->n_experts; e++) {
        a->round_offset[e] = clamp(a->offset[e], low, high);
    }
}

/* An expert of the round with rows. *placed: of the set. */
static void provide(const hd_moe_fetch_args *a, int32_t expert, int32_t first, int32_t end,
                    int32_t *placed) {
    const hd_expert_slots *s = &a->slots;
    int32_t at = s->slot[expert];
    a->counts->used++;
    a->counts->staged += at >= 0;
    if (at >= 0) {
        if (!a->set) s->used[at] = *s->clock;
    } else if (is_sent(a, expert)) {
        at = 0;
    } else if ((at = choose_slot(a, first, end)) >= 0) {
        take_slot(a, expert, at);
    } else {
        queue_copy(a, expert, at = -1 - (*placed)++);
    }
    set_table(a, expert, at);
}

int32_t ops_fetch_plan(const hd_moe_fetch_args *a) {
    const hd_expert_slots *s = &a->slots;
    const int32_t first = a->before ? a->before[1] : 0, end = end_of_round(a, first);
    int32_t placed = 0;
    if (!a->before && !a->set) ++*s->clock;
    a->todo[0] = 0;
    a->range[0] = first;
    a->range[1] = end;
    if (a->host.mail) share(a, first, end, *s->clock);
    for (int32_t e = first; e < end; e++) {
        if (has_rows(a, e)) provide(a, e, first, end, &placed);
    }
    if (a->offset && a->round_offset) {
        hd_moe_round_ref(NULL, &(hd_moe_round_args){.round_offset = a->round_offset,
                                                    .offset = a->offset,
                                                    .range = a->range,
                                                    .n_experts = a->n_experts});
    }
    if (a->seen) *a->seen = *a->counts;
    return a->todo[0];
}

static void copy(uint8_t *slot, int64_t at, const void *from, int64_t bytes) {
    if (bytes > 0) memcpy(slot + at, from, (size_t)bytes);
}

void ops_fetch_matrix(const hd_moe_fetch_args *a, int32_t i) {
    const hd_expert_layout *l = &a->layout;
    const int32_t n = 1 + i / HD_EXPERT_MATRICES, m = i % HD_EXPERT_MATRICES;
    const hd_weight *w = &a->from[m * a->n_experts + a->todo[n]];
    uint8_t *slot = memory_at(a, a->todo[a->n_experts + n]);
    copy(slot, l->data_at[m], w->data, l->data_bytes[m]);
    copy(slot, l->scale_at[m], w->scale, l->scale_bytes[m]);
}

/* An eighth of the new figure, so that one layer does not decide. */
void ops_fetch_timed(const hd_moe_fetch_args *a) {
    hd_host_desk *d = a->host.desk;
    const int32_t n = a->todo[0];
    if (!a->host.mail || n == 0) return;
    const int64_t each = hd_max_i64(1, (hd_now_ns() - d->begun_ns) / n);
    d->fetch_ns = d->fetch_ns ? (7 * d->fetch_ns + each) / 8 : each;
}

void hd_moe_fetch_ref(hd_stream *s, const hd_moe_fetch_args *a) {
    const int32_t n = ops_fetch_plan(a) * HD_EXPERT_MATRICES;
    (void)s;
    for (int32_t i = 0; i < n; i++) ops_fetch_matrix(a, i);
    ops_fetch_timed(a);
}

/* ---- join ---- */

static bool await_host(hd_host_mail *m, uint32_t asked) {
    const int64_t begun = hd_now_ns();
    while (__atomic_load_n(&m->done, __ATOMIC_ACQUIRE) != asked) {
        if (__atomic_load_n(&m->ended, __ATOMIC_RELAXED)) return false;
        if (hd_now_ns() - begun > MAX_WAIT_NS) {
            __atomic_store_n(&m->late, 1, __ATOMIC_RELAXED);
            return false;
        }
        sched_yield();
    }
    return true;
}

void hd_moe_join_ref(hd_stream *s, const hd_moe_join_args *a) {
    const hd_host_rows *h = &a->host;
    const hd_host_desk *d = h->desk;
    (void)s;
    if (d->n == 0 || !await_host(h->mail, d->asked)) return;
    for (int32_t i = 0; i < d->n; i++) {
        const int32_t rows = d->first[i + 1] - d->first[i];
        float *y = a->y.data;
        memcpy(y + (int64_t)a->offset[d->expert[i]] * h->cols,
               h->y + (int64_t)d->first[i] * h->cols,
               (size_t)rows * (size_t)h->cols * sizeof *y);
    }
    a->counts->taken_ns += hd_now_ns() - d->begun_ns;
}
