/* recorder.c - rows of an expert record, counted or copied while a model runs. */
#include "moe/recorder.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

struct hd_recorder {
    hd_record_head head;
    /* [layers] with experts: first those of steps, then of drafts */
    int32_t *with_experts, n_step, n_draft;
    int32_t *first_slot, *copies; /* [layers][experts] */
    int32_t *seen;                /* [experts] */

    /* owned by the thread that adds rows */
    bool on;
    uint64_t pass;
    int64_t *logical;                   /* [layers][experts] of a row of STAT */
    int64_t *physical;                  /* [HD_N_RECORD_PHASES][layers][slots] of this pass */
    int64_t *joined;                    /* [layers][slots] of a part */
    int32_t tokens[HD_N_RECORD_PHASES]; /* of this pass */
    int32_t *choices;                   /* [layers][top_k] of a row */
    uint8_t *row;                       /* a row's bytes */

    pthread_mutex_t lock; /* guards the fields below */
    uint8_t *bytes;       /* a ring */
    size_t first, n, cap, most;
    hd_recorder_state state;
};

static void index_slots(hd_recorder *r, int32_t layer) {
    const hd_record_head *h = &r->head;
    int32_t *first = r->first_slot + (int64_t)layer * h->experts;
    int32_t *copies = r->copies + (int64_t)layer * h->experts;
    memset(copies, 0, (size_t)h->experts * sizeof *copies);
    for (int32_t s = h->slots - 1; s >= 0; s--) {
        const int32_t e = h->slot_expert[(int64_t)layer * h->slots + s];
        if (e < 0) continue;
        first[e] = s;
        copies[e]++;
    }
}

static hd_status find_layers(hd_recorder *r, hd_err *err) {
    const hd_record_head *h = &r->head;
    const size_t n = (size_t)h->layers;
    r->with_experts = calloc(n, sizeof *r->with_experts);
    r->first_slot = calloc(n * (size_t)h->experts, sizeof *r->first_slot);
    r->copies = calloc(n * (size_t)h->experts, sizeof *r->copies);
    r->seen = calloc((size_t)h->experts, sizeof *r->seen);
    if (!r->with_experts || !r->first_slot || !r->copies || !r->seen) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a recorder of %d layers", h->layers);
    }
    for (int32_t l = 0; l < h->layers; l++) {
        index_slots(r, l);
        const bool draft = l >= h->layers - h->n_mtp;
        if (!hd_record_has(h, draft ? HD_RECORD_DRAFT : HD_RECORD_PREFILL, l)) continue;
        r->with_experts[r->n_step + r->n_draft] = l;
        if (draft) {
            r->n_draft++;
        } else {
            r->n_step++;
        }
    }
    return HD_OK;
}

static hd_status open_all(hd_recorder *r, const hd_record_head *head, hd_err *err) {
    const size_t slots = (size_t)head->layers * (size_t)head->slots;
    size_t longest = 0;
    HD_TRY(hd_record_head_check(head, err));
    r->head.slot_expert = malloc(slots * sizeof *head->slot_expert);
    if (!r->head.slot_expert) return HD_FAIL(err, HD_ENOMEM, "no memory for %zu slots", slots);
    memcpy(r->head.slot_expert, head->slot_expert, slots * sizeof *head->slot_expert);
    for (int m = 0; m < HD_N_RECORD_MODES; m++) {
        r->head.mode = (hd_record_mode)m;
        const size_t n = hd_record_row_bytes(&r->head);
        longest = n > longest ? n : longest;
    }
    r->physical = calloc(HD_N_RECORD_PHASES * slots, sizeof *r->physical);
    r->logical = calloc((size_t)head->layers * (size_t)head->experts, sizeof *r->logical);
    r->choices = calloc((size_t)head->layers * (size_t)head->top_k, sizeof *r->choices);
    r->row = calloc(longest + 1, 1);
    r->joined = calloc(slots, sizeof *r->joined);
    if (!r->logical || !r->physical || !r->choices || !r->row || !r->joined) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a recorder of %zu slots", slots);
    }
    return find_layers(r, err);
}

hd_status hd_recorder_open(hd_recorder **out, const hd_record_head *head, size_t most_bytes,
                           hd_err *err) {
    *out = NULL;
    hd_recorder *r = calloc(1, sizeof *r);
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory for a recorder");
    pthread_mutex_init(&r->lock, NULL);
    r->head = *head;
    r->head.slot_expert = NULL;
    r->head.rows = HD_RECORD_OPEN_END;
    r->most = most_bytes;
    r->state.ended = true;
    const hd_status st = open_all(r, head, err);
    if (st == HD_OK) {
        *out = r;
    } else {
        hd_recorder_close(r);
    }
    return st;
}

void hd_recorder_close(hd_recorder *r) {
    if (!r) return;
    pthread_mutex_destroy(&r->lock);
    free(r->head.slot_expert);
    free(r->with_experts);
    free(r->first_slot);
    free(r->copies);
    free(r->seen);
    free(r->joined);
    free(r->logical);
    free(r->physical);
    free(r->choices);
    free(r->row);
    free(r->bytes);
    free(r);
}

/* ---- the ring of bytes; the caller holds the lock ---- */

/* Makes room for n more bytes. */
static bool reserve(hd_recorder *r, size_t n) {
    if (n > r->most - r->n) return false;
    if (r->cap - r->n >= n) return true;
    size_t cap = r->cap ? r->cap : 1 << 16;
    while (cap - r->n < n) cap *= 2;
    uint8_t *bytes = malloc(cap);
    if (!bytes) return false;
    const size_t head = r->n < r->cap - r->first ? r->n : r->cap - r->first;
    if (r->n) {
        memcpy(bytes, r->bytes + r->first, head);
        memcpy(bytes + head, r->bytes, r->n - head);
    }
    free(r->bytes);
    r->bytes = bytes;
    r->first = 0;
    r->cap = cap;
    return true;
}

static bool append(hd_recorder *r, const uint8_t *bytes, size_t n) {
    if (!reserve(r, n)) return false;
    const size_t at = (r->first + r->n) % r->cap;
    const size_t head = n < r->cap - at ? n : r->cap - at;
    memcpy(r->bytes + at, bytes, head);
    memcpy(r->bytes, bytes + head, n - head);
    r->n += n;
    return true;
}

size_t hd_recorder_take(hd_recorder *r, uint64_t begun, uint8_t *out, size_t n) {
    pthread_mutex_lock(&r->lock);
    if (begun != r->state.begun) n = 0;
    if (n > r->n) n = r->n;
    const size_t head = n < r->cap - r->first ? n : r->cap - r->first;
    if (n) {
        memcpy(out, r->bytes + r->first, head);
        memcpy(out + head, r->bytes, n - head);
        r->first = (r->first + n) % r->cap;
        r->n -= n;
    }
    pthread_mutex_unlock(&r->lock);
    return n;
}

hd_recorder_state hd_recorder_read_state(hd_recorder *r) {
    pthread_mutex_lock(&r->lock);
    hd_recorder_state state = r->state;
    state.waiting = r->n;
    pthread_mutex_unlock(&r->lock);
    return state;
}

/* ---- records ---- */

static void clear_pass(hd_recorder *r) {
    const size_t slots = (size_t)r->head.layers * (size_t)r->head.slots;
    for (int p = 0; p < HD_N_RECORD_PHASES; p++) {
        if (!r->tokens[p]) continue;
        memset(r->physical + (size_t)p * slots, 0, slots * sizeof *r->physical);
        r->tokens[p] = 0;
    }
}

void hd_recorder_set_map(hd_recorder *r, int32_t layer, const int32_t *slot_expert) {
    const int32_t n = r->head.slots;
    memcpy(r->head.slot_expert + (int64_t)layer * n, slot_expert,
           (size_t)n * sizeof *slot_expert);
    index_slots(r, layer);
}

/* Without room for the head there is no record. */
static void begin(hd_recorder *r, hd_record_mode mode, const uint8_t *head, size_t n) {
    r->pass = 0;
    clear_pass(r);
    pthread_mutex_lock(&r->lock);
    r->first = r->n = 0;
    r->state = (hd_recorder_state){.begun = r->state.begun + 1};
    r->on = head && (n == 0 || append(r, head, n));
    r->state.ended = !r->on;
    pthread_mutex_unlock(&r->lock);
    r->head.mode = mode;
}

void hd_recorder_begin(hd_recorder *r, hd_record_mode mode) {
    const size_t n = hd_record_head_bytes(&r->head);
    uint8_t *head = malloc(n);
    r->head.mode = mode;
    if (head) hd_record_head_write(&r->head, head);
    begin(r, mode, head, n);
    free(head);
}

void hd_recorder_begin_part(hd_recorder *r, hd_record_mode mode) {
    const uint8_t none = 0;
    begin(r, mode, &none, 0);
}

static void add(hd_recorder *r, const hd_record_row *row) {
    const size_t n = hd_record_row_bytes(&r->head);
    hd_record_row_write(&r->head, row, r->row);
    pthread_mutex_lock(&r->lock);
    if (append(r, r->row, n)) {
        r->state.rows++;
    } else {
        r->state.dropped++;
    }
    pthread_mutex_unlock(&r->lock);
}

static int32_t slot_of(const hd_recorder *r, int32_t layer, int32_t choice) {
    const hd_record_head *h = &r->head;
    const int32_t expert = choice % h->experts, slot = choice / h->experts - 1;
    const int32_t *map = h->slot_expert + (int64_t)layer * h->slots;
    if (slot >= 0 && slot < h->slots && map[slot] == expert) return slot;
    return r->first_slot[(int64_t)layer * h->experts + expert];
}

void hd_recorder_row(hd_recorder *r, hd_record_phase phase, int32_t token, int32_t position,
                     const int32_t *choices, int64_t stride) {
    const hd_record_head *h = &r->head;
    const bool draft = phase == HD_RECORD_DRAFT;
    const int32_t *layers = r->with_experts + (draft ? r->n_step : 0);
    const int32_t n = draft ? r->n_draft : r->n_step;
    if (!r->on || h->mode == HD_RECORD_STAT) return;
    if (h->mode == HD_RECORD_PER_TOKEN) {
        memset(r->choices, 0, (size_t)h->layers * (size_t)h->top_k * sizeof *r->choices);
        for (int32_t i = 0; i < n; i++) {
            int32_t *to = r->choices + (int64_t)layers[i] * h->top_k;
            for (int32_t k = 0; k < h->top_k; k++) to[k] = choices[i * stride + k] % h->experts;
        }
        add(r, &(hd_record_row){.pass = r->pass,
                                .tokens = 1,
                                .phase = phase,
                                .token = token,
                                .position = position,
                                .choices = r->choices});
        return;
    }
    int64_t *physical = r->physical + (int64_t)phase * h->layers * h->slots;
    r->tokens[phase]++;
    for (int32_t i = 0; i < n; i++) {
        int64_t *of_layer = physical + (int64_t)layers[i] * h->slots;
        for (int32_t k = 0; k < h->top_k; k++) {
            of_layer[slot_of(r, layers[i], choices[i * stride + k])]++;
        }
    }
}

void hd_recorder_end_pass(hd_recorder *r) {
    const int64_t slots = (int64_t)r->head.layers * r->head.slots;
    for (int p = 0; r->on && r->head.mode == HD_RECORD_PER_PASS && p < HD_N_RECORD_PHASES;
         p++) {
        if (!r->tokens[p]) continue;
        add(r, &(hd_record_row){.pass = r->pass,
                                .tokens = r->tokens[p],
                                .phase = (hd_record_phase)p,
                                .physical = r->physical + p * slots});
    }
    clear_pass(r);
    r->pass++;
}

/* The rows of each expert of a layer, in equal parts on its slots. */
static void spread(hd_recorder *r, int32_t layer) {
    const hd_record_head *h = &r->head;
    const int64_t at = (int64_t)layer * h->experts, first = (int64_t)layer * h->slots;
    memset(r->seen, 0, (size_t)h->experts * sizeof *r->seen);
    for (int32_t s = 0; s < h->slots; s++) {
        const int32_t e = h->slot_expert[first + s];
        if (e < 0) continue;
        const int64_t n = r->logical[at + e], copies = r->copies[at + e];
        r->physical[first + s] = n / copies + (r->seen[e]++ < n % copies);
    }
}

/* Adds the counts [layers][experts] of a phase, whose layers begin at `first`. */
static void add_stat(hd_recorder *r, hd_record_phase phase, const int64_t *counts,
                     int32_t first, int32_t layers, uint64_t passes) {
    const hd_record_head *h = &r->head;
    const size_t logical = (size_t)h->layers * (size_t)h->experts;
    const size_t slots = (size_t)h->layers * (size_t)h->slots;
    int64_t most = 0;
    memset(r->logical, 0, logical * sizeof *r->logical);
    memset(r->physical, 0, slots * sizeof *r->physical);
    for (int32_t l = 0; l < layers; l++) {
        const int64_t at = (int64_t)(first + l) * h->experts;
        int64_t sum = 0;
        for (int32_t e = 0; e < h->experts; e++) {
            r->logical[at + e] = counts[(int64_t)l * h->experts + e];
            sum += r->logical[at + e];
        }
        spread(r, first + l);
        most = sum > most ? sum : most; /* a layer without experts has none */
    }
    const int64_t tokens = most / h->top_k;
    if (!tokens) return;
    add(r, &(hd_record_row){.pass = passes,
                            .tokens = tokens < INT32_MAX ? (int32_t)tokens : INT32_MAX,
                            .phase = phase,
                            .logical = r->logical,
                            .physical = r->physical});
}

void hd_recorder_stat(hd_recorder *r, const int64_t *counts, uint64_t passes) {
    const hd_record_head *h = &r->head;
    const int32_t n = h->layers - h->n_mtp;
    if (!r->on || h->mode != HD_RECORD_STAT) return;
    for (int p = 0; p < HD_RECORD_DRAFT; p++) {
        add_stat(r, (hd_record_phase)p, counts, 0, n, passes);
        counts += (int64_t)n * h->experts;
    }
    add_stat(r, HD_RECORD_DRAFT, counts, n, h->n_mtp, passes);
    memset(r->physical, 0, (size_t)h->layers * (size_t)h->slots * sizeof *r->physical);
}

void hd_recorder_end(hd_recorder *r) {
    r->on = false;
    pthread_mutex_lock(&r->lock);
    r->state.ended = true;
    pthread_mutex_unlock(&r->lock);
}

/* ---- parts ---- */

/* Adds counts of a part, [layers][slots]. */
static void add_counts(hd_recorder *r, const hd_record_row *row) {
    const hd_record_head *h = &r->head;
    int64_t *physical = r->physical + (int64_t)row->phase * h->layers * h->slots;
    r->tokens[row->phase] += row->tokens;
    for (int64_t i = 0; i < (int64_t)h->layers * h->slots; i++) physical[i] += row->physical[i];
}

hd_status hd_recorder_join(hd_recorder *r, const uint8_t *rows, size_t n, hd_err *err) {
    const hd_record_head *h = &r->head;
    hd_record_row row = {.physical = r->joined, .choices = r->choices};
    const size_t each = hd_record_row_bytes(h);
    if (h->mode == HD_RECORD_STAT || n % each) {
        return HD_FAIL(err, HD_EPEER, "%zu bytes of an expert record of %zu a row", n, each);
    }
    for (size_t at = 0; at < n && r->on; at += each) {
        const char *fault = hd_record_row_read(h, rows + at, &row);
        if (fault) return HD_FAIL(err, HD_EPEER, "a row of an expert record %s", fault);
        if (h->mode == HD_RECORD_PER_PASS) {
            add_counts(r, &row);
            continue;
        }
        row.pass = r->pass;
        add(r, &row);
    }
    return HD_OK;
}
