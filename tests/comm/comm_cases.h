/* comm_cases.h - what every backend of comm.h must do, as programs of a rank: each call gives
 * every rank what one thread computes from the data of all, in every group of every layout. */
#ifndef HD_TESTS_COMM_CASES_H
#define HD_TESTS_COMM_CASES_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/comm.h"
#include "fakes/staged_comm.h"

enum { COMM_MAX_RANKS = 8, COMM_ROUNDS = 30, COMM_LAYOUTS = 11, COMM_TERMS = 8 };

typedef struct comm_rank comm_rank;

struct comm_rank {
    int32_t number;
    hd_parallel_config parallel;
    void (*run)(comm_rank *r);
    uint64_t seed; /* of the round; the same on all ranks */
    int32_t rounds, victim;
    const hd_comm *comm;
    hd_device *device;
    hd_stream *stream;
    hd_ops ops;
    staged_comm *staged; /* NULL: exchanges read and write host memory */
    bool in_messages;    /* rows travel so, and are not read where they lie */
    char wrong[240];     /* the first thing that was not as expected */
};

extern const hd_parallel_config comm_layouts[COMM_LAYOUTS];

/* A number below `below` that depends on the others. */
uint32_t comm_draw(uint64_t seed, int64_t i, uint32_t below);
void comm_expect(comm_rank *r, bool holds, const char *what, int64_t at);
/* Memory that the host and the ranks' exchanges read and write. */
void *comm_take(const comm_rank *r, size_t bytes);
void comm_give(const comm_rank *r, void *p);
void comm_sleep_ms(int32_t ms);
int64_t comm_cpu_time_ns(void); /* of this thread */

void comm_call_at_random(comm_rank *r); /* `rounds` calls */
void comm_add_terms(comm_rank *r);      /* COMM_TERMS terms over tp ranks */
void comm_lose_a_rank(comm_rank *r);    /* the victim ends early */
void comm_overflow(comm_rank *r);       /* rank 1 has room for one row */
void comm_come_late(comm_rank *r);      /* the victim comes late; waiting takes no time */
void comm_dispatch_in_rounds(comm_rank *r);
void comm_dispatch_many(comm_rank *r);   /* rows of an expert-parallel layout */
void comm_count_exchanges(comm_rank *r); /* calls, bytes and waiting, which are counted */

#endif
