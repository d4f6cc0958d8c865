/* replay_ref.c - keeps the choices of rows beside their pages. */
#include "ops/ref/ref_internal.h"

void ops_replay_row(const hd_replay_log *log, int32_t row, const int32_t *choice, int32_t n) {
    const int32_t pos = log->pos[row];
    const int64_t at = (int64_t)log->seq[row] * log->table_stride + pos / log->page_tokens;
    const int64_t entry = (int64_t)log->table[at] * log->page_tokens + pos % log->page_tokens;
    uint8_t *out = log->data + entry * log->row_bytes;
    for (int32_t j = 0; j < n; j++) {
        for (int32_t b = 0; b < log->number_bytes; b++) {
            *out++ = (uint8_t)((uint32_t)choice[j] >> (8 * b));
        }
    }
}

void hd_replay_store_ref(hd_stream *s, const hd_replay_store_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        ops_replay_row(&a->log, r, a->choice + (int64_t)r * a->top_k, a->top_k);
    }
}
