/* fingerprint.h - tells whether two folders hold the same model, reading little of its
 * weights. */
#ifndef HD_WEIGHTS_FINGERPRINT_H
#define HD_WEIGHTS_FINGERPRINT_H

#include <stdint.h>

#include "base/status.h"

/* Hashes config.json, the tokenizer, and of every weight file, a drafter's in its folder too, the name,
 * the size, the first 64 KiB, which begin with the table of its tensors, and 64 samples of 4 KiB, the
 * last at its end. Other
 * values are not seen: a manifest does that. model_dir may be a config.json alone. */
hd_status hd_model_fingerprint(uint64_t *out, const char *model_dir, hd_err *err);

/* Hashes the names of the weight files and when they were changed last: files that were written
 * again have another hash, also if the fingerprint does not see what differs. */
hd_status hd_weights_change_times(uint64_t *out, const char *model_dir, hd_err *err);

#endif
