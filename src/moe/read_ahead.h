/* read_ahead.h - how many of the experts that a prediction names to read before their layer begins.
 *
 * What is read ahead is read in the `lead`: the time from when a layer has all its experts until the
 * next layer begins. A right expert then takes min(lead, read) less of that layer's time, `read`
 * being the time of one; a wrong one, still on its way, delays the others by read - lead at most. With
 * the part p of predictions that are right, reading ahead pays if
 *
 *     p min(lead, read) > (1 - p) max(0, read - lead),    or    lead > (1 - p) read.
 *
 * What a wrong one takes the place of may be needed too, so p must also be above 1/2. Then as many are
 * read as the lead has room for, and one more. All three are measured. */
#ifndef HD_MOE_READ_AHEAD_H
#define HD_MOE_READ_AHEAD_H

#include <stdint.h>

/* All zeros: nothing is known yet. Old layers count less than new ones. */
typedef struct hd_read_ahead {
    double predicted, right; /* experts that were elsewhere */
    double lead_ns, leads;   /* sum, and number */
} hd_read_ahead;

/* A layer began: so many experts had been predicted, of which so many were right, `lead_ns` after the
 * layer before it had its own. */
void hd_read_ahead_learn(hd_read_ahead *r, int32_t predicted, int32_t right, int64_t lead_ns);

/* Returns how many to read. read_ns: the time of one, while several are read. 0: it does not pay, or
 * nothing was learned. */
int32_t hd_read_ahead_most(const hd_read_ahead *r, double read_ns);

#endif
