/* comm_world.c - see comm_world.h. */
#include "comm_world.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "comm/ucx.h"
#include "fakes/gpus.h"
#include "fakes/ipc_device.h"
#include "fakes/staged_comm.h"

void comm_find_port(char at[32]) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    snprintf(at, 32, "127.0.0.1:%d", ntohs(a.sin_port));
    close(fd);
}

const char *comm_open_device(bool on_gpus, int32_t number, hd_device **d, hd_stream **s,
                             hd_ops *ops) {
    static hd_err err;
    const bool real = on_gpus && gpus_are_wanted();
    const char *backend = real ? "cuda" : "ref";
    const hd_ops_options one = {.cpu = {.n_threads = 1},
                                .gpu = real ? gpus_for(number) : 0,
                                .cuda_path = gpus_path(backend)};
    if (on_gpus && !real) {
        hd_ops_init_ref(ops, HD_EXACT);
        ops->exchange = &ipc_device_exchange;
        *d = ipc_device_open();
        if (!*d) return "no device";
    } else if (hd_ops_open(ops, d, backend, &one, &err) != HD_OK) {
        return err.msg;
    }
    return hd_stream_open(s, *d, &err) == HD_OK ? NULL : err.msg;
}

static void run_rank(const comm_world *w, comm_rank *r, int32_t number) {
    hd_err err = {0};
    hd_comm_ucx *u = NULL;
    staged_comm staged;
    *r = w->like;
    r->number = number;
    const hd_comm_ucx_options o = {
        .rendezvous = {.rank = number,
                       .world = hd_parallel_world(&r->parallel),
                       .at = w->at,
                       .secret = w->secret,
                       .silence_ms = w->silence_ms},
        .parallel = r->parallel,
        .wait_ms = w->wait_ms,
        .transports = w->transports
    };
    const char *why = comm_open_device(w->on_gpus, number, &r->device, &r->stream, &r->ops);
    if (!why && hd_comm_ucx_open(&u, &o, r->device, r->stream, &r->ops, &err) != HD_OK)
        why = err.msg;
    if (!why) r->comm = hd_comm_ucx_interface(u);
    if (!why && w->on_gpus) {
        why = staged_comm_open(&staged, r->comm, r->device, &r->ops, r->stream);
        r->comm = &staged.comm;
        r->staged = &staged;
    }
    if (why) {
        comm_expect(r, false, why, 0);
        return;
    }
    r->in_messages = !w->on_gpus;
    r->run(r);
    hd_comm_ucx_close(u);
    hd_stream_close(r->stream);
    hd_device_close(r->device);
}

comm_rank *comm_share_ranks(void) {
    comm_rank *ranks = mmap(NULL, sizeof *ranks * COMM_MAX_RANKS, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(ranks != MAP_FAILED);
    return ranks;
}

void comm_start_ranks(const comm_world *w, comm_rank *ranks, pid_t *pids) {
    for (int32_t i = 0; i < hd_parallel_world(&w->like.parallel); i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i]) continue;
        run_rank(w, &ranks[i], i);
        _exit(0);
    }
}

void comm_join_ranks(const comm_world *w, comm_rank *ranks, const pid_t *pids, int32_t lost) {
    for (int32_t i = 0; i < hd_parallel_world(&w->like.parallel); i++) {
        int status = 0;
        if (i == lost) continue;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        if (ranks[i].wrong[0]) fail_msg("rank %d: %s", i, ranks[i].wrong);
        if (!WIFEXITED(status) || WEXITSTATUS(status))
            fail_msg("rank %d: status %x", i, status);
    }
}

void comm_run_world(const comm_world *like) {
    comm_world w = *like;
    pid_t pids[COMM_MAX_RANKS];
    comm_rank *ranks = comm_share_ranks();
    comm_find_port(w.at);
    comm_start_ranks(&w, ranks, pids);
    comm_join_ranks(&w, ranks, pids, -1);
    munmap(ranks, sizeof *ranks * COMM_MAX_RANKS);
}

/* seed: the signal. */
static void sum_until_lost(comm_rank *r) {
    enum { N = 100 };
    char name[80];
    hd_err err = {0};
    float *x = comm_take(r, N * sizeof *x);
    memset(x, 0, N * sizeof *x);
    snprintf(name, sizeof name, "rank %d is lost: it%s", r->victim,
             r->seed == SIGSTOP ? " was silent for 3000 ms" : "s process has ended");
    for (r->rounds = 1; hd_stream_sync(r->stream, &err) == HD_OK; r->rounds++) {
        hd_comm_all_reduce(r->comm, r->stream,
                           &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(x), N});
    }
    comm_expect(r, err.status == HD_EPEER && strstr(err.msg, name), err.msg, r->rounds);
    comm_give(r, x);
}

void comm_lose(int signal, int32_t victim, int32_t silence_ms, const comm_world *like) {
    comm_world w = *like;
    pid_t pids[COMM_MAX_RANKS];
    comm_rank *ranks = comm_share_ranks();
    w.silence_ms = silence_ms;
    w.like = (comm_rank){.parallel = hd_parallel_tensor(3),
                         .run = sum_until_lost,
                         .seed = (uint64_t)signal,
                         .victim = victim};
    comm_find_port(w.at);
    comm_start_ranks(&w, ranks, pids);
    while (*(volatile int32_t *)&ranks[victim].rounds < 20 && !ranks[victim].wrong[0]) {
        comm_sleep_ms(1);
    }
    kill(pids[victim], signal);
    comm_join_ranks(&w, ranks, pids, victim);
    kill(pids[victim], SIGKILL);
    waitpid(pids[victim], NULL, 0);
    munmap(ranks, sizeof *ranks * COMM_MAX_RANKS);
}
