/* expert_stage.c - forwards to the kind of stage; see expert_stage.h. */
#include "model/expert_stage_internal.h"

void hd_expert_stage_close(hd_expert_stage *s) {
    if (s) s->table->close(s);
}

void hd_expert_stage_begin(hd_expert_stage *s, const hd_expert_layer *layer) {
    s->table->begin(s, layer);
}

hd_status hd_expert_stage_next(hd_expert_stage *s, hd_expert_wave *out, hd_err *err) {
    return s->table->next(s, out, err);
}

bool hd_expert_stage_predicts(const hd_expert_stage *s) {
    return s->table->predicts && s->table->predicts(s);
}

void hd_expert_stage_follow(hd_expert_stage *s, const int64_t *rows) {
    if (s->table->follow) s->table->follow(s, rows);
}

void hd_expert_stage_move(hd_expert_stage *s) {
    if (s->table->move) s->table->move(s);
}

hd_expert_stage_stats hd_expert_stage_read_stats(const hd_expert_stage *s) {
    return s->table->read_stats(s);
}

bool hd_expert_stage_is_queued(const hd_expert_stage *s) {
    return s->queued;
}
