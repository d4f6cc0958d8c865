/* record.c - the bytes of expert records: heads and rows, written and read. */
#include "moe/record.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "moe/eplb.h"

static const char MAGIC[8] = {'E', 'P', 'L', 'B', 'R', 'E', 'C', '1'};

enum { VERSION = 1, FIXED_BYTES = 56, ROW_HEAD_BYTES = 16, NO_EXPERT = 0xffff };

/* ---- numbers, little-endian ---- */

static uint8_t *put(uint8_t *at, uint64_t v, int n) {
    for (int i = 0; i < n; i++) *at++ = (uint8_t)(v >> 8 * i);
    return at;
}

static const uint8_t *get(const uint8_t *at, uint64_t *v, int n) {
    *v = 0;
    for (int i = 0; i < n; i++) *v |= (uint64_t)*at++ << 8 * i;
    return at;
}

/* ---- sizes ---- */

static size_t n_logical(const hd_record_head *h) {
    return (size_t)h->layers * (size_t)h->experts;
}

static size_t n_physical(const hd_record_head *h) {
    return (size_t)h->layers * (size_t)h->slots;
}

static size_t n_choices(const hd_record_head *h) {
    return (size_t)h->layers * (size_t)h->top_k;
}

size_t hd_record_head_bytes(const hd_record_head *h) {
    return FIXED_BYTES + 2 * n_physical(h);
}

static int choice_bytes(const hd_record_head *h) {
    return h->experts <= 256 ? 1 : 2;
}

size_t hd_record_row_bytes(const hd_record_head *h) {
    switch (h->mode) {
    case HD_RECORD_STAT:
        return ROW_HEAD_BYTES + 8 * (n_logical(h) + n_physical(h));
    case HD_RECORD_PER_PASS:
        return ROW_HEAD_BYTES + 4 * n_physical(h);
    default:
        return ROW_HEAD_BYTES + 8 + (size_t)choice_bytes(h) * n_choices(h);
    }
}

bool hd_record_has(const hd_record_head *h, hd_record_phase phase, int32_t layer) {
    if ((phase == HD_RECORD_DRAFT) != (layer >= h->layers - h->n_mtp)) return false;
    const int32_t *map = h->slot_expert + (int64_t)layer * h->slots;
    for (int32_t s = 0; s < h->slots; s++) {
        if (map[s] >= 0) return true;
    }
    return false;
}

/* ---- writing ---- */

void hd_record_head_write(const hd_record_head *h, uint8_t *out) {
    const int32_t words[] = {VERSION,  (int32_t)h->mode, h->layers, h->experts, h->top_k,
                             h->slots, h->ranks,         h->nodes,  h->n_mtp,   0};
    memcpy(out, MAGIC, sizeof MAGIC);
    out += sizeof MAGIC;
    for (size_t i = 0; i < HD_LEN(words); i++) out = put(out, (uint64_t)words[i], 4);
    out = put(out, h->rows, 8);
    for (size_t i = 0; i < n_physical(h); i++) {
        out = put(out, h->slot_expert[i] < 0 ? NO_EXPERT : (uint64_t)h->slot_expert[i], 2);
    }
}

void hd_record_row_write(const hd_record_head *h, const hd_record_row *row, uint8_t *out) {
    out = put(out, row->pass, 8);
    out = put(out, (uint64_t)row->tokens, 4);
    out = put(out, (uint64_t)row->phase, 4);
    if (h->mode == HD_RECORD_PER_TOKEN) {
        out = put(out, (uint32_t)row->token, 4);
        out = put(out, (uint32_t)row->position, 4);
        for (size_t i = 0; i < n_choices(h); i++) {
            out = put(out, (uint64_t)row->choices[i], choice_bytes(h));
        }
        return;
    }
    const int n = h->mode == HD_RECORD_STAT ? 8 : 4;
    for (size_t i = 0; n == 8 && i < n_logical(h); i++) {
        out = put(out, (uint64_t)row->logical[i], n);
    }
    for (size_t i = 0; i < n_physical(h); i++) out = put(out, (uint64_t)row->physical[i], n);
}

/* ---- the head ---- */

static hd_status check_range(const char *what, int64_t v, int64_t least, int64_t most,
                             hd_err *err) {
    if (v >= least && v <= most) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "an expert record with %lld %s: must be %lld to %lld",
                   (long long)v, what, (long long)least, (long long)most);
}

hd_status hd_record_head_check(const hd_record_head *h, hd_err *err) {
    HD_TRY(check_range("as mode", (int64_t)h->mode, 0, HD_N_RECORD_MODES - 1, err));
    HD_TRY(check_range("layers", h->layers, 1, HD_EPLB_MAX_LAYERS, err));
    HD_TRY(check_range("MTP layers", h->n_mtp, 0, h->layers - 1, err));
    HD_TRY(check_range("experts", h->experts, 1, HD_EPLB_MAX_EXPERTS, err));
    HD_TRY(check_range("experts per token", h->top_k, 1,
                       h->experts < HD_RECORD_MAX_TOP_K ? h->experts : HD_RECORD_MAX_TOP_K,
                       err));
    HD_TRY(check_range("slots", h->slots, h->experts, HD_EPLB_MAX_SLOTS, err));
    HD_TRY(check_range("ranks", h->ranks, 1, HD_EPLB_MAX_RANKS, err));
    return check_range("nodes", h->nodes, 1, h->ranks, err);
}

static hd_status read_fixed(hd_record_reader *r, hd_err *err) {
    uint8_t bytes[FIXED_BYTES];
    uint64_t words[10];
    if (fread(bytes, 1, sizeof bytes, r->in) != sizeof bytes ||
        memcmp(bytes, MAGIC, sizeof MAGIC) != 0) {
        return HD_FAIL(err, HD_EFORMAT, "%s is no expert record", r->name);
    }
    const uint8_t *at = bytes + sizeof MAGIC;
    for (size_t i = 0; i < HD_LEN(words); i++) at = get(at, &words[i], 4);
    hd_record_head *h = &r->head;
    get(at, &h->rows, 8);
    if (words[0] != VERSION) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "%s is an expert record of version %llu; known: %d", r->name,
                       (unsigned long long)words[0], VERSION);
    }
    h->mode = words[1] < HD_N_RECORD_MODES ? (hd_record_mode)words[1] : HD_N_RECORD_MODES;
    int32_t *const to[] = {&h->layers, &h->experts, &h->top_k, &h->slots,
                           &h->ranks,  &h->nodes,   &h->n_mtp};
    for (size_t i = 0; i < HD_LEN(to); i++) {
        *to[i] = words[i + 2] <= INT32_MAX ? (int32_t)words[i + 2] : -1;
    }
    return hd_record_head_check(h, err);
}

static hd_status read_map(hd_record_reader *r, hd_err *err) {
    const hd_record_head *h = &r->head;
    const size_t n = n_physical(h);
    uint8_t *bytes = malloc(2 * n);
    r->head.slot_expert = calloc(n, sizeof *h->slot_expert);
    if (!bytes || !h->slot_expert) {
        free(bytes);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a map of %zu slots", n);
    }
    const bool whole = fread(bytes, 1, 2 * n, r->in) == 2 * n;
    const uint8_t *at = bytes;
    int32_t bad = -1;
    for (size_t i = 0; whole && i < n; i++) {
        uint64_t e;
        at = get(at, &e, 2);
        h->slot_expert[i] = e == NO_EXPERT ? -1 : (int32_t)e;
        if (h->slot_expert[i] >= h->experts) bad = h->slot_expert[i];
    }
    free(bytes);
    if (!whole) return HD_FAIL(err, HD_EFORMAT, "%s is cut off in its map", r->name);
    if (bad < 0) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "%s: a slot holds expert %d of %d", r->name, bad,
                   h->experts);
}

/* Finds a slot of every expert; a layer has all experts or none. */
static hd_status find_slots(hd_record_reader *r, hd_err *err) {
    const hd_record_head *h = &r->head;
    for (size_t i = 0; i < n_logical(h); i++) r->first_slot[i] = -1;
    for (int32_t l = 0; l < h->layers; l++) {
        int32_t *first = r->first_slot + (int64_t)l * h->experts, n = 0;
        for (int32_t s = h->slots - 1; s >= 0; s--) {
            const int32_t e = h->slot_expert[(int64_t)l * h->slots + s];
            if (e < 0) continue;
            n += first[e] < 0;
            first[e] = s;
        }
        if (n == 0 || n == h->experts) continue;
        return HD_FAIL(err, HD_EFORMAT, "%s: layer %d has slots for %d of %d experts", r->name,
                       l, n, h->experts);
    }
    return HD_OK;
}

static hd_status open_rows(hd_record_reader *r, hd_err *err) {
    const hd_record_head *h = &r->head;
    r->bytes = malloc(hd_record_row_bytes(h));
    r->first_slot = malloc(n_logical(h) * sizeof *r->first_slot);
    r->row.logical = malloc(n_logical(h) * sizeof *r->row.logical);
    r->row.physical = malloc(n_physical(h) * sizeof *r->row.physical);
    r->row.choices = calloc(n_choices(h), sizeof *r->row.choices);
    if (r->bytes && r->first_slot && r->row.logical && r->row.physical && r->row.choices) {
        return find_slots(r, err);
    }
    return HD_FAIL(err, HD_ENOMEM, "no memory for the rows of %s", r->name);
}

hd_status hd_record_open(hd_record_reader *r, FILE *in, const char *name, hd_err *err) {
    *r = (hd_record_reader){.in = in, .name = name};
    HD_TRY(read_fixed(r, err));
    HD_TRY(read_map(r, err));
    return open_rows(r, err);
}

void hd_record_close(hd_record_reader *r) {
    free(r->head.slot_expert);
    free(r->bytes);
    free(r->first_slot);
    free(r->row.logical);
    free(r->row.physical);
    free(r->row.choices);
    *r = (hd_record_reader){0};
}

/* ---- rows ---- */

static hd_status bad_row(const hd_record_reader *r, const char *what, hd_err *err) {
    return HD_FAIL(err, HD_EFORMAT, "%s: row %llu %s", r->name, (unsigned long long)r->n_read,
                   what);
}

/* Reads counts, all of which together must fit in 63 bits. */
static const uint8_t *read_counts(int64_t *to, size_t n, int size, const uint8_t *at,
                                  uint64_t *sum) {
    for (size_t i = 0; i < n; i++) {
        uint64_t v;
        at = get(at, &v, size);
        to[i] = (int64_t)(v & INT64_MAX);
        *sum = v > INT64_MAX - *sum ? INT64_MAX : *sum + v;
    }
    return at;
}

static const char *read_choices(const hd_record_head *h, const uint8_t *at,
                                hd_record_row *row) {
    uint64_t v;
    at = get(at, &v, 4);
    row->token = (int32_t)(uint32_t)v;
    at = get(at, &v, 4);
    row->position = (int32_t)(uint32_t)v;
    for (size_t i = 0; i < n_choices(h); i++) {
        at = get(at, &v, choice_bytes(h));
        if (v >= (uint64_t)h->experts) return "chooses no expert";
        row->choices[i] = (int32_t)v;
    }
    return NULL;
}

const char *hd_record_row_read(const hd_record_head *h, const uint8_t *bytes,
                               hd_record_row *row) {
    uint64_t v, sum = 0;
    const uint8_t *at = get(bytes, &row->pass, 8);
    at = get(at, &v, 4);
    if (v > INT32_MAX) return "has too many tokens";
    row->tokens = (int32_t)v;
    at = get(at, &v, 4);
    if (v >= HD_N_RECORD_PHASES) return "has an unknown phase";
    row->phase = (hd_record_phase)v;
    if (h->mode == HD_RECORD_PER_TOKEN) return read_choices(h, at, row);
    const bool stat = h->mode == HD_RECORD_STAT;
    if (stat) at = read_counts(row->logical, n_logical(h), 8, at, &sum);
    read_counts(row->physical, n_physical(h), stat ? 8 : 4, at, &sum);
    return sum >= INT64_MAX ? "has counts that are too large" : NULL;
}

/* Counts by expert are those of its slots; those of STAT are in the file. */
static const char *count_experts(hd_record_reader *r) {
    const hd_record_head *h = &r->head;
    const bool stat = h->mode == HD_RECORD_STAT;
    if (!stat) memset(r->row.logical, 0, n_logical(h) * sizeof *r->row.logical);
    for (size_t i = 0; i < n_physical(h); i++) {
        const int32_t e = h->slot_expert[i];
        if (r->row.physical[i] == 0) continue;
        if (e < 0) return "counts rows of an empty slot";
        if (!stat) {
            r->row.logical[i / (size_t)h->slots * (size_t)h->experts + (size_t)e] +=
                r->row.physical[i];
        }
    }
    return NULL;
}

static void count_choices(hd_record_reader *r) {
    const hd_record_head *h = &r->head;
    memset(r->row.logical, 0, n_logical(h) * sizeof *r->row.logical);
    memset(r->row.physical, 0, n_physical(h) * sizeof *r->row.physical);
    for (int32_t l = 0; l < h->layers; l++) {
        if (!hd_record_has(h, r->row.phase, l)) continue;
        for (int32_t k = 0; k < h->top_k; k++) {
            const int64_t e =
                (int64_t)l * h->experts + r->row.choices[(int64_t)l * h->top_k + k];
            r->row.logical[e]++;
            r->row.physical[(int64_t)l * h->slots + r->first_slot[e]]++;
        }
    }
}

hd_status hd_record_next(hd_record_reader *r, hd_err *err) {
    const size_t n = hd_record_row_bytes(&r->head);
    const bool open_end = r->head.rows == HD_RECORD_OPEN_END;
    r->ended = r->ended || (!open_end && r->n_read == r->head.rows);
    if (r->ended) return HD_OK;
    const size_t got = fread(r->bytes, 1, n, r->in);
    if (got < n) {
        r->ended = true;
        r->cut = got > 0 || !open_end;
        return HD_OK;
    }
    const char *fault = hd_record_row_read(&r->head, r->bytes, &r->row);
    if (!fault && r->head.mode == HD_RECORD_PER_TOKEN) {
        count_choices(r);
    } else if (!fault) {
        fault = count_experts(r);
    }
    if (fault) return bad_row(r, fault, err);
    r->n_read++;
    return HD_OK;
}
