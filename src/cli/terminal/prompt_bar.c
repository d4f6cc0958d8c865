/* prompt_bar.c - see prompt_bar.h. */
#include "cli/terminal/prompt_bar.h"

enum { MIN_TOKENS = 512 };

void prompt_bar_draw(prompt_bar *b, hd_engine *e) {
    hd_request_status r;
    if (hd_engine_read_requests(e, &r, 1) != 1) return;
    if (r.phase != HD_PHASE_PREFILL || r.prompt_tokens < MIN_TOKENS) return;
    if (!b->drawn) {
        hd_progress_init(&b->progress, "reading the prompt", "tokens", r.prompt_tokens,
                         b->quiet);
        b->drawn = true;
    }
    hd_progress_add(&b->progress, r.done_tokens - b->progress.done);
}

void prompt_bar_end(prompt_bar *b) {
    if (b->drawn) hd_progress_end(&b->progress);
    b->drawn = false;
}
