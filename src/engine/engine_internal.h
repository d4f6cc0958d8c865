/* engine_internal.h - the engine's parts, shared by its files: opening (open.c), requests from
 * their preparation (prepare.c) to their end (engine.c), the step thread (step_loop.c) and the
 * polling thread (poll.c). */
#ifndef HD_ENGINE_ENGINE_INTERNAL_H
#define HD_ENGINE_ENGINE_INTERNAL_H

#include <jansson.h>
#include <pthread.h>

#include "engine/engine.h"
#include "engine/grammar_cache.h"
#include "engine/output.h"
#include "engine/token_history.h"
#include "runner/model_runner.h"
#include "runner/null_runner.h"
#include "sched/sched.h"

enum { ENGINE_MAX_MARKERS = 16 };

/* One of a request's answers: a request of its own to the scheduler. */
typedef struct engine_answer {
    hd_request_sampling choosing; /* never changes; the step thread reads it */

    /* the poller's */
    hd_output output;
    bool ended; /* the poller has said so; the step thread not yet */
    int32_t n_output, drafted_at[HD_MOST_DRAFTS], accepted_at[HD_MOST_DRAFTS];

    /* the step thread's */
    int64_t admitted_ns;
    int32_t n_admitted;

    /* guarded by the engine's lock */
    bool cancelled; /* listed for the step thread */
    bool posted;    /* its last post is in the ring */
    int32_t n_posted;
} engine_answer;

typedef struct engine_request {
    uint64_t id; /* 0: free. That of answer i is id + i */
    uint32_t uses;
    int32_t n_answers;
    int32_t
        n_left; /* guarded by the lock: answers in the mailbox or behind it, until the poller
                       takes their last post */
    engine_answer *answers;  /* [n_answers] */
    int32_t n_ended, n_gone; /* the poller's: last events shown, last posts taken */
    int32_t priority;
    uint64_t arrival;
    int64_t submitted_ns;
    void (*on_event)(void *user, const hd_event *event);
    void *user;

    hd_ids prompt;
    int32_t n_prompt;
    hd_logit_bias *bias;
    int32_t *ban;      /* tokens forbidden before min_tokens */
    int32_t *stop_ids; /* end of sequence and the request's own */
    hd_sched_request request;

    json_t *tools; /* what reply_tools points into */
    hd_reply_tools reply_tools;
    hd_reply_options parse;
    hd_output_rules rules;
    char **stop;                       /* [rules.n_stop] */
    bool is_chat, starts_in_reasoning; /* the prompt was rendered; it ends with <think> */
    uint64_t token_history_key;        /* of the rendered prompt */

    bool constrained; /* by the guide */
    hd_constraint constraint;
    hd_ids forced;        /* the guide's */
    engine_grammar *form; /* the guide's grammar, or NULL */

    /* Prompt tokens from score_from on, 0: none; written before the first post of answer 0. */
    int32_t score_from, n_scored, n_top;
    float *scores;             /* [n_prompt - score_from] */
    hd_alternative *score_top; /* [n_prompt - score_from, n_top] */
    bool scores_shown;         /* the poller's */
} engine_request;

/* What one step gave one answer. */
typedef struct engine_step_output {
    uint64_t id;
    int32_t n;
    int32_t tokens[HD_MAX_STEP_TOKENS];
    float logprobs[HD_MAX_STEP_TOKENS];
    hd_end end;
    char *why; /* END_FAILED: the receiver's to free */
    int32_t n_cached, n_drafted, n_accepted, n_retracted;
    int64_t admitted_ns;
    int32_t n_top;
    hd_alternative
        *top; /* [n, n_top] its own place in memory for HD_MAX_STEP_TOKENS of the most */
} engine_step_output;

enum { ENGINE_MAX_NOTICES = 24 };
enum { ENGINE_POST_TOPS = HD_MAX_STEP_TOKENS * HD_MAX_ALTERNATIVES };

/* What the front asks of the step thread beside requests. */
typedef struct engine_mail {
    uint64_t *submitted, *cancelled; /* ids of requests; of answers */
    int32_t n_submitted, n_cancelled;
    bool flush, retract;
    bool news; /* something in here is new */
} engine_mail;

struct hd_engine {
    /* read-only after open */
    hd_model_spec *spec;
    hd_weights *weights;
    hd_tokenizer *tokenizer; /* NULL with dummy weights: then there is no text */
    int32_t n_ids;           /* tokens that may be chosen */
    hd_chat_encoding encoding;
    bool thinks;
    int32_t markers[ENGINE_MAX_MARKERS], n_markers; /* tokens that the parser wants to see */
    bool flagged, dsml_flagged;                     /* as in hd_reply_options */
    hd_ops ops;
    hd_err no_gpu; /* why backend "auto" took none; HD_OK: it did, or was not asked to */
    hd_mla_form mla;
    int32_t max_context, max_living, n_requests;
    bool drafts, graphs, forced_acceptance;
    const char *notices[ENGINE_MAX_NOTICES];
    char notice_texts[ENGINE_MAX_NOTICES][200];
    int32_t n_notices;
    int32_t n_experts, n_loads; /* per layer; layers times that */
    hd_grammar_vocab *vocab;
    engine_grammar_cache *forms;         /* have locks of their own */
    engine_token_history *token_history; /* NULL: without */
    hd_alternative *tops;                /* of all posts */

    /* the step thread's */
    hd_device *device;
    hd_stream *stream;
    hd_model_runner *executor; /* or */
    hd_null_runner *null;
    hd_runner runner;
    hd_sched *sched;
    engine_step_output *step_outputs;
    int32_t n_step_outputs, cap_step_outputs;
    engine_mail inbox;
    uint64_t seen_pauses; /* pauses as of the last mail */
    hd_err step_err;
    int64_t in_runner_ns; /* of this turn */
    hd_engine_stats totals;
    int64_t *fresh_loads;          /* [n_loads] */
    int64_t loads_ns, loads_steps; /* when they were last shown; after how many steps */
    int64_t audited;               /* requests that had finished at the last audit */

    /* the poller's */
    engine_step_output event_post; /* what the shown event points into, and: */
    engine_answer *shown_answer;   /* or NULL */
    engine_request *finished;      /* or NULL; dropped when the event is */
    char why[600];

    /* guarded by lock */
    pthread_mutex_t lock;
    pthread_cond_t wake, taken; /* for the step thread */
    pthread_cond_t posted;      /* for the poller */
    engine_request *requests;   /* [n_records] */
    int32_t *free;
    int32_t n_free;
    int32_t n_living; /* answers submitted whose last post was not taken */
    uint64_t arrivals;
    engine_mail mail;
    engine_step_output *posts; /* ring */
    int32_t first_post, n_posts, cap_posts;
    hd_engine_stats stats;
    hd_sched_progress *places; /* [n_places] what runs, as of the last turn */
    int32_t n_places;
    int64_t *loads; /* [n_loads] as last shown */
    bool paused, draining, woken, closing;
    uint64_t pauses, rested_pauses; /* asked for; reached by the step thread */

    pthread_t thread;
    bool started;
};

/* Ids: how often a record was used, its index and the answer. Stale ids match nothing. */
enum { ENGINE_ANSWER_BITS = 6, ENGINE_MAX_LIVING = 1 << 20 };
_Static_assert(HD_MAX_CHOICES == 1 << ENGINE_ANSWER_BITS, "an id holds the answer's index");

engine_request *engine_request_of(hd_engine *e, uint64_t id); /* of a request or an answer */
static inline int32_t engine_answer_of(uint64_t id) {
    return (int32_t)(id & (HD_MAX_CHOICES - 1));
}

/* engine.c */
void engine_drop_request(hd_engine *e, engine_request *r);
void engine_cancel_answer(hd_engine *e, engine_request *r, int32_t answer); /* under the lock */

/* notices.c; once the model is open */
void engine_note_oddities(hd_engine *e);

/* prepare.c */
hd_status engine_prepare(hd_engine *e, engine_request *r, const hd_request *g,
                         const hd_conversation *conversation, hd_err *err);

/* sampling_constraint.c */
bool engine_forces_tool_call(const hd_request *g);
hd_status engine_build_constraint(hd_engine *e, engine_request *r, const hd_request *g,
                                  hd_err *err);

/* step_loop.c */
void engine_step_output_copy(engine_step_output *to,
                             const engine_step_output *from); /* keeps to->top's place */
hd_sched_hooks engine_hooks(hd_engine *e);
hd_runner engine_runner(hd_engine *e); /* e->runner, timed */
hd_status engine_start(hd_engine *e, hd_err *err);
void engine_stop(hd_engine *e);

/* poll.c */
void engine_drop_shown(hd_engine *e);

#endif
