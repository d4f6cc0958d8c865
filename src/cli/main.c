/* main.c - finds and runs the requested command. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal/terminal_guard.h"

static void print_usage(FILE *to) {
    fputs("hadal serves the DeepSeek mixture-of-experts models.\n\n"
          "usage: hadal COMMAND [arguments]\n\ncommands:\n",
          to);
    size_t n;
    const command *all = commands_all(&n);
    for (size_t i = 0; i < n; i++) {
        if (!all[i].help) continue;
        fprintf(to, "  %-11s %-29s %s\n", all[i].name, all[i].args, all[i].help);
    }
    fputs("\nhadal COMMAND --help explains one command.\n", to);
}

static int unknown_command(const char *name) {
    const char *names[MOST_COMMANDS + 2] = {"--help", "--version"};
    size_t n;
    const command *all = commands_all(&n);
    for (size_t i = 0; i < n; i++) names[i + 2] = all[i].name;
    const char *near = nearest_word(name, names, (int)n + 2);
    hd_err err = {0};
    HD_FAIL(&err, HD_EINVAL, "unknown command '%s'; %s%s%s", name,
            near ? "did you mean " : "see hadal --help", near ? near : "", near ? "?" : "");
    return report_error(&err);
}

/* Files opened later must not get descriptors 0 to 2, to which others write. */
static void ensure_standard_descriptors(void) {
    int fd;
    do {
        fd = open("/dev/null", O_RDWR);
    } while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd > STDERR_FILENO) close(fd);
}

/* Output that could not be written (full disk, closed pipe) must be reported as a failure. */
static int flush_output(int code) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    hd_err err = {0};
    HD_FAIL(&err, HD_EIO, "cannot write to standard output");
    int failed = report_error(&err);
    return code ? code : failed;
}

int main(int argc, char **argv) {
    ensure_standard_descriptors();
    terminal_guard_catch_bus_errors();
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error of that write only, */
    signal(SIGXFSZ, SIG_IGN); /* and so is the limit of file sizes (ulimit -f) */
    if (argc < 2) {
        print_usage(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "help") || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        print_usage(stdout);
        return flush_output(0);
    }
    const char *name = strcmp(argv[1], "--version") == 0 ? "version" : argv[1];
    size_t n;
    const command *all = commands_all(&n);
    for (size_t i = 0; i < n; i++) {
        if (strcmp(name, all[i].name) == 0) {
            return flush_output(all[i].run(argc - 1, argv + 1));
        }
    }
    return unknown_command(argv[1]);
}
