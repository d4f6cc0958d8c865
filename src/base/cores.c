/* cores.c - see cores.h. Reads what Linux says about itself under /proc and /sys. */
#define _GNU_SOURCE /* processor affinity */
#include "base/cores.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/file.h"

enum { MAX_BYTES = 1 << 16, MAX_PATH = 512 };
enum { POLICY_DEFAULT = 0, POLICY_INTERLEAVE = 3 }; /* of memory, to the kernel */

typedef struct cpus {
    bool has[HD_MAX_CPUS];
    int32_t n;
} cpus;

/* root + a path; NULL when it cannot be read. The caller's. */
static char *read_text(const char *root, const char *path) {
    char whole[MAX_PATH], *text;
    size_t n;
    if (snprintf(whole, sizeof whole, "%s%s", root, path) >= MAX_PATH) return NULL;
    return hd_file_read(&text, &n, whole, MAX_BYTES, NULL) == HD_OK ? text : NULL;
}

/* "0-3,8,10-11" */
static void parse_list(cpus *out, const char *text) {
    *out = (cpus){.n = 0};
    while (*text >= '0' && *text <= '9') {
        char *end;
        const long first = strtol(text, &end, 10);
        const long last = *end == '-' ? strtol(end + 1, &end, 10) : first;
        for (long i = first; i <= last && i < HD_MAX_CPUS; i++) {
            out->n += !out->has[i];
            out->has[i] = true;
        }
        if (*end != ',') return;
        text = end + 1;
    }
}

static bool read_list(cpus *out, const char *root, const char *path) {
    char *text = read_text(root, path);
    if (!text) return false;
    parse_list(out, text);
    free(text);
    return out->n > 0;
}

/* ---- processors ---- */

/* What this thread is allowed, or all that are there. */
static void read_allowed(cpus *out, const char *root) {
    static const char key[] = "\nCpus_allowed_list:";
    char *status = read_text(root, "/proc/thread-self/status");
    const char *line = status ? strstr(status, key) : NULL;
    out->n = 0;
    if (line) {
        line += sizeof key - 1;
        parse_list(out, line + strspn(line, " \t"));
    }
    free(status);
    if (out->n == 0 && !read_list(out, root, "/sys/devices/system/cpu/online")) {
        parse_list(out, "0");
    }
}

/* Whether a lower allowed processor is a thread of the same core. */
static bool is_second(const char *root, const cpus *allowed, int32_t cpu) {
    char path[96];
    cpus core;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
             cpu);
    if (!read_list(&core, root, path)) return false;
    for (int32_t i = 0; i < cpu; i++) {
        if (core.has[i] && allowed->has[i]) return true;
    }
    return false;
}

static uint64_t read_nodes(const char *root, const cpus *allowed) {
    uint64_t nodes = 0;
    for (int32_t i = 0; i < HD_MAX_NODES; i++) {
        char path[64];
        cpus node;
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", i);
        if (!read_list(&node, root, path)) continue;
        for (int32_t c = 0; c < HD_MAX_CPUS; c++) {
            if (node.has[c] && allowed->has[c]) nodes |= (uint64_t)1 << i;
        }
    }
    return nodes;
}

/* ---- the quota ---- */

/* Processors that "QUOTA PERIOD" allows; 0: no bound. */
static double parse_quota(const char *quota, const char *period) {
    const double q = strtod(quota, NULL), p = strtod(period, NULL);
    return q > 0 && p > 0 ? q / p : 0;
}

static double smaller(double a, double b) {
    return a > 0 && (b <= 0 || a < b) ? a : b;
}

/* The quota of one group, in either version's files. */
static double read_group(const char *root, const char *mount, const char *group) {
    char path[MAX_PATH];
    double quota = 0;
    snprintf(path, sizeof path, "/sys/fs/cgroup%s%s/cpu.max", mount, group);
    char *text = read_text(root, path); /* "max 100000" has no number first */
    const char *space = text ? strchr(text, ' ') : NULL;
    if (space) quota = parse_quota(text, space + 1);
    free(text);
    snprintf(path, sizeof path, "/sys/fs/cgroup%s%s/cpu.cfs_quota_us", mount, group);
    text = read_text(root, path);
    snprintf(path, sizeof path, "/sys/fs/cgroup%s%s/cpu.cfs_period_us", mount, group);
    char *period = read_text(root, path);
    if (text && period) quota = smaller(parse_quota(text, period), quota);
    free(text);
    free(period);
    return quota;
}

/* The least of a group and those it lies in. Inside a container the path may be one of the
 * host's, which is not there; its root is. */
static double read_path(const char *root, const char *mount, char *group) {
    double quota = 0;
    for (;;) {
        quota = smaller(read_group(root, mount, group), quota);
        char *slash = strrchr(group, '/');
        if (!slash) return quota;
        *slash = '\0';
    }
}

/* Lines of "ID:CONTROLLERS:PATH"; version 2 has no controllers and no folder for them. */
static double read_quota(const char *root) {
    char *text = read_text(root, "/proc/self/cgroup"), *save = NULL;
    double quota = 0;
    for (char *line = text ? strtok_r(text, "\n", &save) : NULL; line;
         line = strtok_r(NULL, "\n", &save)) {
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group) continue;
        *group++ = '\0';
        names++;
        if (*names == '\0') quota = smaller(read_path(root, "", group), quota);
        if (strcmp(names, "cpu") == 0 || strncmp(names, "cpu,", 4) == 0 ||
            strcmp(names, "cpuacct,cpu") == 0) {
            quota = smaller(read_path(root, "/cpu", group), quota);
        }
    }
    free(text);
    return quota;
}

void hd_cores_read(hd_cores *out, const char *root) {
    cpus allowed;
    *out = (hd_cores){.n = 0};
    read_allowed(&allowed, root);
    for (int32_t c = 0; c < HD_MAX_CPUS; c++) {
        if (allowed.has[c] && !is_second(root, &allowed, c)) out->cpu[out->n_places++] = c;
    }
    const double quota = read_quota(root);
    out->n = quota > 0 && quota < out->n_places ? (int32_t)quota : out->n_places;
    if (out->n < 1) out->n = 1;
    out->nodes = read_nodes(root, &allowed);
}

int32_t hd_cores_count(void) {
    hd_cores c;
    hd_cores_read(&c, "");
    return c.n;
}

/* ---- asking the kernel ---- */

bool hd_cores_bind(int32_t cpu) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)cpu, &one);
    return sched_setaffinity(0, sizeof one, &one) == 0;
}

bool hd_cores_interleave(const hd_cores *c) {
    int policy = POLICY_DEFAULT;
    const uint64_t nodes = c->nodes;
    if ((nodes & (nodes - 1)) == 0) return false;
    if (syscall(SYS_get_mempolicy, &policy, NULL, 0UL, NULL, 0UL) != 0) return false;
    if (policy != POLICY_DEFAULT) return false;
    return syscall(SYS_set_mempolicy, POLICY_INTERLEAVE, &nodes, HD_MAX_NODES + 1UL) == 0;
}

void hd_cores_end_interleave(void) {
    syscall(SYS_set_mempolicy, POLICY_DEFAULT, NULL, 0UL);
}
