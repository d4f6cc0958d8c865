/* test_device.c - one stream waits for another: two threads with a stream each on the CPU,
 * and streams that run late and in any order. With HADAL_BACKEND=cuda also on a GPU, and in a
 * capture. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

#include "base/checksum.h"
#include "fakes/queue_device.h"
#include "fakes/shared_device.h"

enum { WORDS = 1 << 16, ROUNDS = 50 };

/* ---- two threads ---- */

typedef struct relay {
    hd_stream *stream[2];
    hd_device_event *filled, *taken;
    int32_t *word;                     /* [WORDS] shared by both threads */
    _Atomic int32_t n_filled, n_taken; /* relaxed: they order nothing but themselves */
    int32_t n_wrong;
} relay;

static void fill_words(const void *arg, int32_t task, int32_t worker) {
    const relay *r = arg;
    (void)worker;
    for (int32_t i = 0; i < WORDS / 4; i++) r->word[task * (WORDS / 4) + i]++;
}

static void await_count(_Atomic int32_t *count, int32_t n) {
    while (atomic_load_explicit(count, memory_order_relaxed) < n) sched_yield();
}

static void *take_words(void *arg) {
    relay *r = arg;
    for (int32_t round = 1; round <= ROUNDS; round++) {
        await_count(&r->n_filled, round);
        hd_stream_wait_event(r->stream[1], r->filled);
        for (int32_t i = 0; i < WORDS; i++) r->n_wrong += r->word[i] != round;
        hd_stream_record_event(r->stream[1], r->taken);
        atomic_store_explicit(&r->n_taken, round, memory_order_relaxed);
    }
    return NULL;
}

/* Only the events order the two threads' accesses: without them the thread sanitizer reports
 * a race. */
static void a_stream_waits_for_another_threads(void **state) {
    (void)state;
    const hd_cpu_options options = {.n_threads = 2};
    hd_device *d[2];
    relay r = {0};
    pthread_t taker;
    void *word;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(hd_device_open_cpu(&d[i], &options, NULL), HD_OK);
        assert_int_equal(hd_stream_open(&r.stream[i], d[i], NULL), HD_OK);
    }
    assert_int_equal(hd_device_alloc(d[0], &word, WORDS * sizeof *r.word, "words", NULL),
                     HD_OK);
    r.word = word;
    assert_int_equal(hd_device_event_open(&r.filled, d[0], false, NULL), HD_OK);
    assert_int_equal(hd_device_event_open(&r.taken, d[1], false, NULL), HD_OK);
    assert_int_equal(pthread_create(&taker, NULL, take_words, &r), 0);
    for (int32_t round = 1; round <= ROUNDS; round++) {
        await_count(&r.n_taken, round - 1);
        hd_stream_wait_event(r.stream[0], r.taken);
        hd_stream_tasks(r.stream[0], 4, fill_words, &r);
        hd_stream_record_event(r.stream[0], r.filled);
        atomic_store_explicit(&r.n_filled, round, memory_order_relaxed);
    }
    pthread_join(taker, NULL);
    assert_int_equal(r.n_wrong, 0);
    hd_device_event_close(r.filled);
    hd_device_event_close(r.taken);
    for (int i = 0; i < 2; i++) {
        hd_stream_close(r.stream[i]);
        hd_device_close(d[i]);
    }
}

/* ---- three queues ---- */

static const int32_t priorities[][QUEUE_STREAMS] = {
    {0, 1, 2},
    {0, 2, 1},
    {1, 0, 2},
    {1, 2, 0},
    {2, 0, 1},
    {2, 1, 0}
};

/* x goes from stream to stream, one is added on each; an event may be recorded again before
 * the wait for its earlier record has run. */
static int32_t pass_on(hd_device *d, hd_stream *const *s, bool again) {
    int32_t x[2 * QUEUE_STREAMS + 1] = {0}, last = 0;
    hd_device_event *event[2 * QUEUE_STREAMS] = {0};
    const int32_t n = 2 * QUEUE_STREAMS, n_events = again ? 1 : n;
    for (int32_t i = 0; i < n_events; i++) {
        assert_int_equal(hd_device_event_open(&event[i], d, false, NULL), HD_OK);
    }
    for (int32_t i = 0; i < n; i++) {
        hd_stream *on = s[i % QUEUE_STREAMS];
        hd_device_event *m = event[again ? 0 : i];
        const int32_t one = i + 1;
        if (i > 0) hd_stream_wait_event(on, event[again ? 0 : i - 1]);
        if (i == 0) hd_stream_upload(on, &x[0], &one, sizeof one);
        hd_stream_copy(on, &x[i + 1], &x[i], sizeof one);
        hd_stream_record_event(on, m);
    }
    hd_stream_download(s[(n - 1) % QUEUE_STREAMS], &last, &x[n], sizeof last);
    assert_int_equal(hd_stream_sync(s[0], NULL), HD_OK);
    for (int32_t i = 0; i < n_events; i++) hd_device_event_close(event[i]);
    return last;
}

static void events_order_queues(void **state) {
    (void)state;
    hd_stream *s[QUEUE_STREAMS];
    hd_ops ops;
    int32_t n_wrong = 0;
    hd_ops_init_ref(&ops, HD_EXACT);
    hd_device *d = queue_device_open(&ops);
    for (int i = 0; i < QUEUE_STREAMS; i++) {
        assert_int_equal(hd_stream_open(&s[i], d, NULL), HD_OK);
    }
    for (size_t k = 0; k < HD_LEN(priorities); k++) {
        queue_device_prefer(d, priorities[k]);
        queue_device_ignore_events(d, false);
        assert_int_equal(pass_on(d, s, false), 1);
        assert_int_equal(pass_on(d, s, true), 1);
        queue_device_ignore_events(d, true);
        n_wrong += pass_on(d, s, false) != 1;
    }
    assert_int_equal(n_wrong, HD_LEN(priorities));
    for (int i = 0; i < QUEUE_STREAMS; i++) hd_stream_close(s[i]);
    hd_device_close(d);
}

/* A failure on a second stream of a rank is returned by the first one, once. */
static void failures_go_to_the_main_stream(void **state) {
    (void)state;
    const hd_cpu_options one = {.n_threads = 1};
    hd_device *d;
    hd_stream *s[2];
    hd_err err = {0};
    assert_int_equal(hd_device_open_cpu(&d, &one, NULL), HD_OK);
    for (int i = 0; i < 2; i++) assert_int_equal(hd_stream_open(&s[i], d, NULL), HD_OK);
    hd_stream_report_to(s[1], s[0]);
    hd_stream_fail(s[1], HD_EDEVICE, "a copy is lost");
    assert_int_equal(hd_stream_sync(s[1], NULL), HD_OK);
    assert_int_equal(hd_stream_sync(s[0], &err), HD_EDEVICE);
    assert_string_equal(err.msg, "a copy is lost");
    assert_int_equal(hd_stream_sync(s[0], NULL), HD_OK);
    for (int i = 0; i < 2; i++) hd_stream_close(s[i]);
    hd_device_close(d);
}

/* ---- a GPU ---- */

typedef struct gpu {
    hd_device *device;
    hd_stream *stream[2];
    hd_device_event *there, *back;
    int32_t *x; /* [2] device memory */
} gpu;

/* The first stream is busy, then writes x[0]; the second copies it to x[1]; the first waits. */
static void queue_pair(const gpu *g, const int32_t *from) {
    hd_stream_busy(g->stream[0], 2000);
    hd_stream_copy(g->stream[0], &g->x[0], from, sizeof *from);
    hd_stream_record_event(g->stream[0], g->there);
    hd_stream_wait_event(g->stream[1], g->there);
    hd_stream_copy(g->stream[1], &g->x[1], &g->x[0], sizeof *from);
    hd_stream_record_event(g->stream[1], g->back);
    hd_stream_wait_event(g->stream[0], g->back);
}

static void check_pair(const gpu *g, int32_t want) {
    int32_t x[2];
    hd_err err = {0};
    hd_stream_download(g->stream[0], x, g->x, sizeof x);
    if (hd_stream_sync(g->stream[0], &err) != HD_OK) fail_msg("%s", err.msg);
    assert_int_equal(x[0], want);
    assert_int_equal(x[1], want);
}

static void streams_of_a_gpu_wait(void **state) {
    (void)state;
    gpu g = {0};
    hd_graph *graph;
    hd_err err = {0};
    void *x, *source;
    if (hd_device_open_cuda(&g.device, 0, HD_CUDA_AUTO, &err) != HD_OK) {
        print_message("[  SKIPPED ] streams of a GPU: %s\n", err.msg);
        return;
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(hd_stream_open(&g.stream[i], g.device, NULL), HD_OK);
    }
    assert_int_equal(hd_device_event_open(&g.there, g.device, false, NULL), HD_OK);
    assert_int_equal(hd_device_event_open(&g.back, g.device, false, NULL), HD_OK);
    assert_int_equal(hd_device_alloc(g.device, &x, 2 * sizeof *g.x, "x", NULL), HD_OK);
    assert_int_equal(hd_device_alloc(g.device, &source, sizeof *g.x, "a source", NULL), HD_OK);
    g.x = x;
    assert_true(hd_device_event_is_done(g.back)); /* never recorded */
    for (int32_t round = 1; round < 20; round++) {
        hd_stream_upload(g.stream[0], source, &round, sizeof round);
        queue_pair(&g, source);
        assert_false(hd_device_event_is_done(g.back)); /* the stream is busy for 2 ms */
        check_pair(&g, round);
    }
    hd_stream_begin_capture(g.stream[0]);
    queue_pair(&g, source);
    if (hd_stream_end_capture(g.stream[0], &graph, &err) != HD_OK) fail_msg("%s", err.msg);
    for (int32_t round = 100; round < 120; round++) {
        hd_stream_upload(g.stream[0], source, &round, sizeof round);
        hd_stream_launch(g.stream[0], graph);
        check_pair(&g, round);
    }
    hd_graph_close(graph);
    hd_device_event_close(g.there);
    hd_device_event_close(g.back);
    for (int i = 0; i < 2; i++) hd_stream_close(g.stream[i]);
    hd_device_close(g.device);
}

/* ---- checksums ---- */

enum { SUMMED = 100 * HD_CHECKSUM_BLOCK + 77 };

/* Of any number of bytes, added to what is there. */
static void check_sums(hd_device *d) {
    static const size_t sizes[] = {
        1, 31, HD_CHECKSUM_BLOCK - 1, HD_CHECKSUM_BLOCK, HD_CHECKSUM_BLOCK + 1, SUMMED};
    static uint8_t bytes[SUMMED];
    hd_stream *s;
    void *data, *sum;
    hd_err err = {0};
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(i * i >> 3);
    assert_int_equal(hd_stream_open(&s, d, NULL), HD_OK);
    assert_int_equal(hd_device_alloc(d, &data, sizeof bytes, "bytes", NULL), HD_OK);
    assert_int_equal(hd_device_alloc(d, &sum, sizeof(uint64_t), "a sum", NULL), HD_OK);
    hd_stream_upload(s, data, bytes, sizeof bytes);
    uint64_t want = 0, got = 1;
    for (size_t k = 0; k < HD_LEN(sizes); k++) {
        hd_stream_checksum(s, sum, 7 * k, data, sizes[k]);
        hd_stream_download(s, &got, sum, sizeof got);
        if (hd_stream_sync(s, &err) != HD_OK) fail_msg("%s", err.msg);
        want += hd_checksum_blocks(7 * k, bytes, sizes[k]);
        assert_true(got == want);
    }
    hd_device_release(d, sum);
    hd_device_release(d, data);
    hd_stream_close(s);
}

static void sums_are_those_of_the_host(void **state) {
    (void)state;
    hd_device *d = shared_device_open();
    hd_err err = {0};
    check_sums(d);
    hd_device_close(d);
    if (hd_device_open_cuda(&d, 0, HD_CUDA_AUTO, &err) != HD_OK) {
        print_message("[  SKIPPED ] checksums of a GPU: %s\n", err.msg);
        return;
    }
    check_sums(d);
    hd_device_close(d);
}

/* ---- memory ---- */

static void a_limit_leaves_memory_to_others(void **state) {
    enum { KB = 1000 };
    hd_err err = {0};
    void *p;
    (void)state;
    hd_device *d = shared_device_open();
    assert_int_equal(hd_device_limit(d, 100 * KB, &err), HD_EUNSUPPORTED);
    shared_device_set_remote(d);
    shared_device_set_free(d, 300 * KB);
    assert_int_equal(hd_device_limit(d, 400 * KB, NULL), HD_OK);
    assert_int_equal(hd_device_free_bytes(d), 300 * KB); /* there is no more */
    assert_int_equal(hd_device_limit(d, 100 * KB, NULL), HD_OK);
    assert_int_equal(hd_device_free_bytes(d), 100 * KB);
    shared_device_set_free(d, 250 * KB); /* 50 are taken */
    assert_int_equal(hd_device_free_bytes(d), 50 * KB);
    err = (hd_err){0};
    assert_int_equal(hd_device_alloc(d, &p, 50 * KB + 1, "a pool", &err), HD_ENOMEM);
    assert_string_equal(
        err.msg, "a pool: no device memory for 50.00 kB; 50.00 kB are free within the limit");
    assert_int_equal(hd_device_alloc(d, &p, 50 * KB, "a pool", NULL), HD_OK);
    hd_device_release(d, p);
    shared_device_set_free(d, 150 * KB); /* others took more */
    assert_int_equal(hd_device_free_bytes(d), 0);
    assert_int_equal(hd_device_alloc_host(d, &p, 50 * KB, "a mirror", NULL), HD_OK);
    hd_device_release(d, p);
    hd_device_close(d);
}

/* ---- which kernels a GPU runs ---- */

static void a_path_follows_from_the_gpu(void **state) {
    static const char all[] = "80 89 90a 100 120", hopper[] = "90a", generic[] = "80 90";
    static const struct {
        const char *archs;
        int32_t major, minor;
        hd_cuda_path asked, path; /* HD_CUDA_AUTO: refused */
        const char *why;
    } cases[] = {
        {all,     9,  0, HD_CUDA_AUTO,    HD_CUDA_SM90,    NULL                           },
        {all,     9,  0, HD_CUDA_GENERIC, HD_CUDA_GENERIC, NULL                           },
        {all,     9,  0, HD_CUDA_SM90,    HD_CUDA_SM90,    NULL                           },
        {all,     8,  0, HD_CUDA_AUTO,    HD_CUDA_GENERIC, NULL                           },
        {all,     8,  6, HD_CUDA_AUTO,    HD_CUDA_GENERIC, NULL                           },
        {all,     8,  9, HD_CUDA_AUTO,    HD_CUDA_GENERIC, NULL                           },
        {all,     10, 0, HD_CUDA_AUTO,    HD_CUDA_GENERIC, NULL                           },
        {all,     10, 3, HD_CUDA_GENERIC, HD_CUDA_GENERIC, NULL                           },
        {all,     12, 1, HD_CUDA_AUTO,    HD_CUDA_GENERIC, NULL                           },
        {generic, 9,  0, HD_CUDA_AUTO,    HD_CUDA_GENERIC, NULL                           },
        {hopper,  9,  0, HD_CUDA_AUTO,    HD_CUDA_SM90,    NULL                           },
        {all,     7,  5, HD_CUDA_AUTO,    HD_CUDA_AUTO,
         "GPU 3 has compute capability 7.5; hadal needs 8.0 or more"                      },
        {all,     11, 0, HD_CUDA_AUTO,    HD_CUDA_AUTO,
         "GPU 3 has compute capability 11.0; this build has code for 80 89 90a 100 120"   },
        {all,     9,  1, HD_CUDA_AUTO,    HD_CUDA_AUTO,    "this build has code for 80 89"},
        {"89",    8,  6, HD_CUDA_AUTO,    HD_CUDA_AUTO,    "has code for 89"              },
        {hopper,  8,  0, HD_CUDA_GENERIC, HD_CUDA_AUTO,    "has code for 90a"             },
        {all,     8,  9, HD_CUDA_SM90,    HD_CUDA_AUTO,
         "cuda_path sm90 is for compute capability 9.0; GPU 3 has 8.9"                    },
        {generic, 9,  0, HD_CUDA_SM90,    HD_CUDA_AUTO,    "cuda_path sm90 is for"        },
    };
    (void)state;
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_cuda_path path = cases[i].asked;
        hd_err err = {0};
        const hd_status st =
            hd_cuda_path_choose(&path, cases[i].archs, 3, cases[i].major, cases[i].minor, &err);
        assert_int_equal(st, cases[i].path ? HD_OK : HD_EUNSUPPORTED);
        if (cases[i].path) {
            assert_int_equal(path, cases[i].path);
        } else if (!strstr(err.msg, cases[i].why)) {
            fail_msg("%s, not %s", err.msg, cases[i].why);
        }
    }
}

static void paths_have_names(void **state) {
    hd_cuda_path path;
    hd_err err = {0};
    (void)state;
    assert_int_equal(hd_cuda_path_of(&path, NULL, NULL), HD_OK);
    assert_int_equal(path, HD_CUDA_AUTO);
    for (int i = HD_CUDA_AUTO; i <= HD_CUDA_SM90; i++) {
        assert_int_equal(hd_cuda_path_of(&path, hd_cuda_path_names[i], NULL), HD_OK);
        assert_int_equal(path, i);
    }
    assert_int_equal(hd_cuda_path_of(&path, "sm100", &err), HD_EINVAL);
    assert_string_equal(err.msg, "cuda_path 'sm100' is none of auto, generic, sm90");
}

int test_device(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_waits_for_another_threads),
        cmocka_unit_test(events_order_queues),
        cmocka_unit_test(failures_go_to_the_main_stream),
        cmocka_unit_test(streams_of_a_gpu_wait),
        cmocka_unit_test(sums_are_those_of_the_host),
        cmocka_unit_test(a_limit_leaves_memory_to_others),
        cmocka_unit_test(a_path_follows_from_the_gpu),
        cmocka_unit_test(paths_have_names),
    };
    return cmocka_run_group_tests_name("device", tests, NULL, NULL);
}
