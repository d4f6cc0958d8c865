/* resident_ref.c - resident in plain C: which chosen entries a pass lacks, the rows that take them, and
 * their copies. */
#include <string.h>

#include "ops/check_internal.h"
#include "ops/ref/ref_internal.h"

/* The pool's number of an entry of a sequence. */
static int32_t entry_at(const hd_paged *p, int32_t seq, int32_t entry) {
    const int32_t page = p->table[(int64_t)seq * p->table_stride + entry / p->page_entries];
    return page * p->page_entries + entry % p->page_entries;
}

void hd_forget_entries_ref(hd_stream *s, const hd_forget_entries_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        if ((a->pos[r] + 1) % a->ratio) continue;
        a->row_of[entry_at(&a->entries, a->seq[r], a->pos[r] / a->ratio)] = -1;
    }
}

static bool is_there(const hd_resident *b, int32_t entry) {
    const int32_t row = b->row_of[entry];
    return row >= 0 && b->owner[row] == entry + 1;
}

/* out = rows, and of entries that are missing -2 - entry. row_of of a missing one becomes -2. */
static void look_up(const hd_resident_args *a) {
    const hd_resident *b = &a->buffer;
    for (int32_t i = 0; i < a->rows * a->top_k; i++) {
        a->out[i] = -1;
        if (a->selected[i] < 0) continue;
        const int32_t entry = entry_at(&a->entries, a->seq[i / a->top_k], a->selected[i]);
        b->state->n_selected++;
        if (is_there(b, entry)) {
            a->out[i] = b->row_of[entry];
            b->used[a->out[i]] = b->state->pass;
            continue;
        }
        if (b->row_of[entry] != -2) b->missed[b->state->n_missed++] = entry;
        b->row_of[entry] = -2;
        a->out[i] = -2 - entry;
    }
}

static int32_t age_of(const hd_resident *b, int32_t row) {
    const int64_t age = b->state->pass - b->used[row];
    return age < HD_RESIDENT_AGES ? (int32_t)age : HD_RESIDENT_AGES - 1;
}

/* All rows of more than the age *least take an entry, and the first *of_least rows of that age. */
static void find_age(const hd_resident *b, int32_t *least, int32_t *of_least) {
    int32_t n[HD_RESIDENT_AGES] = {0}, age = HD_RESIDENT_AGES - 1;
    *of_least = b->state->n_missed;
    for (int32_t r = 0; r < b->n; r++) n[age_of(b, r)]++;
    while (age > 0 && n[age] < *of_least) *of_least -= n[age--];
    *least = age;
}

static void take_rows(const hd_resident *b) {
    int32_t least, left, taken = 0;
    if (b->state->n_missed == 0) return;
    find_age(b, &least, &left);
    for (int32_t r = 0; r < b->n && taken < b->state->n_missed; r++) {
        const int32_t age = age_of(b, r);
        if (age < least || (age == least && left-- <= 0)) continue;
        const int32_t entry = b->missed[taken];
        b->victim[taken++] = r;
        b->row_of[entry] = r;
        b->owner[r] = entry + 1;
    }
    for (int32_t i = 0; i < taken; i++) b->used[b->victim[i]] = b->state->pass;
}

int32_t ops_resident_plan(hd_stream *s, const hd_resident_args *a) {
    const hd_resident *b = &a->buffer;
    if (a->rows == 0 || !ops_fits_buffer(s, a)) return 0;
    b->state->pass++;
    b->state->n_selected = b->state->n_missed = 0;
    look_up(a);
    take_rows(b);
    for (int32_t i = 0; i < a->rows * a->top_k; i++) {
        if (a->out[i] < -1) a->out[i] = b->row_of[-2 - a->out[i]];
    }
    b->state->all.selected += b->state->n_selected;
    b->state->all.fetched += b->state->n_missed;
    *b->counts = b->state->all;
    return b->state->n_missed;
}

void ops_resident_fetch(const hd_resident_args *a, int32_t i) {
    const hd_resident *b = &a->buffer;
    const size_t n = hd_paged_entry_bytes(&a->entries);
    memcpy((uint8_t *)b->rows.data + (size_t)b->victim[i] * n,
           (const uint8_t *)a->entries.rows.data + (size_t)b->missed[i] * n, n);
}

void hd_resident_ref(hd_stream *s, const hd_resident_args *a) {
    const int32_t n = ops_resident_plan(s, a);
    for (int32_t i = 0; i < n; i++) ops_resident_fetch(a, i);
}
