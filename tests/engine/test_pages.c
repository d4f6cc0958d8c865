/* test_pages.c - what the engine lets those do who move pages: requests wait for them, functions run
 * on the step thread, and pages of one engine serve another. */
#include "check.h"

#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
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

typedef struct moved {
    hd_page_job job;
    sem_t done;
    int32_t n_shown; /* calls of the watch */
    int32_t n_done;  /* the last one's */
    void *messages[WHOLE][HD_N_KV_GROUPS];
    size_t bytes[HD_N_KV_GROUPS];
    uint64_t weights;
} moved;

static hd_handover side_of(const hd_engine_pages *pages) {
    hd_handover h = pages->side;
    h.tokens = tokens;
    h.n_tokens = N_TOKENS;
    return h;
}

static void on_computed(void *ctx, int32_t n_done, const hd_engine_pages *pages) {
    moved *m = ctx;
    const hd_handover h = side_of(pages);
    assert_int_equal(h.page_tokens, PAGE);
    assert_int_equal(hd_handover_pages(&h), WHOLE);
    assert_true(n_done > m->n_done);
    m->n_shown++;
    for (int32_t p = m->n_done / PAGE; p < hd_min_i32(n_done / PAGE, WHOLE); p++) {
        for (int g = 0; g < HD_N_KV_GROUPS; g++) {
            m->bytes[g] = hd_handover_bytes(&h, (hd_kv_group)g);
            m->messages[p][g] = malloc(m->bytes[g]);
            assert_int_equal(hd_handover_export(&h, (hd_kv_group)g, p, m->messages[p][g], NULL),
                             HD_OK);
        }
    }
    m->n_done = n_done;
    m->weights = pages->weights;
}

static void put(hd_page_job *job, const hd_engine_pages *pages) {
    moved *m = (moved *)job;
    const hd_handover h = side_of(pages);
    for (int32_t p = 0; p < WHOLE; p++) {
        for (int g = 0; g < HD_N_KV_GROUPS; g++) {
            assert_int_equal(hd_handover_import(&h, m->messages[p][g], m->bytes[g], NULL),
                             HD_OK);
            free(m->messages[p][g]);
        }
    }
    assert_true(pages->weights == m->weights);
    sem_post(&m->done);
}

static void pages_are_shown_behind_steps_and_serve_another_engine(void **state) {
    (void)state;
    hd_engine *one = open_engine(0.05), *other = open_engine(0.05), *without = open_engine(0);
    moved m = {.job.run = put};
    const hd_page_watch watch = {&m, on_computed};
    const hd_request g = request_of(NULL);
    hd_engine_stats stats;
    uint64_t id;
    assert_int_equal(hd_engine_check_pages(one, NULL), HD_OK);
    assert_int_equal(hd_engine_check_pages(without, NULL), HD_EUNSUPPORTED);
    hd_request first = g;
    first.n = 1;
    first.max_tokens = 1;
    assert_int_equal(hd_engine_submit_watched(one, &id, &first, &watch, NULL), HD_OK);
    assert_int_equal(run(one), HD_FINISH_LENGTH);
    assert_int_equal(m.n_shown, 3); /* chunks of 100 tokens */
    assert_int_equal(m.n_done, N_TOKENS);
    sem_init(&m.done, 0, 0);
    hd_engine_post_job(other, 0, &m.job);
    while (sem_wait(&m.done) != 0) {
    }
    sem_destroy(&m.done);
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
    };
    return cmocka_run_group_tests_name("pages", tests, NULL, NULL);
}
