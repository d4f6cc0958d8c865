/* job.h - the life of an answer: prompts are submitted, events are collected, and a format
 * writes what the endpoint's clients expect, whole or as a stream.
 *
 * A job is made on an HTTP thread and from then on belongs to the polling thread, except for
 * cancelling, which may come from anywhere. It ends when the last of its prompts did, also when
 * the client is long gone. */
#ifndef HD_API_JOB_H
#define HD_API_JOB_H

#include <pthread.h>
#include <stdatomic.h>

#include "api/request.h"
#include "api/text.h"

typedef struct api_job api_job;

/* A stretch of one kind: neighbors of the same kind are one piece. */
typedef struct api_piece {
    hd_delta_kind kind; /* no notes */
    int32_t call;
    bool whole;      /* of the end of a call */
    size_t start, n; /* in the choice's text */
} api_piece;

typedef struct api_choice {
    int32_t index, prompt; /* of the answer; of the prompt it belongs to */

    /* What came since the last chunk; without a stream, all of it. */
    api_text text, ids;      /* ids: JSON items */
    api_text logprobs, tops; /* as the format keeps them */
    api_piece *pieces;
    size_t n_pieces, cap_pieces;
    int32_t n_pending; /* tokens */

    int32_t n_calls; /* whole ones */
    bool in_reasoning;
    bool opened;                        /* the format's: its first chunk is out */
    api_text prompt_scores, kept, item; /* the format's own, as is the next */
    int32_t place;
    int32_t n_blocks, open_block; /* see api_walk_blocks() */

    hd_end end;
    int32_t stop_token;
    api_text stop_text;
    int32_t prompt_tokens, cached_tokens, output_tokens, reasoning_tokens, retracted;
    int32_t drafted, accepted, draft_steps;
    int64_t last_ns;
} api_choice;

typedef struct api_format {
    const char *endpoint, *id_prefix, *object, *chunk_object;
    http_shape shape;
    void (*logprob)(api_job *job, api_choice *c, const hd_event *e, size_t i);
    void (*prompt_logprobs)(api_job *job, api_choice *c, const hd_event *e);
    void (*begin)(api_job *job);                /* of a stream; may be NULL */
    void (*chunk)(api_job *job, api_choice *c); /* what came; writes to job->out */
    void (*finish)(api_job *job, api_choice *c);
    void (*end)(api_job *job);
    void (*fail)(api_job *job); /* inside a stream */
    void (*reply)(api_job *job);
    void (*accept)(api_job *job); /* of one in the background: it can be asked for */
    void (*deinit)(void *state);  /* may be NULL */
    bool cumulative;              /* a chunk repeats all that came */
} api_format;

typedef struct api_sub { /* one prompt, one request of the engine */
    api_job *job;
    atomic_uint_least64_t id;
    int32_t first_choice;
    int32_t prompt_tokens;
} api_sub;

struct api_job {
    const api_format *format;
    http_call *call;
    api_context *ctx;
    api_wishes w;
    api_text head; /* the unchanging beginning of a chunk */
    api_text out;
    api_text prompt_ids; /* JSON items, where they are asked for */
    void *state;         /* the format's own */
    char id[API_MAX_ID + 24];
    const char *model;
    int64_t created; /* Unix seconds */
    uint64_t nonce;

    api_sub *subs;
    api_choice *choices;
    int32_t n_subs, n_choices;

    atomic_int refs; /* the submitter's and one per living sub */
    atomic_bool gone, cancelled;
    bool began;
    bool accepted; /* in the background, and its client has an answer */
    api_refusal failure;
    pthread_mutex_t failing; /* guards failure: submitter and poller may both have one */
    api_outcome outcome;
};

/* Submits and arranges for the answer. The request may be closed afterwards; on a refusal it
 * has been answered. prompt_ids and state are moved in; either may be NULL, and format->deinit
 * gets state, also on a refusal. */
void api_job_start(api_request *r, const api_format *format, const api_prompt *prompts,
                   int32_t n, api_text *prompt_ids, void *state);

/* From any thread, as long as the job lives. */
void api_job_cancel(api_job *job);

/* ---- for formats ---- */

const char *api_finish_reason(const api_choice *c); /* OpenAI's words */
void api_call_id(const api_job *job, const api_choice *c, int32_t call, const char *prefix,
                 char out[40]);
const char *api_piece_text(const api_choice *c, const api_piece *p);
/* All text of a kind, joined. */
void api_put_joined(api_text *out, const api_choice *c, hd_delta_kind kind, int32_t call);
void api_put_usage(api_text *out, const api_job *job); /* OpenAI's object */
void api_put_matched_stop(api_text *out, const api_choice *c);
void api_put_token(api_text *out, const api_context *ctx, int32_t token); /* its text */
void api_put_error(api_text *out, const api_job *job); /* OpenAI's object of the failure */
void api_put_list(api_text *out, const char *key, const api_text *items); /* ,"key":[items] */

typedef struct api_totals {
    int64_t prompt, cached, output, reasoning, drafted, accepted, draft_steps;
} api_totals;
api_totals api_job_totals(const api_job *job);

bool api_render_ids(api_request *r, hd_ids *ids); /* of the conversation */
void api_put_ids(api_text *out, const int32_t *ids, size_t n);
void api_chat_logprob(api_job *job, api_choice *c, const hd_event *e, size_t i);
void api_openai_end(api_job *job);
void api_openai_fail(api_job *job);

/* For interfaces that list blocks: reasoning, text and calls in their order. Neighboring pieces
 * of one kind are one block; a call is one from its name to its end. */
typedef struct api_block_writer {
    void (*open)(api_job *job, api_choice *c, const api_piece *p); /* call: p is its name */
    void (*delta)(api_job *job, api_choice *c, const api_piece *p);
    void (*close)(api_job *job, api_choice *c, hd_delta_kind kind, bool whole);
} api_block_writer;

void api_walk_blocks(api_job *job, api_choice *c, const api_block_writer *w);
void api_close_block(api_job *job, api_choice *c, const api_block_writer *w);

/* Frames a server-sent event around what writers put between the two. */
void api_data_begin(api_job *job, const char *event); /* event: its name, or NULL */
void api_data_end(api_job *job);

#endif
