/* bench_comm.c - time of collectives between ranks: threads of this process, processes over shared
 * memory, TCP and UCX's shared memory, and GPUs; beside them a copy of memory and a plain socket, in the same run. */
#include "cli/bench/bench_comm.h"

#include <arpa/inet.h>
#include <jansson.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/cores.h"
#include "base/json.h"
#include "base/progress.h"
#include "cli/bench/bench_comm_internal.h"
#include "cli/options.h"
#include "comm/local.h"
#include "comm/ucx.h"

/* Calls that are timed together: GPU_CALLS in the queue of a GPU, as kernels lie in a step; WORK_CALLS
 * with work between them. */
enum { MAX_RANKS = 16, GPU_CALLS = 100, WORK_CALLS = 20, NORM_COLS = 4096 };

/* ALL_REDUCE_NORM: one kernel; APART: the three calls that it stands for. Both on GPUs alone, broadcasts are of host
 * memory. */
typedef enum operation {
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    BROADCAST,
    ALL_REDUCE_NORM,
    APART,
    N_OPERATIONS
} operation;
/* GPUs of processes first: a process that has used CUDA cannot fork. */
typedef enum transport {
    LOCAL,
    SHARED_MEMORY,
    TCP,
    UCX_MEMORY,
    GPU_PROCESSES,
    GPUS,
    N_TRANSPORTS
} transport;

static const char *const operations[] = {"all_reduce",      "reduce_scatter",
                                         "all_gather",      "broadcast",
                                         "all_reduce_norm", "all_reduce, add, norm"};
static const char *const transports[] = {"threads",    "shared memory", "tcp",
                                         "ucx memory", "gpu processes", "gpus"};
/* "all", then as transports */
static const char *const choices[] = {"all",        "threads",       "shared-memory", "tcp",
                                      "ucx-memory", "gpu-processes", "gpus",          NULL};
static const char *const ucx_transports[N_TRANSPORTS] = {
    [TCP] = "tcp,self", [UCX_MEMORY] = "sysv,self"};

static bool is_on_gpus(transport t) {
    return t == GPUS || t == GPU_PROCESSES;
}

static bool has(transport t, int op) {
    return op < BROADCAST || (op == BROADCAST) != is_on_gpus(t);
}

typedef struct comm_settings {
    int64_t ranks, rounds, work_us;
    int64_t turns; /* of work() that take so long */
    int only;      /* a transport + 1; 0: all */
    bool json;
} comm_settings;

/* A rank, in memory that processes share. */
typedef struct rank {
    const comm_settings *set;
    int32_t number;
    transport transport;
    char at[32];
    double us[N_OPERATIONS][COMM_SIZES];
    comm_experts experts;
    hd_err err;
} rank;

/* ---- one rank ---- */

/* Arithmetic that a processor does one after the other. */
static void work(int64_t turns) {
    volatile uint32_t x = 1; /* else a compiler leaves it out */
    for (int64_t i = 0; i < turns; i++) x = x * 1664525U + 1013904223U;
}

/* The quickest of some tries, on a machine with other load. */
static int64_t turns_of(int64_t us) {
    enum { TRIES = 20, TURNS = 100000 };
    int64_t best = INT64_MAX;
    for (int i = 0; i < TRIES; i++) {
        const int64_t start = hd_now_ns();
        work(TURNS);
        const int64_t ns = hd_now_ns() - start;
        if (ns < best) best = ns;
    }
    return us * 1000 * TURNS / (best + 1);
}

typedef struct caller {
    const hd_comm *comm;
    const hd_ops *ops;
    hd_stream *stream;
    float *x, *residual, *out, *weight;
    operation op;
    int repeat;
    int64_t turns;
} caller;

/* Rows of NORM_COLS, or one that is narrower. */
static void call_norm(const caller *c, int32_t n, bool fused) {
    const int32_t cols = hd_min_i32(n, NORM_COLS), rows = n / cols;
    const hd_rows x = hd_f32(c->residual), y = hd_f32(c->x), out = hd_f32(c->out);
    if (fused) {
        const hd_add_norm_args a = {out, x, y, c->weight, rows, cols, 1e-6f};
        hd_comm_join_norm(c->comm, c->ops, c->stream,
                          &(hd_join_norm_args){HD_GROUP_TP, true, 0, cols, a});
        return;
    }
    hd_comm_all_reduce(c->comm, c->stream, &(hd_all_reduce_args){HD_GROUP_TP, y, n});
    c->ops->add(c->stream,
                &(hd_add_args){.x = x, .y = y, .rows = rows, .cols = cols, .repeat = 1});
    c->ops->rms_norm(c->stream, &(hd_rms_norm_args){out, x, c->weight, rows, cols, 1e-6f});
}

/* The bytes of a gather or of a sum that is scattered are those of all ranks together. */
static void call_once(const caller *c, size_t bytes) {
    const hd_rank_group *g = &c->comm->groups[HD_GROUP_TP];
    const int32_t n = (int32_t)(bytes / sizeof(float));
    const int32_t first = n / g->n * g->index;
    const int32_t own = g->index == g->n - 1 ? n - first : n / g->n;
    switch (c->op) {
    case ALL_REDUCE:
        hd_comm_all_reduce(c->comm, c->stream,
                           &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(c->x), n});
        break;
    case REDUCE_SCATTER:
        hd_comm_reduce_scatter(
            c->comm, c->stream,
            &(hd_reduce_scatter_args){HD_GROUP_TP, hd_f32(c->x), n, first, own});
        break;
    case ALL_GATHER:
        hd_comm_all_gather(c->comm, c->stream,
                           &(hd_all_gather_args){HD_GROUP_TP, c->x, 1, n, first, own, false});
        break;
    case ALL_REDUCE_NORM:
    case APART:
        call_norm(c, n, c->op == ALL_REDUCE_NORM);
        break;
    case BROADCAST:
    case N_OPERATIONS:
        hd_comm_broadcast(c->comm, c->stream, &(hd_broadcast_args){HD_GROUP_TP, c->x, bytes});
    }
}

static void call(void *ctx, size_t bytes) {
    const caller *c = ctx;
    for (int i = 0; i < c->repeat; i++) {
        if (c->turns) work(c->turns);
        call_once(c, bytes);
    }
    if (c->repeat > 1) hd_stream_wait(c->stream);
}

/* The most bytes of every operation, and the weights of a norm. */
static hd_status open_memory(caller *c, hd_device *device, hd_err *err) {
    float **const all[] = {&c->x, &c->residual, &c->out, &c->weight};
    for (size_t i = 0; i < HD_LEN(all); i++) {
        void *p;
        HD_TRY(hd_device_alloc(device, &p, comm_sizes[COMM_SIZES - 1], "rows", err));
        *all[i] = p;
    }
    return HD_OK;
}

static hd_status measure(rank *r, const hd_comm *comm, const hd_ops *ops, hd_device *device,
                         hd_stream *stream, hd_err *err) {
    const bool on_gpus = is_on_gpus(r->transport);
    const int64_t turns = on_gpus ? 0 : r->set->turns;
    const int rounds = (int)r->set->rounds / (on_gpus || turns ? 10 : 1) + 1;
    caller c = {.comm = comm,
                .ops = ops,
                .stream = stream,
                .repeat = on_gpus ? GPU_CALLS
                          : turns ? WORK_CALLS
                                  : 1,
                .turns = turns};
    /* ranks that share cores work by turns */
    const double share = (double)r->set->ranks / hd_cores_count();
    const double working = turns ? (double)r->set->work_us * (share > 1 ? share : 1) : 0;
    HD_TRY(open_memory(&c, device, err));
    if (!r->set->turns) {
        HD_TRY(comm_time_experts(comm, device, stream, rounds / 100, &r->experts, err));
    }
    for (; c.op < N_OPERATIONS; c.op++) {
        for (int i = 0; i < COMM_SIZES && has(r->transport, (int)c.op); i++) {
            r->us[c.op][i] =
                comm_median_us(call, &c, comm_sizes[i], rounds) / c.repeat - working;
        }
    }
    return hd_stream_sync(stream, err);
}

/* All ranks are one group of every kind that is measured. */
static hd_parallel_config layout_of(int32_t n) {
    hd_parallel_config l = hd_parallel_tensor(n);
    l.ep = n;
    l.etp = 1;
    return l;
}

static hd_status run_local(rank *r, hd_comm_local *world, hd_device *device, hd_stream *stream,
                           const hd_ops *ops) {
    const hd_comm *comm;
    HD_TRY(hd_comm_local_join(world, r->number, device, stream, ops, &comm, &r->err));
    return measure(r, comm, ops, device, stream, &r->err);
}

static hd_status run_ucx(rank *r, hd_device *device, hd_stream *stream, const hd_ops *ops) {
    const int32_t n = (int32_t)r->set->ranks;
    hd_comm_ucx *u;
    const hd_comm_ucx_options o = {
        .rendezvous = {.rank = r->number, .world = n, .at = r->at},
        .parallel = layout_of(n),
        .transports = ucx_transports[r->transport]
    };
    HD_TRY(hd_comm_ucx_open(&u, &o, device, stream, ops, &r->err));
    const hd_status st = measure(r, hd_comm_ucx_interface(u), ops, device, stream, &r->err);
    hd_comm_ucx_close(u);
    return st;
}

/* world: of threads; NULL: a process. */
static void run_rank(rank *r, hd_comm_local *world) {
    const bool on_gpus = is_on_gpus(r->transport);
    const hd_ops_options one = {
        .cpu = {.n_threads = 1},
        .gpu = on_gpus ? r->number % hd_max_i32(hd_device_count_gpus(), 1) : 0};
    hd_device *device = NULL;
    hd_stream *stream = NULL;
    hd_ops ops;
    if (hd_ops_open(&ops, &device, on_gpus ? "cuda" : "ref", &one, &r->err) == HD_OK &&
        hd_stream_open(&stream, device, &r->err) == HD_OK) {
        if (world)
            run_local(r, world, device, stream, &ops);
        else
            run_ucx(r, device, stream, &ops);
    }
    hd_stream_close(stream);
    hd_device_close(device);
}

/* ---- all ranks ---- */

typedef struct thread_rank {
    rank *rank;
    hd_comm_local *world;
} thread_rank;

static void *run_thread(void *arg) {
    const thread_rank *t = arg;
    run_rank(t->rank, t->world);
    return NULL;
}

static hd_status run_threads(rank *ranks, int32_t n, hd_err *err) {
    const hd_parallel_config parallel = layout_of(n);
    pthread_t threads[MAX_RANKS];
    thread_rank args[MAX_RANKS];
    hd_comm_local *world;
    int32_t started = 0;
    HD_TRY(hd_comm_local_open(&world, &parallel, err));
    for (; started < n; started++) {
        args[started] = (thread_rank){&ranks[started], world};
        if (pthread_create(&threads[started], NULL, run_thread, &args[started]) != 0) break;
    }
    if (started < n) hd_comm_local_abort(world, "a thread could not start");
    for (int32_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    hd_comm_local_close(world);
    return started == n ? HD_OK : HD_FAIL(err, HD_EIO, "cannot start a thread");
}

static hd_status run_processes(rank *ranks, int32_t n, hd_err *err) {
    pid_t pids[MAX_RANKS];
    int32_t started = 0;
    for (; started < n; started++) {
        pids[started] = fork();
        if (pids[started] < 0) break;
        if (pids[started]) continue;
        run_rank(&ranks[started], NULL);
        _exit(0);
    }
    int32_t crashed = -1;
    for (int32_t i = 0; i < started; i++) {
        int status = 0;
        if (waitpid(pids[i], &status, 0) != pids[i] || status) crashed = i;
    }
    if (started < n) return HD_FAIL(err, HD_EIO, "cannot start a process");
    return crashed < 0 ? HD_OK : HD_FAIL(err, HD_EPEER, "rank %d crashed", crashed);
}

static hd_status find_port(char at[32], hd_err *err) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const bool ok = fd >= 0 && bind(fd, (struct sockaddr *)&a, n) == 0 &&
                    getsockname(fd, (struct sockaddr *)&a, &n) == 0;
    if (fd >= 0) close(fd);
    snprintf(at, 32, "127.0.0.1:%d", ntohs(a.sin_port));
    return ok ? HD_OK : HD_FAIL(err, HD_EIO, "no free port");
}

static hd_status run_world(rank *ranks, const comm_settings *set, transport t, hd_err *err) {
    const int32_t n = (int32_t)set->ranks;
    char at[32];
    HD_TRY(find_port(at, err));
    for (int32_t i = 0; i < n; i++) {
        ranks[i] = (rank){.set = set, .number = i, .transport = t};
        memcpy(ranks[i].at, at, sizeof at);
    }
    HD_TRY(t == LOCAL || t == GPUS ? run_threads(ranks, n, err) : run_processes(ranks, n, err));
    for (int32_t i = 0; i < n; i++) {
        if (ranks[i].err.status == HD_OK) continue;
        *err = ranks[i].err;
        return err->status;
    }
    return HD_OK;
}

/* ---- the report ---- */

typedef struct report {
    json_t *rows; /* NULL: lines */
} report;

static void put(const report *to, const char *over, const char *what, const double *us) {
    for (int i = 0; i < COMM_SIZES; i++) {
        const double mb_s = (double)comm_sizes[i] / us[i];
        if (!to->rows) {
            printf("%-14s %-21s %8zu %10.2f %9.0f\n", over, what, comm_sizes[i], us[i], mb_s);
            continue;
        }
        json_array_append_new(to->rows,
                              json_pack("{s:s, s:s, s:I, s:f, s:f}", "transport", over,
                                        "operation", what, "bytes", (json_int_t)comm_sizes[i],
                                        "us", us[i], "mb_s", mb_s));
    }
}

/* What an H200 has read over NVLink (capacity/gpu.c). */
static const double NVLINK_BYTES_US = 395e3;

/* Rows of experts beside a copy of as many bytes, and beside the time of what must come from other ranks: over NVLink
 * at its rate, on a host at that of a copy. */
static void put_experts(const report *to, const char *over, const rank *r) {
    const comm_experts *x = &r->experts;
    const double copied = (double)x->bytes / x->copy_us;
    const double rate = is_on_gpus(r->transport) ? NVLINK_BYTES_US : copied;
    const double limit[] = {(double)x->once / rate, (double)x->back / rate};
    const double us[] = {x->dispatch_us, x->combine_us};
    static const char *const names[] = {"dispatch", "combine"};
    for (int i = 0; i < 2; i++) {
        const double mb_s = (double)x->bytes / us[i];
        if (!to->rows) {
            printf("%-14s %-21s %8zu %10.2f %9.0f   copy %.2f, limit %.2f\n", over, names[i],
                   x->bytes, us[i], mb_s, x->copy_us, limit[i]);
            continue;
        }
        json_array_append_new(to->rows,
                              json_pack("{s:s, s:s, s:I, s:f, s:f, s:f, s:f}", "transport",
                                        over, "operation", names[i], "bytes",
                                        (json_int_t)x->bytes, "us", us[i], "mb_s", mb_s,
                                        "copy_us", x->copy_us, "limit_us", limit[i]));
    }
}

static hd_status put_peers(const report *to, int rounds, hd_err *err) {
    double us[COMM_SIZES];
    HD_TRY(comm_time_memcpy(us, rounds, err));
    put(to, "one thread", "memcpy", us);
    HD_TRY(comm_time_socket(us, rounds, err));
    put(to, "tcp", "socket", us);
    return HD_OK;
}

/* In a process of its own. */
static int32_t count_gpus(void) {
    int status = 0;
    const pid_t pid = fork();
    if (pid == 0) _exit(hd_device_count_gpus());
    if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return 0;
    return WEXITSTATUS(status);
}

/* Processes that share a GPU wait for their slices of its time. */
static bool can_run(transport t, int32_t ranks, int32_t gpus) {
    if (t == LOCAL) return true;
    if (t == GPUS) return gpus > 0;
    return hd_comm_ucx_is_built() && (t != GPU_PROCESSES || gpus >= ranks);
}

static hd_status check_only(const comm_settings *set, int32_t gpus, hd_err *err) {
    if (!set->only || can_run((transport)(set->only - 1), (int32_t)set->ranks, gpus)) {
        return HD_OK;
    }
    return HD_FAIL(err, HD_EUNSUPPORTED, "--transport %s: not here, with %d GPUs%s",
                   choices[set->only], gpus, hd_comm_ucx_is_built() ? "" : " and without UCX");
}

static hd_status bench(const comm_settings *set, const report *to, rank *ranks, hd_err *err) {
    const int32_t gpus = count_gpus();
    HD_TRY(check_only(set, gpus, err));
    if (!to->rows) {
        printf("%-14s %-21s %8s %10s %9s\n", "transport", "operation", "bytes", "us", "MB/s");
    }
    HD_TRY(put_peers(to, (int)set->rounds, err));
    for (transport t = LOCAL; t < N_TRANSPORTS; t++) {
        if (set->only && (int)t != set->only - 1) continue;
        if (!can_run(t, (int32_t)set->ranks, gpus)) continue;
        const char *over = t == GPUS && gpus < set->ranks ? "gpus, shared" : transports[t];
        fflush(stdout); /* before processes copy it */
        HD_TRY(run_world(ranks, set, t, err));
        for (int op = 0; op < N_OPERATIONS; op++) {
            if (has(t, op)) put(to, over, operations[op], ranks[0].us[op]);
        }
        if (!set->turns) put_experts(to, over, &ranks[0]);
    }
    return HD_OK;
}

int bench_comm(int argc, char **argv) {
    comm_settings set = {.ranks = 2, .rounds = 2000};
    const option options[] = {
        option_int("ranks", &set.ranks, 2, MAX_RANKS, "threads or processes; default 2"),
        option_int("rounds", &set.rounds, 1, COMM_MAX_ROUNDS,
                   "calls up to 16 KiB, fewer above; default 2000"),
        option_choice("transport", &set.only, choices, "default: all that this machine has"),
        option_int("work-us", &set.work_us, 0, 1000000,
                   "between calls each rank computes so long; times are without it"),
        option_flag("json", &set.json, "print one JSON array"),
    };
    const command_line line = {.command = "bench comm",
                               .summary = "Times collectives between ranks.",
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    int code;
    hd_err err = {0};
    if (!options_parse(&line, argc, argv, &code)) return code;
    rank *ranks = mmap(NULL, MAX_RANKS * sizeof *ranks, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (ranks == MAP_FAILED) {
        HD_FAIL(&err, HD_ENOMEM, "no memory for %d ranks", MAX_RANKS);
        return report_error(&err);
    }
    const report to = {set.json ? json_array() : NULL};
    set.turns = set.work_us ? turns_of(set.work_us) : 0;
    const hd_status st = bench(&set, &to, ranks, &err);
    char *text = st == HD_OK && to.rows ? hd_json_write(to.rows, JSON_COMPACT) : NULL;
    if (text) puts(text);
    free(text);
    json_decref(to.rows);
    munmap(ranks, MAX_RANKS * sizeof *ranks);
    return st == HD_OK ? 0 : report_error(&err);
}
