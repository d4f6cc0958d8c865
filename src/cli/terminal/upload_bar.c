/* upload_bar.c - see upload_bar.h. */
#include "cli/terminal/upload_bar.h"

enum { MIN_BYTES = 500000000 };

void upload_bar_draw(void *bar, size_t done, size_t total) {
    upload_bar *b = bar;
    if (total < MIN_BYTES) return;
    if (!b->drawn) {
        hd_progress_init(&b->progress, "weights to the GPU", "bytes", (int64_t)total, b->quiet);
        b->drawn = true;
    }
    hd_progress_add(&b->progress, (int64_t)done - b->progress.done);
    if (done == total) hd_progress_end(&b->progress);
}
