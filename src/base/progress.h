/* progress.h - progress of a long job: a bar on a terminal, plain lines elsewhere.
 *
 * On a terminal one line, never wider than the terminal, is redrawn at most ten times per
 * second. In a file or pipe a line is written at every tenth of the job. Owned by one
 * thread. Output goes to standard error. */
#ifndef HD_BASE_PROGRESS_H
#define HD_BASE_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct hd_progress {
    const char *label; /* outlives the job */
    const char *unit;  /* "tokens"; "bytes" are shown as kB, MB, GB */
    int64_t total;
    int64_t done;
    int64_t begun; /* part of `done` from before the job, not counted in its speed */
    int64_t start_ns, drawn_ns;
    int32_t tenths; /* last tenth written if there is no terminal */
    bool terminal, quiet;
} hd_progress;

/* quiet: counts, but draws nothing. */
void hd_progress_init(hd_progress *p, const char *label, const char *unit, int64_t total,
                      bool quiet);
void hd_progress_add(hd_progress *p, int64_t amount); /* negative: progress was lost */
void hd_progress_clear(
    hd_progress *p); /* erases the bar, so that something else can be written */
void hd_progress_end(hd_progress *p); /* erases the bar; in a log, writes one closing line */

/* Monotonic time in nanoseconds. */
int64_t hd_now_ns(void);

/* The calling thread's processor time, which other programs do not lengthen. */
int64_t hd_thread_ns(void);

#endif
