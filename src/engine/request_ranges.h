/* request_ranges.h - the ranges of the numbers in an hd_request, each in one row. The engine
 * checks them. The command line, the HTTP parameters and /openapi.json read them. */
#ifndef HD_ENGINE_REQUEST_RANGES_H
#define HD_ENGINE_REQUEST_RANGES_H

#include <hadal.h>

#include "base/status.h"

typedef struct hd_request_range {
    const char *name;
    size_t at; /* offset in hd_request */
    bool real; /* a float; else an int32_t */
    double low, high;
    /* What the HTTP API accepts, if that differs; both 0: the same. */
    double http_low, http_high;
} hd_request_range;

/* Returns the row of the field at this offset; NULL: the field has no range. */
const hd_request_range *hd_request_range_of(size_t at);

/* Refuses the first number outside of its range, by name. */
hd_status hd_request_check_ranges(const hd_request *g, hd_err *err);

#endif
