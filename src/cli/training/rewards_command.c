/* rewards_command.c - rewards of one process: questions go to its standard input line by line, and
 * replies come from its standard output, in the same order. It is started without a shell, has these
 * pipes and nothing else that is open here, and is killed with its children when it fails: by a
 * bad reply, a late one, or its end. Then another one gets the questions that are left. What it
 * writes to its standard error is quoted in the reason. */
#define _GNU_SOURCE /* posix_spawn_file_actions_addclosefrom_np */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/progress.h"
#include "cli/training/rewards_internal.h"
#include "tokenizer/tokenizer.h"
#include "train/reward.h"

enum { MOST_WORDS = 64, LAST_BYTES = 300, READ_BYTES = 8192 };

typedef enum stream { TO, FROM, ERRORS, N_STREAMS } stream;

struct reward_command {
    rewards_options o;
    char *words; /* of argv */
    char *argv[MOST_WORDS + 1];
    pid_t pid; /* 0: none runs */
    int fd[N_STREAMS];
    char last[LAST_BYTES + 1]; /* of its standard error */
    size_t n_last;
    hd_bytes questions; /* that are not answered, line by line */
    size_t written;
    hd_bytes reply; /* of which no line feed came yet */
    char why[700];
};

/* ---- the command line ---- */

/* Takes a word off the front: to a blank that is not between quotes. */
static char *next_word(char **at) {
    char *from = *at, *to, quote = '\0';
    while (*from == ' ' || *from == '\t') from++;
    if (!*from) return NULL;
    char *word = to = from;
    for (; *from && (quote || (*from != ' ' && *from != '\t')); from++) {
        if (quote ? *from == quote : *from == '\'' || *from == '"') {
            quote = quote ? '\0' : *from;
        } else {
            *to++ = *from;
        }
    }
    *at = from + (*from != '\0');
    *to = '\0';
    return word;
}

static hd_status split(reward_command *c, hd_err *err) {
    int n = 0;
    c->words = strdup(c->o.command);
    if (!c->words) return HD_FAIL(err, HD_ENOMEM, "no memory for a command");
    char *at = c->words;
    for (char *word; n < MOST_WORDS && (word = next_word(&at));) c->argv[n++] = word;
    if (n == 0) return HD_FAIL(err, HD_EINVAL, "--reward-command is empty");
    if (n < MOST_WORDS) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "--reward-command has more than %d words", MOST_WORDS - 1);
}

/* ---- the process ---- */

static hd_status open_pipes(int child[N_STREAMS], reward_command *c, hd_err *err) {
    for (int i = 0; i < N_STREAMS; i++) child[i] = c->fd[i] = -1;
    for (int i = 0; i < N_STREAMS; i++) {
        int ends[2];
        if (pipe(ends) != 0) return HD_FAIL(err, HD_EIO, "no pipe: %s", strerror(errno));
        const int theirs = ends[i == TO ? 0 : 1];
        c->fd[i] = ends[i == TO ? 1 : 0];
        child[i] = fcntl(theirs, F_DUPFD_CLOEXEC, N_STREAMS); /* none that it gets */
        close(theirs);
        if (child[i] < 0) return HD_FAIL(err, HD_EIO, "no pipe: %s", strerror(errno));
        fcntl(c->fd[i], F_SETFD, FD_CLOEXEC);
        fcntl(c->fd[i], F_SETFL, O_NONBLOCK);
    }
    return HD_OK;
}

static void close_all(int fd[N_STREAMS]) {
    for (int i = 0; i < N_STREAMS; i++) {
        if (fd[i] >= 0) close(fd[i]);
        fd[i] = -1;
    }
}

/* A process group of its own, default signals, and no files but the three. */
static int spawn(reward_command *c, const int child[N_STREAMS]) {
    extern char **environ;
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attributes);
    for (int i = 0; i < N_STREAMS; i++) {
        posix_spawn_file_actions_adddup2(&files, child[i], i);
    }
    posix_spawn_file_actions_addclosefrom_np(&files, N_STREAMS);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF |
                                              POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setsigmask(&attributes, &none);
    const int why = posix_spawnp(&c->pid, c->argv[0], &files, &attributes, c->argv, environ);
    if (why != 0) c->pid = 0;
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    return why;
}

static hd_status start(reward_command *c, hd_err *err) {
    int child[N_STREAMS];
    hd_status st = open_pipes(child, c, err);
    const int why = st == HD_OK ? spawn(c, child) : 0;
    if (why != 0) {
        st = HD_FAIL(err, HD_EINVAL, "--reward-command: %s: %s", c->argv[0], strerror(why));
    }
    close_all(child);
    if (st != HD_OK) close_all(c->fd);
    c->n_last = c->written = c->reply.n = 0;
    return st;
}

static void end(reward_command *c) {
    if (c->pid) {
        kill(-c->pid, SIGKILL);
        while (waitpid(c->pid, NULL, 0) < 0 && errno == EINTR) {
        }
    }
    c->pid = 0;
    close_all(c->fd);
}

/* ---- talking ---- */

static bool fails(reward_command *c, const char *why) {
    c->last[c->n_last] = '\0';
    snprintf(c->why, sizeof c->why, "%.300s%s%s", why, c->n_last ? "; it wrote: " : "",
             c->last);
    return false;
}

static bool write_some(reward_command *c) {
    const ssize_t n =
        write(c->fd[TO], c->questions.data + c->written, c->questions.n - c->written);
    if (n > 0) c->written += (size_t)n;
    return n >= 0 || errno == EAGAIN || errno == EINTR || errno == EPIPE; /* its end follows */
}

/* Keeps the end of what it says to people. */
static void read_errors(reward_command *c) {
    char text[READ_BYTES];
    const ssize_t n = read(c->fd[ERRORS], text, sizeof text);
    if (n <= 0) {
        if (n == 0) {
            close(c->fd[ERRORS]);
            c->fd[ERRORS] = -1;
        }
        return;
    }
    const size_t add = (size_t)n < LAST_BYTES ? (size_t)n : LAST_BYTES;
    const size_t keep = c->n_last + add > LAST_BYTES ? LAST_BYTES - add : c->n_last;
    memmove(c->last, c->last + c->n_last - keep, keep);
    memcpy(c->last + keep, text + (size_t)n - add, add);
    c->n_last = keep + add;
}

/* Takes the replies that are complete off c->reply. */
static bool take_replies(reward_command *c, reward_question *q, int32_t n, int32_t *next) {
    for (char *line;
         c->reply.n > 0 && (line = memchr(c->reply.data, '\n', c->reply.n)) != NULL;) {
        hd_err why = {0};
        const size_t bytes = (size_t)(line - (char *)c->reply.data);
        if (*next == n) return fails(c, "a reply that was not asked for");
        reward_question *now = &q[*next];
        if (hd_reward_reply(now->rewards, now->n, now->id, (const char *)c->reply.data, bytes,
                            &why) != HD_OK) {
            return fails(c, why.msg);
        }
        ++*next;
        c->reply.n -= bytes + 1;
        memmove(c->reply.data, line + 1, c->reply.n);
    }
    return c->reply.n <= HD_MOST_REWARD_BYTES || fails(c, "a reply without an end");
}

static bool read_some(reward_command *c, reward_question *q, int32_t n, int32_t *next) {
    char text[READ_BYTES];
    const ssize_t got = read(c->fd[FROM], text, sizeof text);
    if (got < 0) return errno == EAGAIN || errno == EINTR || fails(c, strerror(errno));
    if (got == 0) return fails(c, "the command ended");
    if (hd_bytes_append(&c->reply, text, (size_t)got, NULL) != HD_OK) {
        return fails(c, "no memory for a reply");
    }
    return take_replies(c, q, n, next);
}

/* Waits until something can be written or read; false: the reply is late. */
static bool wait_for_more(reward_command *c, struct pollfd p[N_STREAMS], int64_t due_ns) {
    const bool writes = c->written < c->questions.n;
    p[TO] = (struct pollfd){.fd = writes ? c->fd[TO] : -1, .events = POLLOUT};
    p[FROM] = (struct pollfd){.fd = c->fd[FROM], .events = POLLIN};
    p[ERRORS] = (struct pollfd){.fd = c->fd[ERRORS], .events = POLLIN};
    const int64_t left = (due_ns - hd_now_ns()) / 1000000;
    if (left < 0) return fails(c, "no reply in time");
    if (poll(p, N_STREAMS, (int)(left < 60000 ? left + 1 : 60000)) >= 0) return true;
    for (int i = 0; i < N_STREAMS; i++) p[i].revents = 0; /* a signal */
    return true;
}

/* Asks q[*next, n). False: the process failed at question *next, as c->why says. */
static bool talk(reward_command *c, reward_question *q, int32_t n, int32_t *next) {
    struct pollfd p[N_STREAMS];
    const int64_t patience = (int64_t)(c->o.timeout_s * 1e9);
    int64_t due = hd_now_ns() + patience;
    while (*next < n) {
        const int32_t before = *next;
        if (!wait_for_more(c, p, due)) return false;
        if (p[ERRORS].revents) read_errors(c);
        if (p[TO].revents && !write_some(c)) return fails(c, strerror(errno));
        if (p[FROM].revents && !read_some(c, q, n, next)) return false;
        if (*next > before) due = hd_now_ns() + patience;
    }
    return true;
}

static hd_status collect(reward_command *c, const reward_question *q, int32_t n, hd_err *err) {
    c->questions.n = c->written = 0;
    for (int32_t i = 0; i < n; i++) {
        HD_TRY(hd_bytes_append(&c->questions, q[i].text, strlen(q[i].text), err));
        HD_TRY(hd_bytes_append(&c->questions, "\n", 1, err));
    }
    return HD_OK;
}

hd_status reward_command_ask(reward_command *c, reward_question *q, int32_t n, hd_err *err) {
    int32_t next = 0;
    while (next < n) {
        int64_t pause;
        if (!c->pid) HD_TRY(start(c, err));
        HD_TRY(collect(c, q + next, n - next, err));
        if (talk(c, q, n, &next)) return HD_OK;
        end(c);
        HD_TRY(rewards_failed(&c->o, &q[next], c->why, &pause, err));
        if (q[next].dropped) {
            next++;
            continue;
        }
        nanosleep(&(struct timespec){pause / 1000000000, pause % 1000000000}, NULL);
    }
    return HD_OK;
}

/* ---- opening ---- */

hd_status reward_command_open(reward_command **out, const rewards_options *o, hd_err *err) {
    reward_command *c = calloc(1, sizeof *c);
    if (!c) return HD_FAIL(err, HD_ENOMEM, "no memory for a command");
    *out = c;
    c->o = *o;
    for (int i = 0; i < N_STREAMS; i++) c->fd[i] = -1;
    signal(SIGPIPE, SIG_IGN); /* a process that ended is seen by its pipes */
    HD_TRY(split(c, err));
    return start(c, err);
}

void reward_command_close(reward_command *c) {
    if (!c) return;
    end(c);
    free(c->words);
    hd_bytes_deinit(&c->questions);
    hd_bytes_deinit(&c->reply);
    free(c);
}
