/* notices.c - see notices.h. */
#include <stdarg.h>
#include <stdio.h>

#include "base/terminal.h"
#include "engine/notices.h"
#include "weights/safetensors.h"

HD_PRINTF(2, 3) static void note(hd_engine *e, const char *fmt, ...) {
    if (e->n_notices == ENGINE_MAX_NOTICES) return;
    char *text = e->notice_texts[e->n_notices];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof e->notice_texts[0], fmt, args);
    va_end(args);
    e->notices[e->n_notices++] = text;
}

static void note_unknown(hd_engine *e, const hd_weights *weights, const hd_checkpoint *c) {
    const char *first = NULL;
    int32_t n = 0, decl;
    for (int32_t i = 0; i < hd_checkpoint_count(c); i++) {
        if (hd_weights_use(weights, i, &decl) != HD_USE_UNKNOWN) continue;
        if (n++ == 0) first = hd_checkpoint_at(c, i)->name;
    }
    if (n == 0) return;
    note(e, "%d tensor%s unknown to this model, the first is %.100s; hadal inspect lists them",
         n, n == 1 ? " is" : "s are", first);
}

void engine_note_oddities(hd_engine *e, const hd_weights *weights) {
    const hd_model_spec *s = e->spec;
    const hd_checkpoint *c = weights ? hd_weights_checkpoint(weights) : NULL;
    for (int32_t i = 0; i < s->n_notices; i++) note(e, "%s", s->notices[i]);
    if (!c) return;
    for (int32_t i = 0; i < hd_checkpoint_notices(c); i++) {
        note(e, "%s", hd_checkpoint_notice(c, i));
    }
    const int32_t here = hd_weights_n_mtp(weights);
    if (here < s->n_mtp) {
        note(e, "the config declares %d drafter layer%s, the files hold %d%s", s->n_mtp,
             s->n_mtp == 1 ? "" : "s", here, here ? "" : ": nothing drafts");
    }
    note_unknown(e, weights, c);
}

void engine_note_pageable(hd_engine *e, size_t pinned, const hd_err *why, uint64_t limit) {
    char have[32], most[32], raise[96] = "";
    if (limit != UINT64_MAX) {
        snprintf(raise, sizeof raise,
                 "; raise the limit of locked memory of %s (ulimit -l, LimitMEMLOCK=)",
                 hd_bytes_text(most, sizeof most, (double)limit));
    }
    note(e,
         "only %s of the experts in host memory are pinned, others are copied slowly: %.60s%s",
         hd_bytes_text(have, sizeof have, (double)pinned), why->msg, raise);
}

void engine_note_layers(hd_engine *e, int32_t n, int32_t all) {
    note(
        e,
        "host memory has no room for all experts: those of the last %d of %d layers are on the "
        "device",
        n, all);
}

void engine_note_no_host_rows(hd_engine *e, const hd_err *why) {
    note(e, "experts are computed on the device alone (experts_host_compute): %.160s",
         why->msg);
}

void engine_note_hisparse(hd_engine *e, const hd_hisparse_choice *c, int64_t tokens) {
    char gain[40] = "";
    if (c->fitting >= 1) snprintf(gain, sizeof gain, ", %.1f ms gained", c->gain_s * 1e3);
    if (c->on) {
        note(e,
             "hisparse on: %.0f requests at a time instead of %.0f; selected entries lie in "
             "host "
             "memory, %d of each layer on the device; predicted for a step: %.1f ms of "
             "fetching%s",
             c->requests, c->fitting, c->rows, c->miss_s * 1e3, gain);
    } else {
        note(e,
             "hisparse off, KV pools of %lld tokens; predicted for a step with it: %.1f ms of "
             "fetching%s",
             (long long)tokens, c->miss_s * 1e3, gain);
    }
}

size_t hd_engine_notices(const hd_engine *e, const char *const **out) {
    *out = e->notices;
    return (size_t)e->n_notices;
}
