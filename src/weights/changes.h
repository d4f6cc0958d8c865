/* changes.h - tensors that updates have changed, on their way to processes that have the same files.
 *
 * They travel as they are stored, in parts of some megabytes, each with whole tensors and their
 * scales. The number of a tensor is its place in the files. */
#ifndef HD_WEIGHTS_CHANGES_H
#define HD_WEIGHTS_CHANGES_H

#include "base/file.h"
#include "weights/update.h"

typedef struct hd_weights_changes hd_weights_changes;

hd_status hd_weights_changes_open(hd_weights_changes **out, const hd_weights *w, hd_err *err);
void hd_weights_changes_close(hd_weights_changes *c); /* NULL is fine */

/* What an update of w brings is due. */
void hd_weights_changes_add(hd_weights_changes *c, const hd_weights_update *u);
/* All that was ever added is due again. */
void hd_weights_changes_again(hd_weights_changes *c);
bool hd_weights_changes_are_due(const hd_weights_changes *c);

/* Takes the next part of what is due, with the values that w has now; out->bytes 0: nothing is. The
 * caller closes it. */
hd_status hd_weights_changes_take(hd_weights_changes *c, hd_map *out, hd_err *err);

/* Adds a part, which it takes, also on failure, to an update of weights of the same files.
 * HD_EFORMAT: it is none of these files. */
hd_status hd_weights_changes_read(hd_weights_update *u, const hd_weights *w, hd_map *part,
                                  hd_err *err);

#endif
