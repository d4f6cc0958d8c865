/* cores.h - which processors a process should compute on, and memory on machines of several
 * nodes.
 *
 * One processor of every physical core that this thread may run on: a second thread of a core
 * shares its arithmetic and its caches, and would only wait beside it. No more than a quota of
 * processor time (a control group's) pays for, as threads that are stopped in turn would make
 * all others wait. */
#ifndef HD_BASE_CORES_H
#define HD_BASE_CORES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

HD_BEGIN_C

enum { HD_MAX_CPUS = 1024 };

typedef struct hd_cores {
    int32_t cpu[HD_MAX_CPUS]; /* [n_places] one of each core, by rising number */
    int32_t n_places;
    int32_t n;           /* of them that the quota pays for, at least 1 */
    unsigned long nodes; /* of memory, of those processors: bit i is node i */
} hd_cores;

typedef struct hd_machine {
    const char *synthetic; /* hwloc's description: "core:4 pu:2" */
    const char *allowed;   /* processors that the thread may run on: "0-3,8" */
    const char *root;      /* before /proc and /sys, where quotas are */
} hd_machine;

/* m: another machine than this one, NULL: this one. What cannot be found out does not bind. */
void hd_cores_read(hd_cores *out, const hd_machine *m);
int32_t hd_cores_count(void); /* n of this machine */

/* Binds the calling thread to one processor; false where that is refused. */
bool hd_cores_bind(int32_t cpu);

/* From now on this thread's fresh memory, and that of threads it starts, goes to all nodes in
 * turn. False where there is one node, or somebody chose already: then nothing was changed. */
bool hd_cores_interleave(const hd_cores *c);
void hd_cores_end_interleave(void);

HD_END_C

#endif
