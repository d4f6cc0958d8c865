/* engine_internal.h - the front of the engine, in data and functions that its files share:
 * opening (open.c), requests from their preparation (prepare.c) to their end (engine.c), and the
 * polling thread (poll.c). Behind it are ranks (rank.h), each with a step thread
 * (step_loop.c). */
#ifndef HD_ENGINE_ENGINE_INTERNAL_H
#define HD_ENGINE_ENGINE_INTERNAL_H

#include <jansson.h>
#include <pthread.h>

#include "comm/local.h"
#include "comm/ucx.h"
#include "engine/engine.h"
#include "engine/grammar_cache.h"
#include "engine/group.h"
#include "engine/output.h"
#include "engine/token_history.h"
#include "engine/world.h"
#include "runner/model_runner.h"
#include "sched/sched.h"
#include "weights/backup.h"
#include "weights/changes.h"
#include "weights/weights.h"

enum { ENGINE_MAX_MARKERS = 16 };

/* One choice of a request. The scheduler sees it as a request of its own. */
typedef struct engine_choice {
    hd_request_sampling sampling; /* constant after submission; the step thread reads it */

    /* owned by the polling thread */
    hd_output output;
    /* the polling thread showed the last event; the step thread may not know yet */
    bool ended;
    int32_t n_output, drafted_at[HD_MAX_DRAFTS], accepted_at[HD_MAX_DRAFTS];

    /* owned by the step thread */
    int64_t admitted_ns;
    int32_t n_admitted;
    int32_t n_replay; /* rows of choices that are written */

    /* [positions - replay_from, row_bytes] The step thread writes rows once, before the step
     * output of a token behind them is posted. NULL: not requested. */
    uint8_t *replay[HD_N_REPLAYS];

    /* [max_new], of them n_posted put out so far: for another group, if the ranks of the choice's own
     * are lost. NULL: all groups are in this process. Owned by the front's step thread. */
    int32_t *tokens;

    /* guarded by the engine's lock */
    bool cancelled; /* listed in the mailbox for the step thread */
    bool posted;    /* the last step output is in the ring */
    int32_t n_posted;
} engine_choice;

struct engine_request {
    uint64_t id; /* 0: free. The id of choice i is id + i. */
    uint32_t uses;
    int32_t n_choices;
    /* guarded by the lock: choices whose last step output the polling thread did not take */
    int32_t n_left;
    engine_choice *choices; /* [n_choices] the choices */
    /* owned by the polling thread: choices whose last event was shown; whose last output was
     * taken */
    int32_t n_ended, n_gone;
    int32_t priority;
    uint64_t arrival;
    int32_t group; /* attention group that computes it */
    /* guarded by the lock: what it adds to the group's load; the part of its prompt */
    int64_t load, prompt_load;
    int64_t submitted_ns;
    void (*on_event)(void *user, const hd_event *event);
    void *user;
    hd_page_watch watch; /* constant; without pages: none */
    uint32_t n_exported; /* of them; owned by the step threads of its group and of rank 0 */
    bool fetching;       /* guarded by the lock: it waits for pages */

    hd_ids prompt;
    int32_t n_prompt;
    hd_logit_bias *bias;
    int32_t *ban;      /* tokens forbidden before min_tokens */
    int32_t *stop_ids; /* end of sequence and the request's own stop tokens */
    hd_sched_request request;

    json_t *tools; /* what reply_tools points into */
    hd_reply_tools reply_tools;
    hd_reply_options parse;
    hd_output_rules rules;
    char **stop; /* [rules.n_stop] */
    /* the prompt was rendered by the chat template; it ends with <think> */
    bool is_chat, starts_in_reasoning;
    uint64_t token_history_key; /* key of the rendered prompt in the token history */

    bool constrained; /* a constraint limits the next tokens */
    hd_constraint constraint;
    hd_ids forced;           /* the constraint's forced tokens */
    engine_grammar *grammar; /* the constraint's grammar, or NULL */

    /* Prompt log-probabilities from this token on; 0: none. Before step outputs of choice 0. */
    int32_t prompt_logprobs_from, n_prompt_logprobs, n_top;
    float *prompt_logprobs;     /* [n_prompt - prompt_logprobs_from] */
    hd_alternative *prompt_top; /* [n_prompt - prompt_logprobs_from, n_top] */
    bool prompt_shown;          /* owned by the polling thread */
    int32_t replay_from;
};

/* What one step adds to one choice, on its way to the polling thread. */
typedef struct engine_step_output {
    uint64_t id;
    hd_step_tokens step;
    hd_alternative
        *top;  /* [engine_post_tops()] the step's alternatives, in memory of its own */
    char *why; /* HD_FINISH_ERROR: the receiver frees it */
    int32_t n_retracted;
    int64_t admitted_ns;
    const char *weight_version;
} engine_step_output;

enum { ENGINE_MAX_NOTICES = 24 };

typedef struct engine_remote engine_remote;   /* remote.c */
typedef struct engine_version engine_version; /* update.c */

struct hd_engine {
    /* read-only after open */
    hd_model_spec *spec;
    hd_tokenizer *tokenizer; /* NULL with random weights: then there is no text */
    int32_t n_ids;           /* tokens that may be sampled */
    hd_chat_encoding encoding;
    bool thinks;
    /* special tokens that the reply parser must see */
    int32_t markers[ENGINE_MAX_MARKERS], n_markers;
    bool flagged, dsml_flagged; /* as in hd_reply_options */
    /* why backend "auto" chose no GPU; HD_OK: it chose one, or another backend was named */
    hd_err no_gpu;
    hd_cuda_path cuda_path; /* that was asked for */
    hd_mla_form mla;
    hd_expert_split split;
    int32_t max_context, max_logprobs, max_living, n_requests, dwdp_from; /* fetch_from */
    bool has_model, drafts, forced_acceptance; /* has_model: else the null runner */
    const char *notices[ENGINE_MAX_NOTICES];
    char notice_texts[ENGINE_MAX_NOTICES][200];
    int32_t n_notices, n_micro, micro_from, cp_part; /* of hd_model_limits and hd_model_env */
    int32_t n_experts, n_loads; /* experts per layer; layers times experts */
    hd_grammar_vocab *vocab;
    engine_grammar_cache *grammars;      /* have their own locks */
    engine_token_history *token_history; /* NULL: disabled */
    hd_alternative *tops;                /* alternatives of all step outputs in the ring */
    hd_parallel_config parallel;         /* of all ranks */
    engine_degrees degrees;
    char layout_reason[240];     /* empty: the options say the layout */
    hd_comm_local *world;        /* several ranks in this process; else NULL */
    hd_comm_ucx *ucx;            /* one rank of several processes; else NULL */
    engine_reopening *reopening; /* NULL without ucx */
    hd_weights *whole;           /* the complete model; of one rank, this is its own */
    bool updatable;
    int32_t threads;                   /* as in the options */
    hd_weights_backup *backup;         /* of weights that are given back; NULL: they are lost */
    hd_weights_changes *changes;       /* of rank 0 of several processes; else NULL */
    bool replay[HD_N_REPLAYS];         /* choices of every position are kept */
    size_t page_bytes[HD_N_KV_GROUPS]; /* of a page that leaves or arrives */
    bool whole_prompts, replays_prompts; /* of every position in the last layers; of a window */
    engine_rank *ranks;                  /* [n_ranks] those of this process */
    int32_t n_ranks;
    bool independent;      /* groups exchange nothing in steps (dwdp): rounds of their own */
    engine_router *router; /* NULL: one attention group */
    engine_remote *remote; /* NULL: all attention groups are in this process */

    /* owned by the polling thread: what the shown event points into, its choice, its request */
    engine_step_output event_post;
    engine_choice *shown_choice; /* NULL: none */
    engine_request *finished;    /* NULL: none; released together with the event */
    char why[600];

    /* guarded by the lock */
    pthread_mutex_t lock;
    pthread_cond_t wake, taken; /* signalled for step threads */
    pthread_cond_t ordered;     /* signalled for leaders of other groups than the first */
    pthread_cond_t posted;      /* signalled for the polling thread */
    engine_request *requests;   /* [n_records] */
    int32_t *free;
    int32_t n_free;
    int32_t n_living; /* choices submitted whose last step output was not taken */
    uint64_t arrivals;
    engine_group *groups; /* [n_groups] */
    int32_t n_groups;
    int32_t n_present;                      /* the first of them: those that have ranks */
    hd_world_figures figures;               /* size 0: no world of processes */
    hd_rank_status seats[HD_UCX_MAX_RANKS]; /* of its ranks; figures are not kept here */
    bool news;                              /* a mailbox holds something new */
    engine_order order;                     /* of the last round */
    uint64_t recoveries;                    /* after which every group begins anew */
    uint64_t recovered_in;                  /* round of the last recovery */
    bool recovered;                         /* the last one was of use */
    engine_step_output *posts;              /* ring of step outputs */
    int32_t first_post, n_posts, cap_posts;
    engine_update update;
    engine_version *versions; /* all names so far */
    const char *version;      /* of the weights, as of the last step */
    pthread_cond_t updated;   /* signalled for hd_engine_update_weights() */
    uint64_t weights_mark;    /* see hd_page_job.weights */
    hd_page_source source;    /* fetch NULL: none */
    int32_t n_fetching;       /* choices that wait for pages */
    bool paused, draining, woken, closing;
    uint64_t pauses;   /* requested */
    int64_t paused_ns; /* when the pause began */
};

/* Alternatives of a step of one choice, at most. */
static inline size_t engine_post_tops(const hd_engine *e) {
    return (size_t)HD_MAX_STEP_TOKENS * (size_t)e->max_logprobs;
}

/* An id: the request's use count, its index, the choice's index. Stale ids match nothing. */
enum { ENGINE_CHOICE_BITS = 6, ENGINE_MAX_LIVING = 1 << 20 };
_Static_assert(HD_MAX_CHOICES == 1 << ENGINE_CHOICE_BITS, "an id holds the choice's index");

/* id: of a request or a choice */
engine_request *engine_request_of(hd_engine *e, uint64_t id);
static inline int32_t engine_choice_of(uint64_t id) {
    return (int32_t)(id & (HD_MAX_CHOICES - 1));
}

/* engine.c */
void engine_deinit_request(hd_engine *e, engine_request *r); /* frees what it has */
void engine_drop_request(hd_engine *e, engine_request *r);
void engine_tell(hd_engine *e); /* mail has come; the caller holds the lock */
/* the caller holds the lock */
void engine_cancel_choice(hd_engine *e, engine_request *r, int32_t choice);

/* prepare.c */
hd_status engine_prepare(hd_engine *e, engine_request *r, const hd_request *g,
                         const hd_conversation *conversation, hd_err *err);

/* sampling_constraint.c */
hd_status engine_build_constraint(hd_engine *e, engine_request *r, const hd_request *g,
                                  hd_err *err);

/* step_loop.c; to->top keeps its memory */
void engine_step_output_copy(engine_step_output *to, const engine_step_output *from);

/* update.c */
void engine_versions_close(hd_engine *e);
/* Refuses by the hindrance of the first group, which must have one. */
hd_status engine_refuse_hindered(const hd_engine *e, hd_err *err);

/* poll.c */
void engine_drop_shown(hd_engine *e);

#endif
