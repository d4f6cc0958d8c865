/* output.c - see output.h. Stop strings are few and short, so each is looked for directly. */
#include "engine/output.h"

#include <stdlib.h>
#include <string.h>

hd_status hd_output_init(hd_output *o, const hd_tokenizer *t, const char *const *stop,
                         size_t n_stop, hd_err *err) {
    *o = (hd_output){0};
    hd_detokenizer_init(&o->detokenizer, t, true);
    o->stop = calloc(n_stop + 1, sizeof *o->stop);
    o->stop_len = calloc(n_stop + 1, sizeof *o->stop_len);
    if (!o->stop || !o->stop_len) goto fail;
    for (size_t i = 0; i < n_stop; i++) {
        o->stop_len[i] = strlen(stop[i]);
        o->stop[i] = malloc(o->stop_len[i] + 1);
        if (!o->stop[i]) goto fail;
        o->n_stop++;
        memcpy(o->stop[i], stop[i], o->stop_len[i] + 1);
    }
    return HD_OK;

fail:
    hd_output_deinit(o);
    return HD_FAIL(err, HD_ENOMEM, "no memory for %zu stop strings", n_stop);
}

void hd_output_deinit(hd_output *o) {
    for (size_t i = 0; o->stop && i < o->n_stop; i++) free(o->stop[i]);
    free(o->stop);
    free(o->stop_len);
    hd_bytes_deinit(&o->text);
    *o = (hd_output){0};
}

/* Where the earliest stop string begins; text->n when there is none. */
static size_t find_stop(const hd_output *o) {
    for (size_t at = 0; at < o->text.n; at++) {
        for (size_t i = 0; i < o->n_stop; i++) {
            if (o->stop_len[i] <= o->text.n - at &&
                memcmp(o->text.data + at, o->stop[i], o->stop_len[i]) == 0) {
                return at;
            }
        }
    }
    return o->text.n;
}

/* How much of the end of the text is the beginning of a stop string. */
static size_t held_back(const hd_output *o) {
    size_t most = 0;
    for (size_t i = 0; i < o->n_stop; i++) {
        size_t k = o->stop_len[i] - 1 < o->text.n ? o->stop_len[i] - 1 : o->text.n;
        for (; k > most; k--) {
            if (memcmp(o->text.data + o->text.n - k, o->stop[i], k) == 0) most = k;
        }
    }
    return most;
}

hd_status hd_output_push(hd_output *o, const int32_t *tokens, size_t n, bool last,
                         size_t *n_ready, bool *stopped, hd_err *err) {
    *n_ready = 0;
    *stopped = false;
    for (size_t i = 0; i < n; i++) {
        HD_TRY(hd_detokenizer_push(&o->detokenizer, tokens[i], &o->text, err));
    }
    if (last) HD_TRY(hd_detokenizer_finish(&o->detokenizer, &o->text, err));
    const size_t stop = find_stop(o);
    *stopped = stop < o->text.n;
    if (*stopped) o->text.n = stop;
    *n_ready = *stopped || last ? o->text.n : o->text.n - held_back(o);
    return HD_OK;
}

void hd_output_take(hd_output *o, size_t n) {
    o->text.n -= n;
    if (n && o->text.n) memmove(o->text.data, o->text.data + n, o->text.n);
}
