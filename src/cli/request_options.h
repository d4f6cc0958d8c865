/* request_options.h - options that set a sampling parameter, with the engine's ranges. */
#ifndef HD_CLI_REQUEST_OPTIONS_H
#define HD_CLI_REQUEST_OPTIONS_H

#include "cli/options.h"

option option_temperature(double *value);
option option_top_p(double *value);
option option_min_p(double *value);
option option_top_k(int64_t *value);
option option_max_tokens(int64_t *value, const char *help);
option option_max_reasoning(int64_t *value);

#endif
