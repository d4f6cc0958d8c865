/* crowd.h - requests that share an executor, each in a slot of its own, without a scheduler: the
 * test says who drafts what, who is cut in which chunks and who is put back. */
#ifndef HD_TESTS_FAKES_CROWD_H
#define HD_TESTS_FAKES_CROWD_H

#include "check.h"

#include "runner/model_runner.h"

enum {
    SLOTS = 4,
    POSITIONS = 441, /* with drafts behind it a whole number of pages of 64 */
    MAX_PAGES = 128,
    STEP_ROWS = 160,
    TOPS = HD_MAX_TOP_LOGPROBS,
    /* the ids of every test model that are not text */
    BOS = 0,
    EOS = 1,
    THINK = 2,
    UNTHINK = 3
};

typedef struct machine {
    hd_model_spec *spec;
    hd_weights *weights;
    hd_ops ops;
    hd_device *device;
    hd_stream *stream;
    hd_grammar_vocab *vocab;
    hd_model_runner *executor;
    int32_t pages[SLOTS][MAX_PAGES];
    int32_t seq_pages, n_ids;
    int64_t rows; /* computed so far */
} machine;

/* A model of tests/golden. */
void open_machine(machine *m, const char *name, float forced_acceptance);

/* The same on a backend; fixed: in steps of fixed shapes, which a GPU records and the CPU
 * repeats from a tape (tape.h). */
void open_machine_on(machine *m, const char *backend, const char *name, float forced_acceptance,
                     bool fixed);
void close_machine(machine *m);

/* The id of a one-byte token, and the text of tokens without those that are no text. */
int32_t id_of(char c);
void text_of(const int32_t *tokens, int32_t n, char *out); /* NUL-terminated */

/* The logits after each of tokens[n], [n, vocab], in one piece; free() them. */
float *logits_of(const machine *m, const int32_t *tokens, int32_t n);
double log_softmax(const machine *m, const float *logits, int32_t id);

typedef struct request {
    hd_constraint constraint;
    hd_request_sampling choosing;
    int32_t n_drafts;      /* by the MTP layer, or */
    const int32_t *oracle; /* of this text [POSITIONS] instead, */
    int32_t one_wrong_in;  /* now and then another token */
    int32_t chunk;         /* 0: all rows */
    int32_t score_from;    /* 0: no scores */
    int32_t ahead;         /* positions with pages behind what a step needs; 0: all there are */

    int32_t slot, n_prompt, most; /* most: tokens of the text */
    int32_t text[POSITIONS], n, done;
    float logprob[POSITIONS]; /* of every scored or chosen token */
    int32_t top_id[POSITIONS][TOPS];
    float top_logprob[POSITIONS][TOPS];
    int32_t drafts[HD_MAX_DRAFTS], n_next;
    int32_t steps, drafted, accepted;
    hd_status status;
    bool ended;
} request;

/* A prompt of n random tokens; greedy, without guide or drafts, until the end of sequence. */
void init_request(request *r, const machine *m, int32_t slot, int32_t n_prompt, uint64_t seed);

/* Into its slot, with the text it has: at first, and after a retraction. */
void enter(machine *m, request *r);

/* One step for all that have not ended; those of a step that fails stay where they were. */
hd_status try_step(machine *m, request *requests, int32_t n, hd_err *err);
void step(machine *m, request *requests, int32_t n); /* the same, and it must not fail */
void run_all(machine *m, request *requests, int32_t n);

#endif
