/* names.h - names that stand for several servers, as a Kubernetes service without an address of its
 * own does: a thread resolves them again every second. A name that does not resolve is told of in the
 * log, and changes nothing else. */
#ifndef HD_COMM_NAMES_H
#define HD_COMM_NAMES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

/* What such a name begins with in a list of servers. */
#define HD_NAMES_PREFIX "dns:"

enum { HD_NAMES_MAX = 16, HD_NAMES_SERVERS = 64, HD_NAMES_BYTES = 272 };

/* The servers of a name: "ADDRESS:PORT", in brackets where it is IPv6. */
typedef struct hd_resolved {
    char names[HD_NAMES_SERVERS][HD_NAMES_BYTES];
    int32_t n;
} hd_resolved;

bool hd_resolved_has(const hd_resolved *r, const char *server);

typedef struct hd_names hd_names;

/* addresses [n]: "HOST:PORT", at most HD_NAMES_MAX; copied. found() is called on the thread whenever
 * number i has been resolved, and may wait, but not for hd_names_stop(). */
hd_status hd_names_start(hd_names **out, const char *const *addresses, int32_t n,
                         void (*found)(void *ctx, int32_t i, const hd_resolved *servers),
                         void *ctx, hd_err *err);

/* found() is not called any more. NULL is fine. */
void hd_names_stop(hd_names *n);

#endif
