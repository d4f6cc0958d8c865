/* engine_internal.h - the engine's parts, shared by its three files: opening (open.c), preparing
 * requests (prepare.c), running and polling (engine.c). */
#ifndef HD_ENGINE_ENGINE_INTERNAL_H
#define HD_ENGINE_ENGINE_INTERNAL_H

#include <pthread.h>

#include "engine/output.h"
#include "exec/executor.h"
#include "hadal.h"
#include "sched/sched.h"
#include "text/chat.h"
#include "text/tokenizer.h"

typedef struct engine_record {
    uint64_t id; /* 0: free */
    uint32_t uses;
    hd_ids prompt;
    int32_t n_prompt;
    hd_logit_bias *bias;
    int32_t *ban;      /* tokens forbidden before min_tokens */
    int32_t *stop_ids; /* end of sequence and the request's own */
    hd_choosing choosing;
    hd_request request;
    hd_output output; /* from here on: the poller's */
    bool ended;       /* the poller has said so; the step thread not yet */
    int32_t n_output, n_drafted, n_accepted;
} engine_record;

/* What one step gave one request. */
typedef struct engine_post {
    uint64_t id;
    int32_t n;
    int32_t tokens[HD_MAX_CHOSEN];
    float logprobs[HD_MAX_CHOSEN];
    hd_end end;
    int32_t n_cached, n_drafted, n_accepted;
} engine_post;

struct hd_engine {
    /* read-only after open */
    hd_model_spec *spec;
    hd_weights *weights;
    hd_tokenizer *tokenizer;
    hd_chat_encoding encoding;
    bool thinks;
    hd_ops ops;
    int32_t max_context, n_records;
    bool drafts;

    /* the step thread's */
    hd_device *device;
    hd_stream *stream;
    hd_executor *executor;
    hd_sched *sched;
    engine_post *turn_posts;
    int32_t n_turn_posts, cap_turn_posts;
    uint64_t *inbox, *inbox_cancel;

    /* the poller's */
    engine_post event_post;
    engine_record *shown, *finished;
    size_t n_shown;

    /* guarded by lock */
    pthread_mutex_t lock;
    pthread_cond_t mail, posted, taken;
    engine_record *records; /* [n_records] */
    int32_t *free;
    int32_t n_free, n_living; /* living: submitted, and the last post not taken */
    uint64_t *submitted, *cancelled;
    int32_t n_submitted, n_cancelled;
    engine_post *posts; /* ring */
    int32_t first_post, n_posts, cap_posts;
    hd_engine_stats stats;
    bool closing;

    pthread_t thread;
    bool started;
};

hd_status engine_prepare(hd_engine *e, engine_record *r, const hd_generation *g, hd_err *err);
void engine_drop_record(hd_engine *e, engine_record *r);
hd_sched_hooks engine_hooks(hd_engine *e);
hd_status engine_start(hd_engine *e, hd_err *err);
void engine_stop(hd_engine *e);

#endif
