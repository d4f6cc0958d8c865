/* upload_bar.h - progress bar of the upload of weights to a GPU. */
#ifndef HD_CLI_TERMINAL_UPLOAD_BAR_H
#define HD_CLI_TERMINAL_UPLOAD_BAR_H

#include <stddef.h>

#include "base/progress.h"

typedef struct upload_bar {
    hd_progress progress;
    bool quiet, drawn;
} upload_bar;

/* For hd_engine_options.on_upload and hd_upload_watch, with an upload_bar as ctx. Small models
 * are uploaded before a bar is useful, and none is drawn. */
void upload_bar_draw(void *bar, size_t done, size_t total);

#endif
