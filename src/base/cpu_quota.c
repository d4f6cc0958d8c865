/* cpu_quota.c - reads cgroup quotas under /proc and /sys; see cpu_quota.h. */
#include "base/cpu_quota.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

enum { MAX_BYTES = 1 << 16, MAX_PATH = 512 };

/* Reads root + path; NULL if it cannot be read. The caller frees it. */
static char *read_text(const char *root, const char *path) {
    char whole[MAX_PATH], *text;
    size_t n;
    if (snprintf(whole, sizeof whole, "%s%s", root, path) >= MAX_PATH) return NULL;
    return hd_file_read(&text, &n, whole, MAX_BYTES, NULL) == HD_OK ? text : NULL;
}

/* Returns the processors that "QUOTA PERIOD" allows; 0: no limit. */
static double parse_quota(const char *quota, const char *period) {
    const double q = strtod(quota, NULL), p = strtod(period, NULL);
    return q > 0 && p > 0 ? q / p : 0;
}

static double smaller(double a, double b) {
    return a > 0 && (b <= 0 || a < b) ? a : b;
}

/* Reads the quota of one group, in the files of either version. */
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

/* Returns the least quota of a group and its parents. Inside a container the path may be one
 * of the host's, which does not exist there; its root does. */
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
double hd_cpu_quota_read(const char *root) {
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
