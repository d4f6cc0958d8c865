/* terminal_guard.h - a terminal is left as it was found: signals that end or stop the process first
 * undo its dimming and the modes of line editing. Signals with a handler of their own are left
 * to it. One thread sets what is undone; any thread may get the signal. */
#ifndef HD_CLI_TERMINAL_TERMINAL_GUARD_H
#define HD_CLI_TERMINAL_TERMINAL_GUARD_H

#include <termios.h>

#define TERMINAL_DIM   "\033[2m"
#define TERMINAL_PLAIN "\033[0m"

/* What is written to the terminal fd from now on is dimmed. -1: no longer. */
void terminal_guard_dim(int fd);

/* The modes that fd had before they were changed. NULL: they were set back. */
void terminal_guard_modes(int fd, const struct termios *before);

/* From now on SIGBUS, which the process gets if a mapped file is truncated while it is read,
 * undoes both, prints an error and exits with 4. */
void terminal_guard_catch_bus_errors(void);

#endif
