/* cores.h - CPU topology: which processors to compute on, thread binding, NUMA interleaving.
 *
 * It selects one processor of every physical core that this thread may run on. A second
 * hardware thread of a core shares its arithmetic units and caches and would only wait. It
 * uses no more than a control group's CPU quota pays for, as throttled threads would make
 * all others wait. */
#ifndef HD_BASE_CORES_H
#define HD_BASE_CORES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

HD_BEGIN_C

enum { HD_MAX_CPUS = 1024 };

typedef struct hd_cores {
    int32_t cpu[HD_MAX_CPUS]; /* [n_places] one of each core, ascending */
    int32_t n_places;
    int32_t n;           /* how many of them the quota pays for, at least 1 */
    unsigned long nodes; /* NUMA nodes of those processors: bit i is node i */
} hd_cores;

typedef struct hd_machine {
    const char *synthetic; /* hwloc's synthetic topology: "core:4 pu:2" */
    const char *allowed;   /* processors that the thread may run on: "0-3,8" */
    const char *root;      /* prefix of /proc and /sys, where quotas are read */
} hd_machine;

/* Reads the topology. m: a described machine for tests, NULL: this one. Limits that cannot
 * be read are ignored. */
void hd_cores_read(hd_cores *out, const hd_machine *m);
int32_t hd_cores_count(void); /* hd_cores.n of this machine */

/* Binds the calling thread to one processor; returns false if that is refused. */
bool hd_cores_bind(int32_t cpu);

/* Interleaves new memory of this thread, and of threads that it starts, over all NUMA nodes.
 * Returns false, and changes nothing, if there is one node or a policy is already set. */
bool hd_cores_interleave(const hd_cores *c);
void hd_cores_end_interleave(void);

HD_END_C

#endif
