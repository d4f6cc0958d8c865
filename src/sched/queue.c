/* queue.c - the waiting queue by priority and arrival; a retracted request regains its
 * place. */
#include <stdlib.h>
#include <string.h>

#include "sched/sched_internal.h"

hd_status sched_seq_open(sched_seq **out, const hd_sched_request *r, hd_err *err) {
    const size_t n_tokens = (size_t)r->n_prompt + (size_t)r->max_new + HD_MAX_DRAFTS;
    *out = NULL;
    sched_seq *q = calloc(1, sizeof *q);
    int32_t *tokens = calloc(n_tokens + (size_t)r->n_stop, sizeof *tokens);
    if (!q || !tokens) {
        free(q);
        free(tokens);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a request of %zu tokens", n_tokens);
    }
    memcpy(tokens, r->prompt, (size_t)r->n_prompt * sizeof *tokens);
    if (r->n_output)
        memcpy(tokens + r->n_prompt, r->output, (size_t)r->n_output * sizeof *tokens);
    if (r->n_stop) memcpy(tokens + n_tokens, r->stop_ids, (size_t)r->n_stop * sizeof *tokens);
    *q = (sched_seq){
        .r = *r, .tokens = tokens, .n_tokens = r->n_prompt + r->n_output, .slot = -1};
    q->r.prompt = tokens;
    q->r.output = tokens + r->n_prompt;
    q->r.stop_ids = tokens + n_tokens;
    *out = q;
    return HD_OK;
}

void sched_seq_close(sched_seq *q) {
    free(q->tokens);
    free(q);
}

bool sched_before(const sched_seq *a, const sched_seq *b) {
    if (a->r.priority != b->r.priority) return a->r.priority > b->r.priority;
    return a->arrival < b->arrival;
}

void sched_queue_put(sched_queue *w, sched_seq *q) {
    sched_seq *before = w->last; /* most arrivals are appended */
    while (before && sched_before(q, before)) before = before->prev;
    q->prev = before;
    q->next = before ? before->next : w->first;
    if (q->next) {
        q->next->prev = q;
    } else {
        w->last = q;
    }
    if (before) {
        before->next = q;
    } else {
        w->first = q;
    }
    w->n++;
}

void sched_queue_take(sched_queue *w, sched_seq *q) {
    if (q->prev) {
        q->prev->next = q->next;
    } else {
        w->first = q->next;
    }
    if (q->next) {
        q->next->prev = q->prev;
    } else {
        w->last = q->prev;
    }
    q->prev = q->next = NULL;
    w->n--;
}

sched_seq *sched_queue_find(const sched_queue *w, uint64_t id) {
    for (sched_seq *q = w->first; q; q = q->next) {
        if (q->r.id == id) return q;
    }
    return NULL;
}
