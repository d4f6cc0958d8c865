/* sched_world.h - a simulation around the scheduler for tests: a device with checked KV
 * memory, clients, a clock, faults.
 *
 * The model is an oracle: the next token is a hash of all tokens before it, so the right
 * answer of every request is known. The memory is simulated too: a row writes a hash of its
 * complete prefix into its pages, and reads every page that a real row would read. Every
 * guarantee of sched.h is checked whenever it could be violated: at each step and each
 * event. */
#ifndef HD_TESTS_FAKES_SCHED_WORLD_H
#define HD_TESTS_FAKES_SCHED_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "sched/sched.h"

enum { MAX_CLIENTS = 40, MAX_LEN = 240, MAX_CELLS = 8192, N_TEXTS = 16 };

typedef struct client {
    uint64_t id, salt; /* ids grow with arrival; 0: unused */
    int32_t tokens[MAX_LEN];
    uint64_t hash[MAX_LEN]; /* of salt and tokens up to here: what the pages must hold */
    int32_t n_prompt, n_tokens, max_new, priority;
    int32_t drafts;  /* or HD_DRAFTS_AUTO */
    uint64_t leader; /* the request it follows; 0: none */
    /* first prompt token with a reported log-probability, 0: none; number reported so far */
    int32_t prompt_logprobs_from, n_reported;
    int64_t deadline, entered;      /* queue timeout; time of the last admission */
    bool cancelled, admitted, left; /* admitted: at least once; left: its slot in this step */
    int32_t n_cached;               /* cached prompt tokens when its first row was computed */
    int32_t slot, n_done;           /* -1: none, not known yet */
    int32_t rows, pending;          /* in this step */
    bool prefills, as_announced;    /* its rows in this step are those that were announced */
    int32_t announced;
    bool unread;          /* a step that had rows of it could not read what it needed */
    int32_t steps_on_top; /* consecutive steps as the most important running request */
} client;

/* How often something happens: once in so many steps; 0: never. */
typedef struct world_habits {
    uint32_t submit, cancel, flush, fail_one, fail_all, fail_read, give_up, refuse, deadline,
        follow_up;
    uint32_t follow, score, automatic;
    int32_t longest_prompt, longest_answer, priorities;
    uint32_t wrong_draft, few_drafts;
    uint32_t row_time, copy_time; /* what each adds to a step's time of 1 */
} world_habits;

/* A finished text that a later prompt may continue. */
typedef struct world_text {
    int32_t tokens[MAX_LEN], n;
    uint64_t salt;
} world_text;

/* Positions that a runner one step ahead still writes for a request, even if it ends. */
typedef struct world_ahead {
    int32_t from, to; /* positions */
    int32_t pages[HD_N_KV_GROUPS][MAX_LEN];
} world_ahead;

typedef struct world {
    hd_sched *sched;
    hd_sched_options o;
    world_habits habits;
    uint64_t memory[HD_N_KV_GROUPS][MAX_CELLS], host[HD_N_KV_GROUPS][MAX_CELLS];
    hd_kv_tail tail;
    /* of the WINDOW cells: a bit for every layer with a tail that stored its vector */
    uint8_t layers[MAX_CELLS], host_layers[MAX_CELLS];
    int64_t written[HD_N_KV_GROUPS][MAX_CELLS]; /* by page: the last step and sequence input */
    world_ahead ahead[MAX_CLIENTS];             /* of the sequence inputs of the last step */
    int32_t n_ahead;
    client clients[MAX_CLIENTS];
    client *seated[MAX_CLIENTS]; /* by slot */
    world_text texts[N_TEXTS];
    float prompt_logprobs[MAX_CLIENTS * MAX_LEN]; /* log-probabilities of this step */
    uint64_t seed, draws, arrivals, digest;
    int64_t now, took, steps, rows, events, copies;
    int64_t skipped;  /* rows that the last layer did not compute */
    int64_t rebuilds; /* requests that began to rebuild a window */
    int64_t finished[HD_FINISH_ERROR + 1], retracted, drafted, accepted, hits, scored, followed,
        unread; /* rows of steps that could not read what they needed */
    bool stepped, failed, read_failed, gave_up, fail_next, fail_read, fail_one, give_up_next;
} world;

/* Draws options and habits: half of the faults are off in any one run. */
void world_draw(world *w, uint64_t seed);

/* Opens the scheduler with w->o; world_close() ends everything. */
void world_open(world *w);
void world_close(world *w);

/* Submits a client's request; also checks that it is accepted or refused as it should be. */
hd_status world_submit(world *w, client *c);
client *world_free_client(world *w); /* all zero; NULL: all clients are in use */
void world_set_prompt(client *c, const int32_t *tokens, int32_t n);

void world_cancel(world *w, client *c);
void world_step(world *w); /* one step and every check after it */
void world_act(world *w);  /* random actions of the clients, then a step */

/* Turns all faults off: every unfinished request must finish, and every page must be freed. */
void world_heal(world *w);

void world_check_cache(world *w);

#endif
