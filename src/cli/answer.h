/* answer.h - runs one choice on a terminal: submits the request, prints deltas as they
 * arrive, and keeps the text. */
#ifndef HD_CLI_ANSWER_H
#define HD_CLI_ANSWER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "hadal.h"

typedef struct answer {
    char *content, *reasoning; /* malloc'ed, never NULL after answer_run() succeeded */
    int64_t first_ns, end_ns;  /* since it was submitted */
    int32_t prompt_tokens, cached_tokens, output_tokens, drafted, accepted;
    hd_finish_reason finish_reason;
    bool stopped; /* Ctrl-C stopped it */
} answer;

/* Runs g to its end. Reasoning is dimmed, or labelled if the terminal cannot dim. A bar shows
 * the progress of the prefill if standard output and error are terminals. The choice ends when
 * *stop becomes true. Release with answer_deinit(), also after an error. */
hd_status answer_run(answer *out, hd_engine *e, const hd_request *g, const volatile int *stop,
                     hd_err *err);
void answer_deinit(answer *a);

#endif
