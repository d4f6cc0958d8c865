/* prompt_bar.h - progress bar of the prefill of a long prompt. */
#ifndef HD_CLI_TERMINAL_PROMPT_BAR_H
#define HD_CLI_TERMINAL_PROMPT_BAR_H

#include "base/progress.h"
#include "hadal.h"

enum { PROMPT_BAR_LOOK_NS = 100 * 1000 * 1000 }; /* a poll of this duration returned no event */

typedef struct prompt_bar {
    hd_progress progress;
    bool quiet, drawn;
} prompt_bar;

/* Call after a poll without an event: draws how much of the most important request's prompt is
 * computed, if it is long. */
void prompt_bar_draw(prompt_bar *b, hd_engine *e);
void prompt_bar_end(prompt_bar *b); /* call it before other output */

#endif
