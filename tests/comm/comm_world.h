/* comm_world.h - the programs of comm_cases.h on the ranks of a world, each a process. */
#ifndef HD_TESTS_COMM_WORLD_H
#define HD_TESTS_COMM_WORLD_H

#include <sys/types.h>

#include "comm_cases.h"

typedef struct comm_world {
    char at[32];
    const char *transports, *secret;
    int32_t silence_ms, wait_ms;
    /* Ranks have memory that only exchanges between GPUs reach: that of fakes/ipc_device.h, or of GPUs if
     * HADAL_BACKEND asks for them. */
    bool on_gpus;
    comm_rank like;
} comm_world;

/* A free port; another process may take it before rank 0 does, which did not happen yet. */
void comm_find_port(char at[32]);

/* Opens the device, the stream and the operators of a rank. Returns why not, or NULL. */
const char *comm_open_device(bool on_gpus, int32_t number, hd_device **d, hd_stream **s,
                             hd_ops *ops);

/* All ranks must end well. */
void comm_run_world(const comm_world *like);

comm_rank *comm_share_ranks(void); /* [COMM_MAX_RANKS], with the processes */
void comm_start_ranks(const comm_world *w, comm_rank *ranks, pid_t *pids);
/* All but `lost` (-1: none) must end well. */
void comm_join_ranks(const comm_world *w, comm_rank *ranks, const pid_t *pids, int32_t lost);

/* Three ranks add; the victim gets a signal in the middle, and the others must end with its number. */
void comm_lose(int signal, int32_t victim, int32_t silence_ms, const comm_world *like);

#endif
