/* cpu_quota.h - how much processor time a process may use: the quotas of its control groups. */
#ifndef HD_BASE_CPU_QUOTA_H
#define HD_BASE_CPU_QUOTA_H

#include "base/status.h"

HD_BEGIN_C

/* In processors, 1.5 is one and a half of them; 0: no bound, or none that can be read. root stands
 * before /proc and /sys; "" is this machine. */
double hd_cpu_quota_read(const char *root);

HD_END_C

#endif
