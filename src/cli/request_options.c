/* request_options.c - see request_options.h. */
#include "cli/request_options.h"

#include <stddef.h>

#include "engine/request_ranges.h"

#define FIELD(field) hd_request_range_of(offsetof(hd_request, field))

static option real(const char *name, double *value, const hd_request_range *r,
                   const char *help) {
    return option_real(name, value, r->low, r->high, help);
}

static option count(const char *name, int64_t *value, const hd_request_range *r,
                    const char *help) {
    return option_int(name, value, (int64_t)r->low, (int64_t)r->high, help);
}

option option_temperature(double *value) {
    return real("temperature", value, FIELD(temperature), "0: greedy");
}

option option_top_p(double *value) {
    return real("top-p", value, FIELD(top_p), "smallest set of this probability");
}

option option_min_p(double *value) {
    return real("min-p", value, FIELD(min_p),
                "tokens of this share of the best one's probability");
}

option option_top_k(int64_t *value) {
    return count("top-k", value, FIELD(top_k), "K most probable tokens; 0: all");
}

option option_max_tokens(int64_t *value, const char *help) {
    return count("max-tokens", value, FIELD(max_tokens), help);
}

option option_max_reasoning(int64_t *value) {
    return count("max-reasoning", value, FIELD(max_reasoning),
                 "tokens of reasoning, then it is ended; 0: no bound");
}
