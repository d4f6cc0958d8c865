/* upload_bar.c - see upload_bar.h. */
#include "cli/upload_bar.h"

enum { MB = 1000000, MIN_MB = 500 };

void upload_bar_draw(void *bar, size_t done, size_t total) {
    upload_bar *b = bar;
    if (total / MB < MIN_MB) return;
    if (!b->drawn) {
        hd_progress_init(&b->progress, "weights to the GPU", "MB", (int64_t)(total / MB),
                         b->quiet);
        b->drawn = true;
    }
    hd_progress_add(&b->progress, (int64_t)(done / MB) - b->progress.done);
    if (done == total) hd_progress_end(&b->progress);
}
