/* line_editor.h - reads input lines, with editing and history on a terminal. */
#ifndef HD_CLI_TERMINAL_LINE_EDITOR_H
#define HD_CLI_TERMINAL_LINE_EDITOR_H

#include "base/status.h"

typedef struct line_editor line_editor;

typedef enum line_read { LINE_READ, LINE_INTERRUPTED, LINE_END } line_read;

/* history: a file that keeps lines between runs; NULL: none. */
hd_status line_editor_open(line_editor **out, const char *history, hd_err *err);
void line_editor_close(line_editor *l); /* writes the history; NULL is fine */

/* prompt: at most 15 bytes. *line has no line end and is valid until the next call. Ctrl-C
 * returns INTERRUPTED, so SIGINT needs a handler that does not restart system calls. */
line_read line_editor_read(line_editor *l, const char *prompt, const char **line);

#endif
