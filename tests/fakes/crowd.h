/* crowd.h - requests that share a model runner, each in its own slot, without a scheduler:
 * the test chooses drafts, prefill chunks and retractions. */
#ifndef HD_TESTS_FAKES_CROWD_H
#define HD_TESTS_FAKES_CROWD_H

#include "check.h"

#include "comm/local.h"
#include "model/expert_disk.h"
#include "model/expert_fetch.h"
#include "model/host_experts.h"
#include "runner/model_runner.h"

enum {
    SLOTS = 4,
    POSITIONS = 441, /* with drafts after it a multiple of the 64-token pages */
    MAX_PAGES = 128,
    STEP_ROWS = 160,
    TOPS = 25,
    /* the ids of every test model that are not text */
    BOS = 0,
    EOS = 1,
    THINK = 2,
    UNTHINK = 3
};

typedef struct machine {
    hd_model_spec *spec;
    hd_weights *weights;
    hd_weights *whole;             /* NULL: weights are */
    hd_expert_stage *stage;        /* NULL: all experts are resident */
    hd_host_experts *host_experts; /* NULL: the host computes no rows */
    hd_ops ops;
    hd_device *device;
    hd_stream *stream, *copy_stream; /* copy_stream: NULL without fetches */
    const hd_comm *comm;             /* NULL: alone */
    hd_grammar_vocab *vocab;
    hd_model_runner *model_runner;
    int32_t pages[HD_N_KV_GROUPS][SLOTS][MAX_PAGES];
    int32_t seq_pages, n_ids;
    int64_t rows; /* rows computed so far */
} machine;

/* A model of tests/golden. */
void open_machine(machine *m, const char *name, float forced_acceptance);

/* The same on a backend. fixed: steps of fixed shapes, which a GPU captures and the CPU
 * replays from a tape (tape.h). */
void open_machine_on(machine *m, const char *backend, const char *name, float forced_acceptance,
                     bool fixed);
/* The same with fixed steps and a precision. */
void open_machine_rounding(machine *m, const char *backend, const char *name,
                           hd_precision precision);
/* The same with every row of the vocabulary as a token, and without constraints. */
void open_machine_all_ids(machine *m, const char *name);
/* The same with experts that are elsewhere. */
void open_machine_staged(machine *m, const char *name, const hd_expert_disk_options *stage);
/* The same with experts in host memory, and memory for some of them on the device; experts 0: for
 * all. */
void open_machine_fetched(machine *m, const char *name, int32_t experts);

/* Whose experts that are not on the device are: it fetches them, shares with the host, or leaves all. */
typedef enum missing_experts { FETCHED, SHARED_WITH_HOST, LEFT_TO_HOST } missing_experts;

/* The same, but operators read them in place, and steps are captured. */
void open_machine_in_place(machine *m, const char *backend, const char *name,
                           hd_precision precision, int32_t experts, int32_t n_whole,
                           missing_experts missing);
/* One rank of several: the first of an attention group leads, and the others follow (hd_model_runner_follow). Steps have fixed
 * shapes, which a GPU captures and a CPU queues again each time. */
typedef struct machine_rank {
    hd_comm_local *world;
    hd_parallel_config parallel;
    int32_t number;
    int32_t n_micro; /* micro-batches of a step; 0: one */
} machine_rank;
void open_machine_rank(machine *m, const char *backend, const char *name,
                       float forced_acceptance, const machine_rank *rank);
void close_machine(machine *m);

/* Return the id of a one-byte token, and the text of tokens without special ones. */
int32_t id_of(char c);
void text_of(const int32_t *tokens, int32_t n, char *out); /* NUL-terminated */

/* Returns the logits after each of tokens[n], [n, vocab], computed in one batch; free()
 * them. */
float *logits_of(const machine *m, const int32_t *tokens, int32_t n);
double log_softmax(const machine *m, const float *logits, int32_t id);

typedef struct request {
    hd_constraint constraint;
    hd_request_sampling sampling;
    int32_t n_drafts;      /* drafts by the MTP layer, or */
    const int32_t *oracle; /* from this text [POSITIONS] instead, */
    int32_t one_wrong_in;  /* of which one in so many is wrong */
    int32_t chunk;         /* 0: all rows */
    bool announces;        /* a chunk says how many rows the next one has: */
    int32_t next_chunk;    /* so many at most; 0: as it has itself */
    /* first prompt token with a reported log-probability; 0: none */
    int32_t prompt_logprobs_from;
    hd_kv_ends ends;
    int32_t ahead; /* positions with pages after those of a step; 0: all */

    int32_t slot, n_prompt, most; /* most: tokens of the text, at most */
    int32_t text[POSITIONS], n, done;
    float logprob[POSITIONS]; /* log-probability of every reported or sampled token */
    hd_alternative top[POSITIONS][TOPS];
    int32_t drafts[HD_MAX_DRAFTS], n_next;
    int32_t steps, drafted, accepted;
    hd_status status;
    bool ended;
} request;

/* A prompt of n random tokens; greedy, without constraint or drafts, until the end of
 * sequence. */
void init_request(request *r, const machine *m, int32_t slot, int32_t n_prompt, uint64_t seed);

/* Enters a request in its slot with its text so far: first, or after a retraction. */
void enter(machine *m, request *r);

/* Runs one step for all unfinished requests; after a failed step they are unchanged. */
hd_status try_step(machine *m, request *requests, int32_t n, hd_err *err);
void step(machine *m, request *requests, int32_t n); /* the same, and it must not fail */
void run_all(machine *m, request *requests, int32_t n);

#endif
