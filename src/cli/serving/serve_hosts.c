/* serve_hosts.c - see serve_hosts.h. */
#include "cli/serving/serve_hosts.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "tokenizer/tokenizer.h"

extern char **environ;

enum { MAX_RANKS = 64, MAX_WORDS = 512, NAME_BYTES = 256, EXIT_NO_RANK = 5 };

typedef struct other {
    _Atomic pid_t pid; /* 0: it has ended */
    char host[NAME_BYTES];
} other;

struct serve_hosts {
    other ranks[MAX_RANKS]; /* from 1 on */
    int32_t n;
    pthread_t watch, stopper;
    sem_t ends;
    bool stops; /* set before ends */
    atomic_bool ready;
};

/* ---- the command of a rank ---- */

/* What each rank has of its own, or gets in another way. */
static bool is_own(const char *word, bool *with_value) {
    static const char *const own[] = {"--hosts", "--rank-key-file"};
    for (size_t i = 0; i < HD_LEN(own); i++) {
        const size_t n = strlen(own[i]);
        if (strncmp(word, own[i], n) != 0 || (word[n] && word[n] != '=')) continue;
        *with_value = word[n] == '\0';
        return true;
    }
    return false;
}

typedef struct words {
    const char *at[MAX_WORDS];
    int n;
    char rank[16], world[16], program[4096];
} words;

static hd_status add_word(words *w, const char *word, hd_err *err) {
    if (w->n == MAX_WORDS - 1) return HD_FAIL(err, HD_EINVAL, "more than %d words", MAX_WORDS);
    w->at[w->n++] = word;
    return HD_OK;
}

static hd_status command_of(words *w, const serve_hosts_args *a, int32_t rank, hd_err *err) {
    const ssize_t n = readlink("/proc/self/exe", w->program, sizeof w->program - 1);
    if (n <= 0) return HD_FAIL(err, HD_EIO, "the program's own path: %s", strerror(errno));
    w->program[n] = '\0';
    w->n = 0;
    snprintf(w->rank, sizeof w->rank, "%d", rank);
    snprintf(w->world, sizeof w->world, "%d", a->n_ranks);
    HD_TRY(add_word(w, w->program, err));
    const char *const first[] = {"serve", "--hosts", "",      "--rank",
                                 w->rank, "--world", w->world};
    for (size_t i = 0; i < HD_LEN(first); i++) HD_TRY(add_word(w, first[i], err));
    for (int i = 1; i < a->argc; i++) {
        bool with_value;
        if (is_own(a->argv[i], &with_value)) {
            i += with_value;
        } else {
            HD_TRY(add_word(w, a->argv[i], err));
        }
    }
    w->at[w->n] = NULL;
    return HD_OK;
}

/* For a shell: between single quotes nothing has a meaning but the quote. */
static hd_status quote(hd_bytes *to, const char *word, hd_err *err) {
    HD_TRY(hd_bytes_append(to, " '", 2, err));
    for (const char *p = word; *p; p++) {
        HD_TRY(*p == '\'' ? hd_bytes_append(to, "'\\''", 4, err)
                          : hd_bytes_append(to, p, 1, err));
    }
    return hd_bytes_append(to, "'", 1, err);
}

static hd_status put(hd_bytes *to, const char *text, hd_err *err) {
    return hd_bytes_append(to, text, strlen(text), err);
}

/* The shell of the other host reads the secret, and becomes the rank. */
static hd_status shell_command(hd_bytes *to, const words *w, hd_err *err) {
    char folder[4096];
    if (!getcwd(folder, sizeof folder)) {
        return HD_FAIL(err, HD_EIO, "the working folder: %s", strerror(errno));
    }
    HD_TRY(put(to, "cd", err));
    HD_TRY(quote(to, folder, err));
    HD_TRY(put(to, " && IFS= read -r HADAL_RANK_KEY && export HADAL_RANK_KEY && exec", err));
    for (int i = 0; i < w->n; i++) HD_TRY(quote(to, w->at[i], err));
    return hd_bytes_append(to, "", 1, err);
}

/* ---- starting ---- */

/* A process group of its own: what a terminal interrupts is rank 0. */
static hd_status spawn(other *o, const char *const argv[], int input, hd_err *err) {
    posix_spawn_file_actions_t files;
    posix_spawnattr_t how;
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&how);
    posix_spawnattr_setflags(&how, POSIX_SPAWN_SETPGROUP);
    posix_spawn_file_actions_adddup2(&files, input, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
    pid_t pid;
    const int code =
        posix_spawnp(&pid, argv[0], &files, &how, (char *const *)(uintptr_t)argv, environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&how);
    atomic_store(&o->pid, code == 0 ? pid : 0);
    if (code == 0) return HD_OK;
    return HD_FAIL(err, HD_EIO, "%s cannot be started: %s", argv[0], strerror(code));
}

/* Of a pipe, so that it is in no argument and in no file. */
static hd_status send_key(int to, const char *key, hd_err *err) {
    const size_t n = strlen(key);
    if (write(to, key, n) == (ssize_t)n && write(to, "\n", 1) == 1) return HD_OK;
    return HD_FAIL(err, HD_EIO, "the ranks' secret: %s", strerror(errno));
}

static hd_status start_rank(serve_hosts *h, const serve_hosts_args *a, int32_t rank, bool here,
                            hd_err *err) {
    other *o = &h->ranks[rank];
    words w;
    hd_bytes text = {0};
    int pipe_of[2];
    HD_TRY(command_of(&w, a, rank, err));
    if (pipe(pipe_of) != 0) return HD_FAIL(err, HD_EIO, "a pipe: %s", strerror(errno));
    for (int i = 0; i < 2; i++) fcntl(pipe_of[i], F_SETFD, FD_CLOEXEC);
    hd_status st = shell_command(&text, &w, err);
    const char *const remote[] = {
        "ssh", "-o", "BatchMode=yes", "--", o->host, (const char *)text.data, NULL};
    const char *const local[] = {"/bin/sh", "-c", (const char *)text.data, NULL};
    if (st == HD_OK) st = send_key(pipe_of[1], a->key, err);
    if (st == HD_OK) st = spawn(o, here ? local : remote, pipe_of[0], err);
    close(pipe_of[0]);
    close(pipe_of[1]);
    hd_bytes_deinit(&text);
    return st;
}

/* ---- watching ---- */

static void say_end(serve_hosts *h, int32_t rank, int status) {
    const bool signaled = WIFSIGNALED(status);
    const int code = signaled ? WTERMSIG(status) : WEXITSTATUS(status);
    const char *what = signaled ? "signal" : "exit code";
    if (!atomic_load(&h->ready)) {
        fprintf(stderr, "error: rank %d on %s ended with %s %d before all ranks were there\n",
                rank, h->ranks[rank].host, what, code);
        _exit(EXIT_NO_RANK);
    }
    HD_LOG(code ? HD_LOG_WARN : HD_LOG_INFO, "rank_process_ended", hd_log_int("rank", rank),
           hd_log_text("host", h->ranks[rank].host), hd_log_text("with", what),
           hd_log_int("code", code));
}

static void *watch(void *user) {
    serve_hosts *h = user;
    int status;
    for (int32_t left = h->n - 1; left > 0;) {
        const pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0 && errno != EINTR) return NULL;
        for (int32_t i = 1; i < h->n; i++) {
            if (pid < 0 || atomic_load(&h->ranks[i].pid) != pid) continue;
            atomic_store(&h->ranks[i].pid, 0);
            say_end(h, i, status);
            left--;
        }
    }
    return NULL;
}

static void stop_all(serve_hosts *h) {
    for (int32_t i = 1; i < h->n; i++) {
        const pid_t pid = atomic_load(&h->ranks[i].pid);
        if (pid) kill(pid, SIGTERM);
    }
}

/* Rank 0's thread enters a sandbox, from which no signal reaches processes outside; this one, which was there
 * before, does not. */
static void *stop_at_end(void *user) {
    serve_hosts *h = user;
    while (sem_wait(&h->ends) != 0) {
    }
    if (h->stops) stop_all(h);
    return NULL;
}

static void end_stopper(serve_hosts *h, bool stops) {
    h->stops = stops;
    sem_post(&h->ends);
    pthread_join(h->stopper, NULL);
}

/* Signals are for other threads. */
static hd_status start_threads(serve_hosts *h, hd_err *err) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool stopper = pthread_create(&h->stopper, NULL, stop_at_end, h) == 0;
    const bool both = stopper && pthread_create(&h->watch, NULL, watch, h) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (stopper && !both) end_stopper(h, false);
    return both ? HD_OK : HD_FAIL(err, HD_EIO, "cannot start a thread");
}

/* ---- all hosts ---- */

/* Fills the host of every rank. *n: hosts. */
static hd_status read_hosts(serve_hosts *h, const serve_hosts_args *a, int32_t *n,
                            hd_err *err) {
    const char *names[MAX_RANKS] = {NULL};
    *n = 0;
    for (const char *at = a->hosts; at; (*n)++) {
        const char *end = strchr(at, ',');
        const size_t bytes = end ? (size_t)(end - at) : strlen(at);
        if (bytes == 0 || bytes >= NAME_BYTES || *at == '-') {
            return HD_FAIL(err, HD_EINVAL, "--hosts '%s': '%.*s' is no name of a host",
                           a->hosts, (int)bytes, at);
        }
        if (*n == a->n_ranks) {
            return HD_FAIL(err, HD_EINVAL, "--hosts '%s': more hosts than %d ranks", a->hosts,
                           a->n_ranks);
        }
        names[*n] = at;
        at = end ? end + 1 : NULL;
    }
    for (int32_t i = 0; i < a->n_ranks; i++) {
        const char *name = names[(int64_t)i * *n / a->n_ranks];
        if (!name) return HD_FAIL(err, HD_EINVAL, "--hosts names no host for rank %d", i);
        snprintf(h->ranks[i].host, NAME_BYTES, "%.*s", (int)strcspn(name, ","), name);
    }
    return HD_OK;
}

static hd_status start_all(serve_hosts *h, const serve_hosts_args *a, hd_err *err) {
    int32_t n_hosts;
    HD_TRY(read_hosts(h, a, &n_hosts, err));
    for (int32_t i = 1; i < a->n_ranks; i++) {
        HD_TRY(start_rank(h, a, i, (int64_t)i * n_hosts / a->n_ranks == 0, err));
    }
    return start_threads(h, err);
}

hd_status serve_hosts_start(serve_hosts **out, const serve_hosts_args *args, hd_err *err) {
    *out = NULL;
    if (args->n_ranks < 2 || args->n_ranks > MAX_RANKS) {
        return HD_FAIL(err, HD_EINVAL, "--hosts is for 2 to %d ranks, not for %d", MAX_RANKS,
                       args->n_ranks);
    }
    serve_hosts *h = calloc(1, sizeof *h);
    if (!h) return HD_FAIL(err, HD_ENOMEM, "no memory for %d ranks", args->n_ranks);
    h->n = args->n_ranks;
    sem_init(&h->ends, 0, 0);
    const hd_status st = start_all(h, args, err);
    if (st == HD_OK) {
        *out = h;
        return HD_OK;
    }
    stop_all(h);
    sem_destroy(&h->ends);
    free(h);
    return st;
}

void serve_hosts_are_ready(serve_hosts *h) {
    if (h) atomic_store(&h->ready, true);
}

void serve_hosts_close(serve_hosts *h) {
    if (!h) return;
    end_stopper(h, !atomic_exchange(&h->ready, true)); /* or they would wait for this one */
    pthread_join(h->watch, NULL);
    sem_destroy(&h->ends);
    free(h);
}
