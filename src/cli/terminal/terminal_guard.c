/* terminal_guard.c - see terminal_guard.h. */
#include "cli/terminal/terminal_guard.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"

/* Descriptors + 1, so that 0 is none. */
static volatile sig_atomic_t dimmed, changed;
static struct termios modes; /* of `changed`, as they were */

static void write_escape(const char *escape) {
    const int before = errno;
    if (dimmed && write(dimmed - 1, escape, strlen(escape)) < 0) errno = before;
}

/* Here and in its callers: only what is safe in a handler. */
static void restore(void) {
    write_escape(TERMINAL_PLAIN);
    if (changed) tcsetattr(changed - 1, TCSANOW, &modes);
}

/* The handler is gone by now, so the signal ends the process when this returns. */
static void on_end(int number) {
    restore();
    raise(number);
}

static void on_bus_error(int number) {
    static const char text[] =
        "error: a mapped file was cut short or cannot be read any more\n";
    (void)number;
    restore();
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written;
    _exit(4);
}

void terminal_guard_catch_bus_errors(void) {
    const struct sigaction ours = {.sa_handler = on_bus_error};
    sigaction(SIGBUS, &ours, NULL);
}

static void catch_signal(int number, void (*handler)(int), int flags) {
    struct sigaction now;
    const struct sigaction ours = {.sa_handler = handler, .sa_flags = flags};
    const bool plain = sigaction(number, NULL, &now) == 0 && now.sa_handler == SIG_DFL;
    if (plain) sigaction(number, &ours, NULL);
}

/* The shell gets the terminal as it was; the process goes on with it as it is now. */
static void on_stop(int number) {
    const int before = errno;
    sigset_t set;
    struct termios now;
    const bool known = changed && tcgetattr(changed - 1, &now) == 0;
    restore();
    sigemptyset(&set);
    sigaddset(&set, number);
    signal(number, SIG_DFL);
    raise(number);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL); /* stops here */
    catch_signal(number, on_stop, SA_RESTART);
    if (known) tcsetattr(changed - 1, TCSANOW, &now);
    write_escape(TERMINAL_DIM);
    errno = before;
}

static void catch_signals(void) {
    static const int ends[] = {SIGINT,  SIGTERM, SIGHUP, SIGQUIT, SIGSEGV,
                               SIGABRT, SIGFPE,  SIGILL, SIGBUS};
    for (size_t i = 0; i < HD_LEN(ends); i++) catch_signal(ends[i], on_end, (int)SA_RESETHAND);
    catch_signal(SIGTSTP, on_stop, SA_RESTART);
}

void terminal_guard_dim(int fd) {
    if (fd >= 0) catch_signals();
    dimmed = fd + 1;
}

void terminal_guard_modes(int fd, const struct termios *before) {
    changed = 0; /* not while the modes are written */
    if (!before) return;
    modes = *before;
    catch_signals();
    changed = fd + 1;
}
