/* test_pages.c - what the engine lets those do who move pages: requests wait for them, functions run
 * on the step thread, and pages of one engine serve another. */
#include "check.h"

#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "fakes/engine_rig.h"

enum { N_TOKENS = 300, PAGE = 128, WHOLE = 2 };

static int32_t tokens[N_TOKENS];

static hd_engine *open_engine(double host_gb) {
    for (int32_t i = 0; i < N_TOKENS; i++) tokens[i] = i * 31 % 997 + 5;
    return rig_open("cpu", &(hd_engine_options){.model_dir = "models/tiny-v4",
                                                .max_running = 2,
                                                .max_context = 512,
                                                .kv_tokens = 1024,
                                                .chunk_tokens = 100,
                                                .kv_host_gb = host_gb});
}

static hd_request request_of(const char *server) {
    return (hd_request){.size = sizeof(hd_request),
                        .tokens = tokens,
                        .n_tokens = N_TOKENS,
                        .max_tokens = 4,
                        .prefill = server,
                        .n = 2};
}

/* Notes of a source that has every request wait if it says so. */
typedef struct notes {
    bool takes;
    int32_t n_asked, n_cancelled;
    uint64_t cancelled;
} notes;

static bool on_fetch(void *ctx, const hd_page_wish *w) {
    notes *s = ctx;
    s->n_asked++;
    assert_string_equal(w->server, "there:1");
    assert_int_equal(w->n_tokens, N_TOKENS);
    assert_memory_equal(w->tokens, tokens, sizeof tokens);
    return s->takes;
}

static void on_cancelled(void *ctx, uint64_t id) {
    notes *s = ctx;
    s->n_cancelled++;
    s->cancelled = id;
}

/* Polls until the request has ended. Returns its finish reason. */
static hd_finish_reason run(hd_engine *e) {
    hd_event event;
    while (hd_engine_poll(e, &event, -1)) {
        if (event.last) return event.step.finish_reason;
    }
    return HD_FINISH_NONE;
}

static int32_t fetching(hd_engine *e) {
    hd_engine_stats s;
    hd_engine_read_stats(e, &s);
    return s.fetching;
}

static void requests_wait_until_pages_are_settled(void **state) {
    (void)state;
    hd_engine *e = open_engine(0);
    notes s = {.takes = true};
    const hd_page_source source = {&s, on_fetch, on_cancelled};
    const hd_request with = request_of("there:1"), without = request_of(NULL);
    hd_request scored = with;
    scored.prompt_logprobs = true;
    scored.prompt_logprobs_from = 1;
    hd_event event;
    uint64_t id = hd_engine_submit(e, &with, NULL, NULL, 0); /* nobody fetches */
    assert_int_equal(run(e), HD_FINISH_LENGTH);
    hd_engine_set_page_source(e, &source);
    assert_true(hd_engine_submit(e, &without, NULL, NULL, 0));
    assert_int_equal(run(e), HD_FINISH_LENGTH);
    assert_true(hd_engine_submit(e, &scored, NULL, NULL, 0)); /* its rows are to be computed */
    assert_int_equal(run(e), HD_FINISH_LENGTH);
    assert_int_equal(s.n_asked, 0);
    id = hd_engine_submit(e, &with, NULL, NULL, 0);
    assert_int_equal(s.n_asked, 1);
    assert_int_equal(fetching(e), 2);
    assert_false(hd_engine_poll(e, &event, 50000000));
    hd_engine_pages_settled(e, id + 1000);
    assert_int_equal(fetching(e), 2);
    hd_engine_pages_settled(e, id);
    assert_int_equal(fetching(e), 0);
    assert_int_equal(run(e), HD_FINISH_LENGTH);
    hd_engine_pages_settled(e, id);
    s.takes = false;
    assert_true(hd_engine_submit(e, &with, NULL, NULL, 0));
    assert_int_equal(run(e), HD_FINISH_LENGTH);
    assert_int_equal(s.n_cancelled, 0);
    hd_engine_close(e);
}

static void a_cancelled_request_waits_no_longer(void **state) {
    (void)state;
    hd_engine *e = open_engine(0);
    notes s = {.takes = true};
    const hd_page_source source = {&s, on_fetch, on_cancelled};
    const hd_request g = request_of("there:1");
    hd_engine_set_page_source(e, &source);
    const uint64_t id = hd_engine_submit(e, &g, NULL, NULL, 0);
    hd_engine_cancel(e, id);
    assert_int_equal(s.n_cancelled, 1);
    assert_true(s.cancelled == id);
    assert_int_equal(run(e), HD_FINISH_ABORT);
    hd_engine_cancel(e, id);
    assert_int_equal(s.n_cancelled, 1);
    hd_engine_close(e);
}

/* ---- pages ---- */

enum { N_PAGES = WHOLE * HD_N_KV_GROUPS };

typedef struct moved {
    uint32_t n, most; /* pages that were exported; then no more are wanted */
    hd_status st;     /* of the last one */
    void *messages[N_PAGES];
    size_t bytes[N_PAGES];
} moved;

static void *on_room(void *ctx, size_t n) {
    moved *m = ctx;
    if (m->n == m->most) return NULL;
    m->bytes[m->n] = n;
    m->messages[m->n] = malloc(n);
    return m->messages[m->n];
}

static void on_exported(void *ctx, hd_status st) {
    moved *m = ctx;
    m->st = st;
    if (st != HD_OK) free(m->messages[m->n]);
    m->n += st == HD_OK;
}

typedef struct waited_job {
    hd_page_job job;
    sem_t done;
} waited_job;

static void on_done(hd_page_job *job) {
    sem_post(&((waited_job *)job)->done);
}

static hd_page_job run_job(hd_engine *e, hd_page_job job) {
    waited_job j = {.job = job};
    j.job.tokens = tokens;
    j.job.n_tokens = WHOLE * PAGE + 1;
    j.job.done = on_done;
    sem_init(&j.done, 0, 0);
    hd_engine_post_job(e, 0, &j.job);
    while (sem_wait(&j.done) != 0) {
    }
    sem_destroy(&j.done);
    return j.job;
}

/* All pages in both groups. */
static const hd_page_range both = {
    .n = {WHOLE, WHOLE}
};

static void export_all(hd_engine *e, moved *m, uint64_t weights) {
    hd_request g = request_of(NULL);
    const hd_page_watch watch = {m, both, weights, on_room, on_exported};
    uint64_t id;
    g.n = 1;
    g.max_tokens = 1;
    assert_int_equal(hd_engine_submit_watched(e, &id, &g, &watch, NULL), HD_OK);
    assert_int_equal(run(e), HD_FINISH_LENGTH);
}

static void drop(moved *m) {
    for (uint32_t i = 0; i < m->n; i++) free(m->messages[i]);
}

static void exports_end_early(void **state) {
    (void)state;
    hd_engine *e = open_engine(0.05);
    moved some = {.most = 1}, none = {.most = N_PAGES};
    export_all(e, &some, 0);
    assert_true(some.n == 1 && some.st == HD_OK); /* nobody wants more */
    export_all(e, &none, 1);
    assert_true(none.n == 0 && none.st == HD_EINVAL); /* the weights are others */
    hd_page_job place = {
        .work = HD_PAGES_PLACE, .message = some.messages[0], .n = some.bytes[0], .weights = 1};
    assert_int_equal(run_job(e, place).status, HD_EINVAL);
    place.weights = 0;
    assert_int_equal(run_job(e, place).status, HD_OK);
    drop(&some);
    hd_engine_close(e);
}

/* What is found is what a request continues behind, and a copy has the bytes that are exported. */
static void pages_are_found_and_copied(void **state) {
    (void)state;
    hd_engine *e = open_engine(0.05);
    const hd_page_job look = {.work = HD_PAGES_FIND};
    moved m = {.most = N_PAGES};
    hd_page_job found = run_job(e, look);
    assert_true(found.status == HD_OK && hd_page_range_size(&found.lacking) == 0);
    export_all(e, &m, 0);
    found = run_job(e, look);
    assert_true(found.status == HD_OK && found.weights == 0);
    assert_int_equal(found.lacking.n[HD_KV_FULL], WHOLE);
    assert_int_equal(found.lacking.n[HD_KV_WINDOW], 1);
    assert_int_equal(found.lacking.first[HD_KV_WINDOW], WHOLE - 1);
    for (uint32_t i = 0; i < m.n; i++) {
        hd_page_head head;
        memcpy(&head, m.messages[i], sizeof head);
        uint8_t *bytes = malloc(head.bytes);
        hd_page_job copy = {.work = HD_PAGES_COPY,
                            .kind = (hd_kv_group)head.group,
                            .page = (int32_t)head.page,
                            .copy = bytes,
                            .weights = 1};
        assert_int_equal(run_job(e, copy).status, HD_EINVAL);
        copy.weights = 0;
        assert_int_equal(run_job(e, copy).status, HD_OK);
        assert_memory_equal(bytes, (uint8_t *)m.messages[i] + sizeof head, head.bytes);
        free(bytes);
    }
    hd_engine_flush(e);
    assert_int_equal(run_job(e, (hd_page_job){.work = HD_PAGES_COPY}).status, HD_EAGAIN);
    drop(&m);
    hd_engine_close(e);
}

/* The last events of all running requests leave the step early. */
static void pages_come_before_the_last_event(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.model_dir = "models/tiny-v4",
                                                        .max_running = 1,
                                                        .max_context = 512,
                                                        .kv_host_gb = 0.05});
    moved m = {.most = N_PAGES};
    export_all(e, &m, 0);
    assert_int_equal(m.n, N_PAGES);
    drop(&m);
    hd_engine_close(e);
}

static void pages_are_shown_behind_steps_and_serve_another_engine(void **state) {
    (void)state;
    hd_engine *one = open_engine(0.05), *other = open_engine(0.05), *without = open_engine(0);
    moved m = {.most = N_PAGES};
    const hd_request g = request_of(NULL);
    hd_engine_stats stats;
    assert_int_equal(hd_engine_check_pages(one, NULL, NULL), HD_OK);
    assert_int_equal(hd_engine_check_pages(without, NULL, NULL), HD_EUNSUPPORTED);
    export_all(one, &m, 0);
    assert_int_equal(m.n, N_PAGES);
    const hd_page_job look = {.work = HD_PAGES_LOOK};
    hd_page_job looked = run_job(other, look);
    assert_true(looked.status == HD_OK && looked.weights == 0);
    assert_int_equal(hd_page_range_size(&looked.lacking), WHOLE + 1); /* one WINDOW page */
    for (uint32_t i = 0; i < m.n; i++) {
        const hd_page_job place = {
            .work = HD_PAGES_PLACE, .message = m.messages[i], .n = m.bytes[i]};
        assert_int_equal(run_job(other, place).status, HD_OK);
    }
    drop(&m);
    looked = run_job(other, look);
    assert_int_equal(hd_page_range_size(&looked.lacking), 0);
    rig_answer mine[2], theirs[2];
    rig_run(other, &g, mine);
    hd_engine_read_stats(other, &stats);
    assert_int_equal(stats.cached_tokens, 2 * WHOLE * PAGE);
    rig_run(without, &g, theirs);
    for (int i = 0; i < 2; i++) {
        rig_same(&theirs[i], &mine[i]);
        rig_deinit(&mine[i]);
        rig_deinit(&theirs[i]);
    }
    hd_engine_close(one);
    hd_engine_close(other);
    hd_engine_close(without);
}

int test_pages(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_wait_until_pages_are_settled),
        cmocka_unit_test(a_cancelled_request_waits_no_longer),
        cmocka_unit_test(pages_are_shown_behind_steps_and_serve_another_engine),
        cmocka_unit_test(exports_end_early),
        cmocka_unit_test(pages_are_found_and_copied),
        cmocka_unit_test(pages_come_before_the_last_event),
    };
    return cmocka_run_group_tests_name("pages", tests, NULL, NULL);
}
