/* progress.h - how far a long job is: a bar on a terminal, plain lines elsewhere.
 *
 * On a terminal one line is redrawn at most ten times a second and never wider than it; in a file
 * or pipe a line is written at every tenth of the way. Owned by one thread. Output goes to
 * standard error. */
#ifndef HD_BASE_PROGRESS_H
#define HD_BASE_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct hd_progress {
    const char *label; /* outlives the job */
    const char *unit;  /* "tokens"; "bytes" are shown as kB, MB, GB */
    int64_t total;
    int64_t done;
    int64_t begun; /* of done: what was there before the job, no part of its speed */
    int64_t start_ns, drawn_ns;
    int32_t tenths; /* last tenth written where there is no terminal */
    bool terminal, quiet;
} hd_progress;

/* quiet: count, but draw nothing. */
void hd_progress_init(hd_progress *p, const char *label, const char *unit, int64_t total,
                      bool quiet);
void hd_progress_add(hd_progress *p, int64_t amount); /* negative: some of it was lost */
void hd_progress_clear(
    hd_progress *p); /* erases the bar, so that something else can be written */
void hd_progress_end(hd_progress *p); /* the same; in a log, one closing line */

/* Monotonic time in nanoseconds. */
int64_t hd_now_ns(void);

#endif
