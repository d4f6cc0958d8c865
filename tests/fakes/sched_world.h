/* sched_world.h - what the scheduler lives in while it is tested: a device whose memory remembers,
 * clients, a clock, faults.
 *
 * The model is an oracle: the next token is a hash of all tokens before it, so the right answer
 * of every request is known. The memory is simulated too: a row writes a hash of its whole
 * prefix into the pages it was given, and reads every page a real row would read. Every promise
 * of sched.h is checked when it could be broken: at each step, each event, each turn. */
#ifndef HD_TESTS_FAKES_SCHED_WORLD_H
#define HD_TESTS_FAKES_SCHED_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "sched/sched.h"

enum { MAX_CLIENTS = 40, MAX_LEN = 240, MAX_CELLS = 8192, N_TEXTS = 16 };

typedef struct client {
    uint64_t id, salt; /* ids grow with arrival; 0: nobody */
    int32_t tokens[MAX_LEN];
    uint64_t hash[MAX_LEN]; /* of salt and tokens up to here: what the pages must hold */
    int32_t n_prompt, n_tokens, max_new, priority;
    int32_t drafts;                 /* or HD_SCHED_AUTO_DRAFTS */
    uint64_t leader;                /* whom it follows; 0: nobody */
    int32_t score_from, n_scored;   /* 0: no scores; prompt tokens that have theirs */
    int64_t deadline, entered;      /* when: it must be admitted; it was, the last time */
    bool cancelled, admitted, left; /* admitted: at least once; left: its slot in this turn */
    int32_t n_cached;               /* of the prompt, when its first row was computed */
    int32_t slot, n_done;           /* -1: none, not known yet */
    int32_t rows, pending;          /* in this step */
    bool prefills;
    int32_t steps_on_top; /* in a row, as the most important that runs */
} client;

/* How often something happens: once in so many turns; 0: never. */
typedef struct world_habits {
    uint32_t submit, cancel, flush, fail_one, fail_all, refuse, deadline, follow_up;
    uint32_t follow, score, automatic;
    int32_t longest_prompt, longest_answer, priorities;
    uint32_t wrong_draft, few_drafts;
} world_habits;

/* A text that ended, which a later prompt may go on from. */
typedef struct world_text {
    int32_t tokens[MAX_LEN], n;
    uint64_t salt;
} world_text;

/* What a runner that is a step ahead still writes of a request, whatever becomes of it. */
typedef struct world_ahead {
    int32_t from, to; /* positions */
    int32_t pages[HD_N_KV_GROUPS][MAX_LEN];
} world_ahead;

typedef struct world {
    hd_sched *sched;
    hd_sched_options o;
    world_habits habits;
    uint64_t memory[HD_N_KV_GROUPS][MAX_CELLS], snapshots[MAX_CELLS];
    int64_t written[HD_N_KV_GROUPS][MAX_CELLS]; /* by page: the last step and work */
    world_ahead ahead[MAX_CLIENTS];             /* of the works of the last step */
    int32_t n_ahead;
    client clients[MAX_CLIENTS];
    client *seated[MAX_CLIENTS]; /* by slot */
    world_text texts[N_TEXTS];
    float scores[MAX_CLIENTS * MAX_LEN]; /* of this step */
    uint64_t seed, draws, arrivals, digest;
    int64_t now, steps, rows, events, copies;
    int64_t finished[HD_FINISH_ERROR + 1], retracted, drafted, accepted, hits, scored, followed;
    bool stepped, failed, fail_next, fail_one;
} world;

/* Options and habits of a swarm: half of what can go wrong is off in any one run. */
void world_draw(world *w, uint64_t seed);

/* Opens the scheduler with w->o; world_close() ends everything without a trace. */
void world_open(world *w);
void world_close(world *w);

/* A request of the client's prompt; also checks that it is taken or refused as it should be. */
hd_status world_submit(world *w, client *c);
client *world_free_client(world *w); /* all zero; NULL: everybody is busy */
void world_set_prompt(client *c, const int32_t *tokens, int32_t n);

void world_cancel(world *w, client *c);
void world_step(world *w); /* one turn and every check behind it */
void world_act(world *w);  /* whatever the clients feel like, then a turn */

/* Nothing goes wrong any more: everything that lives must end, and every page come home. */
void world_heal(world *w);

void world_check_cache(world *w);

#endif
