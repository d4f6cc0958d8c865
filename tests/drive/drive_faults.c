/* drive_faults.c - hadal serve whose memory, clock and device fail on command.
 *
 *     drive_faults serve MODEL_DIR [FLAGS...]    as hadal; one command per line of standard input
 *
 * memory N        the Nth request for memory from now on fails; 0: none does
 * memory N all    that one and all later ones
 * clock S         the wall clock is S seconds off
 * hang 1, hang 0  the null device does not come back from a step, and comes back
 * mute 1, mute 0  no text is made of tokens, and it is again
 * leak N          the next N requests that end do not give back what they held
 * lose N          N blocks of memory that nothing points to any more
 * hold 1, hold 0  nothing is submitted, and what waited is
 * crash 1         the next step crashes, and who submitted for it never comes to say so
 * left            how many requests for memory are left until one fails
 *
 * Each is answered by a line on standard output. The linker sends the calls through here first
 * (-Wl,--wrap in the Makefile); the shared libraries' own are not seen, but jansson is told. */
#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli/commands.h"
#include "engine/engine.h"
#include "engine/output.h"
#include "runner/null_runner.h"
#include "kv/cache.h"

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t alignment, size_t n);
int __real_posix_memalign(void **p, size_t alignment, size_t n);
char *__real_strdup(const char *text);
int __real_clock_gettime(clockid_t clock, struct timespec *now);
time_t __real_time(time_t *now);
hd_runner __real_hd_null_runner_interface(hd_null_runner *n);
hd_status __real_hd_output_push(hd_output *o, int32_t token, hd_err *err);
void __real_hd_cache_release(hd_cache *c, int32_t seq, bool end_of_turn);
hd_status __real_hd_engine_submit_chat(hd_engine *e, uint64_t *id, const hd_request *g,
                                       const hd_conversation *conversation, hd_err *err);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_aligned_alloc(size_t alignment, size_t n);
int __wrap_posix_memalign(void **p, size_t alignment, size_t n);
char *__wrap_strdup(const char *text);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
time_t __wrap_time(time_t *now);
hd_runner __wrap_hd_null_runner_interface(hd_null_runner *n);
hd_status __wrap_hd_output_push(hd_output *o, int32_t token, hd_err *err);
void __wrap_hd_cache_release(hd_cache *c, int32_t seq, bool end_of_turn);
hd_status __wrap_hd_engine_submit_chat(hd_engine *e, uint64_t *id, const hd_request *g,
                                       const hd_conversation *conversation, hd_err *err);

/* ---- memory ---- */

static atomic_llong until_failure; /* 0: never */
static atomic_bool lasting;

static bool fails(void) {
    long long left = atomic_load(&until_failure);
    while (left > 1 || (left == 1 && !atomic_load(&lasting))) {
        if (atomic_compare_exchange_weak(&until_failure, &left, left - 1)) break;
    }
    if (left == 1) errno = ENOMEM;
    return left == 1;
}

void *__wrap_malloc(size_t n) {
    return fails() ? NULL : __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size) {
    return fails() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n) {
    return fails() ? NULL : __real_realloc(p, n);
}

void *__wrap_aligned_alloc(size_t alignment, size_t n) {
    return fails() ? NULL : __real_aligned_alloc(alignment, n);
}

int __wrap_posix_memalign(void **p, size_t alignment, size_t n) {
    return fails() ? ENOMEM : __real_posix_memalign(p, alignment, n);
}

char *__wrap_strdup(const char *text) {
    return fails() ? NULL : __real_strdup(text);
}

/* ---- the wall clock ---- */

static atomic_llong seconds_off;

int __wrap_clock_gettime(clockid_t clock, struct timespec *now) {
    const int code = __real_clock_gettime(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += (time_t)atomic_load(&seconds_off);
    return code;
}

time_t __wrap_time(time_t *now) {
    const time_t off = __real_time(NULL) + (time_t)atomic_load(&seconds_off);
    if (now) *now = off;
    return off;
}

/* ---- the device ---- */

static hd_runner device;
static atomic_bool crashes;
static pthread_mutex_t hanging = PTHREAD_MUTEX_INITIALIZER;

static hd_status run(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                     const hd_seq_input *inputs, int32_t n_inputs, hd_seq_output *outputs,
                     hd_err *err) {
    pthread_mutex_lock(&hanging); /* held while it hangs */
    pthread_mutex_unlock(&hanging);
    if (atomic_load(&crashes)) raise(SIGSEGV);
    return device.run(ctx, copies, n_copies, inputs, n_inputs, outputs, err);
}

hd_runner __wrap_hd_null_runner_interface(hd_null_runner *n) {
    hd_runner r = device = __real_hd_null_runner_interface(n);
    r.run = run;
    return r;
}

/* ---- pages ---- */

static atomic_llong leaks;

void __wrap_hd_cache_release(hd_cache *c, int32_t seq, bool end_of_turn) {
    if (atomic_load(&leaks) > 0 && atomic_fetch_sub(&leaks, 1) > 0) return;
    __real_hd_cache_release(c, seq, end_of_turn);
}

/* ---- who submits ---- */

static pthread_mutex_t held = PTHREAD_MUTEX_INITIALIZER;

hd_status __wrap_hd_engine_submit_chat(hd_engine *e, uint64_t *id, const hd_request *g,
                                       const hd_conversation *conversation, hd_err *err) {
    pthread_mutex_lock(&held); /* while it is */
    pthread_mutex_unlock(&held);
    const hd_status st = __real_hd_engine_submit_chat(e, id, g, conversation, err);
    while (atomic_load(&crashes)) pause();
    return st;
}

/* ---- the text ---- */

static pthread_mutex_t muted = PTHREAD_MUTEX_INITIALIZER;

hd_status __wrap_hd_output_push(hd_output *o, int32_t token, hd_err *err) {
    pthread_mutex_lock(&muted); /* held while it is */
    pthread_mutex_unlock(&muted);
    return __real_hd_output_push(o, token, err);
}

/* ---- commands ---- */

/* With all bits inverted, a leak checker does not take it for a pointer. */
static void lose(long long n) {
    static volatile uintptr_t sum;
    for (; n > 0; n--) sum ^= ~(uintptr_t)malloc(1000);
}

static void follow(const char *line) {
    long long number = 0;
    char word[16] = "", more[16] = "";
    sscanf(line, "%15s %lld %15s", word, &number, more);
    if (strcmp(word, "memory") == 0) {
        atomic_store(&lasting, strcmp(more, "all") == 0);
        atomic_store(&until_failure, number);
    } else if (strcmp(word, "clock") == 0) {
        atomic_store(&seconds_off, number);
    } else if (strcmp(word, "hang") == 0) {
        number ? pthread_mutex_lock(&hanging) : pthread_mutex_unlock(&hanging);
    } else if (strcmp(word, "mute") == 0) {
        number ? pthread_mutex_lock(&muted) : pthread_mutex_unlock(&muted);
    } else if (strcmp(word, "leak") == 0) {
        atomic_store(&leaks, number);
    } else if (strcmp(word, "lose") == 0) {
        lose(number);
    } else if (strcmp(word, "hold") == 0) {
        number ? pthread_mutex_lock(&held) : pthread_mutex_unlock(&held);
    } else if (strcmp(word, "crash") == 0) {
        atomic_store(&crashes, number != 0);
    }
}

static void *follow_all(void *user) {
    char line[64], answer[32];
    size_t n = 0;
    (void)user;
    while (n + 1 < sizeof line && read(STDIN_FILENO, line + n, 1) == 1) {
        if (line[n++] != '\n') continue;
        const int m =
            snprintf(answer, sizeof answer, "left %lld\n", atomic_load(&until_failure));
        line[n] = '\0';
        n = 0;
        follow(line);
        if (write(STDOUT_FILENO, answer, (size_t)m) != m) break;
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t thread;
    sigset_t all, before;
    json_set_alloc_funcs(malloc, free);
    signal(SIGPIPE, SIG_IGN);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the server's */
    if (pthread_create(&thread, NULL, follow_all, NULL) != 0) return 70;
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return argc > 1 ? cmd_serve(argc - 1, argv + 1) : 2;
}
