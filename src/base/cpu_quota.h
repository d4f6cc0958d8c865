/* cpu_quota.h - the CPU quota of a process by its control groups (cgroup v1 and v2). */
#ifndef HD_BASE_CPU_QUOTA_H
#define HD_BASE_CPU_QUOTA_H

#include "base/status.h"

HD_BEGIN_C

/* Returns the quota in processors (1.5 is one and a half); 0: none, or it cannot be read.
 * root is a prefix of /proc and /sys; "" is this machine. */
double hd_cpu_quota_read(const char *root);

HD_END_C

#endif
