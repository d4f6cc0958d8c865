/* cores.c - CPU topology by hwloc; see cores.h. */
#include "base/cores.h"

#include <hwloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cpu_quota.h"

enum { MEMORY_OF_THREAD = HWLOC_MEMBIND_THREAD | HWLOC_MEMBIND_BYNODESET };

/* ---- the machine ---- */

/* Without a sysfs that lists processors, hwloc's Linux backend complains on standard error.
 * Its other backends, which query the processor, do not. */
static void leave_out_missing_sysfs(hwloc_topology_t t) {
    static const char *const places[] = {"/sys/bus/cpu/devices/cpu0/topology",
                                         "/sys/devices/system/cpu/cpu0/topology"};
    for (size_t i = 0; i < HD_LEN(places); i++) {
        if (access(places[i], R_OK | X_OK) == 0) return;
    }
    hwloc_topology_set_components(t, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "linux");
}

/* Returns NULL if the topology cannot be read. */
static hwloc_topology_t load_topology(const char *synthetic) {
    hwloc_topology_t t;
    if (hwloc_topology_init(&t) != 0) return NULL;
    if (!synthetic) leave_out_missing_sysfs(t);
    if ((!synthetic || hwloc_topology_set_synthetic(t, synthetic) == 0) &&
        hwloc_topology_load(t) == 0) {
        return t;
    }
    hwloc_topology_destroy(t);
    return NULL;
}

static hwloc_topology_t here;

static void load_here(void) {
    here = load_topology(NULL);
}

/* This machine's topology, loaded once and kept. */
static hwloc_topology_t this_machine(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load_here);
    return here;
}

/* ---- processors ---- */

static bool read_allowed(hwloc_topology_t t, const hd_machine *m, hwloc_bitmap_t cpus) {
    const int asked = m ? hwloc_bitmap_list_sscanf(cpus, m->allowed)
                        : hwloc_get_cpubind(t, cpus, HWLOC_CPUBIND_THREAD);
    if (asked != 0) hwloc_bitmap_copy(cpus, hwloc_topology_get_allowed_cpuset(t));
    hwloc_bitmap_and(cpus, cpus, hwloc_topology_get_topology_cpuset(t));
    return !hwloc_bitmap_iszero(cpus);
}

static void read_places(hd_cores *out, hwloc_topology_t t, const hd_machine *m) {
    hwloc_bitmap_t cpus = hwloc_bitmap_alloc(), nodes = hwloc_bitmap_alloc();
    if (cpus && nodes && read_allowed(t, m, cpus)) {
        hwloc_cpuset_to_nodeset(t, cpus, nodes);
        out->nodes = hwloc_bitmap_to_ulong(nodes);
        hwloc_bitmap_singlify_per_core(t, cpus, 0);
        int cpu = -1;
        while (out->n_places < HD_MAX_CPUS && (cpu = hwloc_bitmap_next(cpus, cpu)) >= 0) {
            out->cpu[out->n_places++] = cpu;
        }
    }
    hwloc_bitmap_free(cpus);
    hwloc_bitmap_free(nodes);
}

void hd_cores_read(hd_cores *out, const hd_machine *m) {
    hwloc_topology_t t = m ? load_topology(m->synthetic) : this_machine();
    *out = (hd_cores){.n = 0};
    if (t) read_places(out, t, m);
    if (m && t) hwloc_topology_destroy(t);
    if (out->n_places == 0) out->n_places = 1;
    const double quota = hd_cpu_quota_read(m ? m->root : "");
    out->n = quota > 0 && quota < out->n_places ? (int32_t)quota : out->n_places;
    if (out->n < 1) out->n = 1;
}

int32_t hd_cores_count(void) {
    hd_cores c;
    hd_cores_read(&c, NULL);
    return c.n;
}

/* ---- binding ---- */

bool hd_cores_bind(int32_t cpu) {
    hwloc_topology_t t = this_machine();
    hwloc_bitmap_t one = hwloc_bitmap_alloc();
    const bool bound = t && one && hwloc_bitmap_only(one, (unsigned)cpu) == 0 &&
                       hwloc_set_cpubind(t, one, HWLOC_CPUBIND_THREAD) == 0;
    hwloc_bitmap_free(one);
    return bound;
}

/* Without a policy, a thread's memory comes from the node that first touches it. */
static bool has_policy(hwloc_topology_t t, hwloc_bitmap_t nodes) {
    hwloc_membind_policy_t policy;
    return hwloc_get_membind(t, nodes, &policy, MEMORY_OF_THREAD) != 0 ||
           policy != HWLOC_MEMBIND_FIRSTTOUCH;
}

bool hd_cores_interleave(const hd_cores *c) {
    hwloc_topology_t t = this_machine();
    hwloc_bitmap_t nodes = hwloc_bitmap_alloc();
    bool done = t && nodes && (c->nodes & (c->nodes - 1)) != 0 && !has_policy(t, nodes);
    if (done) {
        hwloc_bitmap_from_ulong(nodes, c->nodes);
        done = hwloc_set_membind(t, nodes, HWLOC_MEMBIND_INTERLEAVE, MEMORY_OF_THREAD) == 0;
    }
    hwloc_bitmap_free(nodes);
    return done;
}

void hd_cores_end_interleave(void) {
    hwloc_topology_t t = this_machine();
    hwloc_set_membind(t, hwloc_topology_get_topology_nodeset(t), HWLOC_MEMBIND_DEFAULT,
                      MEMORY_OF_THREAD);
}
