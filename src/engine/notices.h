/* notices.h - sentences for people about what is odd and does not prevent serving. */
#ifndef HD_ENGINE_NOTICES_H
#define HD_ENGINE_NOTICES_H

#include "engine/engine_internal.h"
#include "kv/hisparse_choice.h"

/* weights: NULL without a model */
void engine_note_oddities(hd_engine *e, const hd_weights *weights);

/* Why no more than `pinned` bytes of the experts in host memory are pinned. limit: of locked memory;
 * UINT64_MAX: none. */
void engine_note_pageable(hd_engine *e, size_t pinned, const hd_err *why, uint64_t limit);

/* The last n of `all` layers have all their experts on the device. */
void engine_note_layers(hd_engine *e, int32_t n, int32_t all);

/* Why the host computes no rows of experts, although that was asked for. */
void engine_note_no_host_rows(hd_engine *e, const hd_err *why);

/* What HiSparse "auto" chose, and why. tokens: of KV pools without it. */
void engine_note_hisparse(hd_engine *e, const hd_hisparse_choice *c, int64_t tokens);

#endif
