/* test_wire.c - records between processes: what is put is taken, and what is cut short or
 * changed is refused or taken whole, and never leaves a request behind. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "engine/wire.h"
#include "fakes/engine_rig.h"

static hd_engine *engine;

static int open_engine(void **state) {
    (void)state;
    engine = rig_open("cpu", &(hd_engine_options){.max_context = 256});
    return 0;
}

static int close_engine(void **state) {
    (void)state;
    hd_engine_close(engine);
    return 0;
}

static engine_request *prepared(const hd_request *g) {
    engine_request *r = calloc(1, sizeof *r);
    hd_err err = {0};
    assert_non_null(r);
    r->id = 5ull << 32 | 3 << ENGINE_CHOICE_BITS;
    if (engine_prepare(engine, r, g, NULL, &err) != HD_OK) fail_msg("%s", err.msg);
    return r;
}

static void drop(engine_request *r) {
    engine_forget_request(engine, r);
    free(r);
}

static hd_bytes record_of(const engine_request *r) {
    hd_bytes bytes = {0};
    assert_int_equal(engine_put_request(&bytes, r, NULL), HD_OK);
    return bytes;
}

/* Takes it at its place in the engine's table; NULL: it was refused. */
static engine_request *take(const hd_bytes *bytes, size_t n) {
    engine_record record;
    engine_reader from = {bytes->data, n};
    hd_err err = {0};
    if (engine_take_bytes(&from, &record, sizeof record, &err) != HD_OK ||
        record.kind != ENGINE_RECORD_SUBMIT ||
        engine_take_request(engine, &from, record.id, &err) != HD_OK) {
        assert_true(err.status != HD_OK || n >= sizeof record);
        return NULL;
    }
    assert_true(from.n == 0 || n == bytes->n);
    return engine_request_of(engine, record.id);
}

static void same_constraint(const hd_constraint *a, const hd_constraint *b) {
    assert_true(a->reasoning == b->reasoning && a->free == b->free);
    assert_true(a->think == b->think && a->unthink == b->unthink);
    assert_int_equal(a->max_reasoning, b->max_reasoning);
    assert_ptr_equal(a->grammar, b->grammar); /* of the same cache */
    assert_int_equal(a->n_forced, b->n_forced);
    assert_int_equal(a->n_ban, b->n_ban);
    if (a->n_forced)
        assert_memory_equal(a->forced, b->forced, (size_t)a->n_forced * sizeof *a->forced);
}

static void same(const engine_request *a, const engine_request *b) {
    const hd_sched_request *x = &a->request, *y = &b->request;
    assert_int_equal(a->n_choices, b->n_choices);
    assert_int_equal(x->n_prompt, y->n_prompt);
    assert_memory_equal(x->prompt, y->prompt, (size_t)x->n_prompt * sizeof *x->prompt);
    assert_int_equal(x->max_new, y->max_new);
    assert_int_equal(x->priority, y->priority);
    assert_int_equal(x->draft_tokens, y->draft_tokens);
    assert_true(x->salt == y->salt && (x->queue_until_ns != 0) == (y->queue_until_ns != 0));
    assert_int_equal(x->n_stop, y->n_stop);
    assert_memory_equal(x->stop_ids, y->stop_ids, (size_t)x->n_stop * sizeof *x->stop_ids);
    assert_int_equal(a->prompt_logprobs_from, b->prompt_logprobs_from);
    for (int32_t i = 0; i < a->n_choices; i++) {
        const hd_request_sampling *s = &a->choices[i].sampling, *t = &b->choices[i].sampling;
        assert_memory_equal(&s->params, &t->params, sizeof s->params);
        assert_true(!s->constraint == !t->constraint);
        if (s->constraint) same_constraint(s->constraint, t->constraint);
        assert_memory_equal(s->bias, t->bias, (size_t)s->params.n_bias * sizeof *s->bias);
        assert_memory_equal(s->ban, t->ban, (size_t)s->params.n_ban * sizeof *s->ban);
    }
}

static const hd_logit_bias biases[] = {
    {300, 2.0f },
    {301, -1.0f}
};
static const char *const words[] = {"red", "blue", ""};
static const int32_t stop_tokens[] = {7, 9};
static const char TOOLS[] = "[{\"type\":\"function\",\"function\":{\"name\":\"look\"}}]";
static const char MESSAGES[] = "[{\"role\":\"user\",\"content\":\"Look.\"}]";

static const hd_request requests[] = {
    {.size = sizeof requests[0],           .text = "One day", .max_tokens = 4},
    { .size = sizeof requests[0],
     .text = "Once upon a time",
     .n = 3,
     .seed = 11,
     .temperature = 0.7f,
     .bias = biases,
     .n_bias = HD_LEN(biases),
     .stop_tokens = stop_tokens,
     .n_stop_tokens = HD_LEN(stop_tokens),
     .min_tokens = 2,
     .priority = -3,
     .salt = 99,
     .queue_timeout_ns = 5000000000,
     .draft_tokens = 2,
     .top_logprobs = 2,
     .prompt_logprobs = true},
    {                                                             .size = sizeof requests[0],
     .text = "A",
     .response_format = HD_FORMAT_CHOICE,
     .choices = words,
     .n_choices = 2,
     .min_tokens = 1},
    {                                                                 .size = sizeof requests[0],
     .text = "A",
     .response_format = HD_FORMAT_REGEX,
     .format_text = "[a-c]+"},
    {.size = sizeof requests[0],
     .messages = MESSAGES,
     .tools = TOOLS,
     .tool_choice = "required",
     .max_reasoning = 9},
};

static void a_request_arrives_whole(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(requests); i++) {
        engine_request *r = prepared(&requests[i]);
        hd_bytes bytes = record_of(r);
        engine_request *got = take(&bytes, bytes.n);
        assert_non_null(got);
        same(r, got);
        assert_null(take(&bytes, bytes.n)); /* its place is not free */
        engine_forget_request(engine, got);
        hd_bytes_deinit(&bytes);
        drop(r);
    }
}

/* The second request, of which one choice has ended and one has put out two tokens. */
static engine_request *begun(void) {
    engine_request *r = prepared(&requests[1]);
    engine_choice *c = r->choices;
    c[0].posted = true;
    c[0].n_posted = 3;
    c[1].n_posted = 2;
    c[1].tokens = calloc(2, sizeof *c[1].tokens);
    assert_non_null(c[1].tokens);
    c[1].tokens[0] = 44;
    c[1].tokens[1] = 55;
    return r;
}

static void what_choices_have_put_out_arrives(void **state) {
    (void)state;
    engine_request *r = begun();
    hd_bytes bytes = record_of(r);
    engine_request *got = take(&bytes, bytes.n);
    assert_non_null(got);
    same(r, got);
    assert_int_equal(got->n_left, 2);
    assert_true(got->choices[0].posted && !got->choices[1].posted && !got->choices[2].posted);
    assert_true(got->choices[1].n_posted == 2 && got->choices[2].n_posted == 0);
    assert_memory_equal(got->choices[1].tokens, r->choices[1].tokens, 2 * sizeof(int32_t));
    engine_forget_request(engine, got);
    for (size_t n = 0; n < bytes.n; n++) assert_null(take(&bytes, n));
    hd_bytes_deinit(&bytes);
    for (int32_t i = 1; i < 3; i++) r->choices[i].posted = true;
    bytes = record_of(r);
    assert_null(take(&bytes, bytes.n)); /* nothing is left of it */
    hd_bytes_deinit(&bytes);
    drop(r);
}

static void half_a_request_is_refused(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(requests); i++) {
        engine_request *r = prepared(&requests[i]);
        hd_bytes bytes = record_of(r);
        for (size_t n = 0; n < bytes.n; n++) {
            assert_null(take(&bytes, n));
            assert_null(engine_request_of(engine, r->id));
        }
        hd_bytes_deinit(&bytes);
        drop(r);
    }
}

static void numbers_out_of_range_are_refused(void **state) {
    (void)state;
    engine_request *r = begun();
    hd_bytes bytes = record_of(r);
    for (size_t at = 0; at + 4 <= bytes.n; at += 4) {
        static const int32_t values[] = {-1, INT32_MAX, INT32_MIN, 1 << 20};
        for (size_t k = 0; k < HD_LEN(values); k++) {
            int32_t kept;
            memcpy(&kept, bytes.data + at, sizeof kept);
            memcpy(bytes.data + at, &values[k], sizeof values[k]);
            engine_request *got = take(&bytes, bytes.n);
            if (got) engine_forget_request(engine, got);
            memcpy(bytes.data + at, &kept, sizeof kept);
        }
    }
    for (int32_t i = 0; i < engine->n_requests; i++)
        assert_int_equal(engine->requests[i].id, 0);
    hd_bytes_deinit(&bytes);
    drop(r);
}

static void an_output_arrives_whole(void **state) {
    (void)state;
    hd_alternative top[HD_MAX_STEP_TOKENS * HD_DEFAULT_LOGPROBS] = {0}, memory[HD_LEN(top)];
    for (int i = 0; i < 4; i++) top[i] = (hd_alternative){i, -(float)i};
    const engine_step_output p = {
        .id = 77,
        .step = {.tokens = {4, 5},
                 .logprobs = {-1.0f, -2.0f},
                 .top = top,
                 .n_tokens = 2,
                 .n_top = 2,
                 .n_drafted = 3,
                 .n_accepted = 1,
                 .n_cached = 6,
                 .finish_reason = HD_FINISH_ERROR},
        .top = top,
        .why = (char *)(uintptr_t) "its reason",
        .n_retracted = 2
    };
    hd_bytes bytes = {0};
    assert_int_equal(engine_put_output(&bytes, 1, &p, NULL), HD_OK);
    for (size_t n = 0; n <= bytes.n; n++) {
        engine_record record = {0};
        engine_step_output got = {.top = memory};
        engine_reader from = {bytes.data, n};
        hd_status st = engine_take_bytes(&from, &record, sizeof record, NULL);
        if (st == HD_OK) st = engine_take_output(engine, &from, record.id, &got, NULL);
        assert_int_equal(st, n < bytes.n ? HD_EPEER : HD_OK);
        if (st != HD_OK) continue;
        assert_true(got.id == 77 && record.group == 1 && got.admitted_ns == 0);
        assert_string_equal(got.why, p.why);
        assert_memory_equal(got.step.tokens, p.step.tokens, sizeof p.step.tokens);
        assert_memory_equal(got.step.top, top, 4 * sizeof *top);
        assert_int_equal(got.step.n_accepted, 1);
        assert_int_equal(got.n_retracted, 2);
        free(got.why);
    }
    hd_bytes_deinit(&bytes);
}

static void prompt_log_probabilities_arrive_whole(void **state) {
    (void)state;
    engine_request *r = prepared(&requests[1]);
    const float logprobs[] = {-1.0f, -2.0f};
    const hd_alternative top[] = {
        {1, -1.0f},
        {2, -2.0f},
        {3, -1.5f},
        {4, -2.5f}
    };
    hd_prompt_logprobs p = {.logprobs = logprobs, .top = top, .n = 2, .n_top = 2, .from = 1};
    for (int32_t from = 0; from < r->n_prompt; from++) {
        hd_bytes bytes = {0};
        p.from = from;
        assert_int_equal(engine_put_prompt(&bytes, 1, r->id, &p, NULL), HD_OK);
        engine_reader body = {bytes.data + sizeof(engine_record),
                              bytes.n - sizeof(engine_record)};
        const bool fits = from >= 1 && from + 2 <= r->n_prompt;
        assert_int_equal(engine_take_prompt(&body, r, NULL), fits ? HD_OK : HD_EPEER);
        if (fits) {
            assert_memory_equal(r->prompt_logprobs + from - 1, logprobs, sizeof logprobs);
            assert_int_equal(r->n_prompt_logprobs, from + 1);
        }
        hd_bytes_deinit(&bytes);
    }
    drop(r);
}

/* ---- pages ---- */

enum { PAGE = 128, N_TOKENS = PAGE + 1 };

typedef struct waits {
    char page[64];
    int32_t n_room, n_exported;
    hd_status st;
    bool wants;
} waits;

static void *on_room(void *ctx, size_t n) {
    waits *w = ctx;
    assert_true(n <= sizeof w->page);
    w->n_room++;
    return w->wants ? w->page : NULL;
}

static void on_exported(void *ctx, hd_status st) {
    waits *w = ctx;
    w->n_exported++;
    w->st = st;
}

static hd_status take_page(engine_request *r, const hd_bytes *b, size_t n) {
    engine_record record;
    engine_reader from = {b->data, n};
    HD_TRY(engine_take_bytes(&from, &record, sizeof record, NULL));
    return engine_take_page(engine, &from, r, record.n, NULL);
}

static void pages_arrive_whole(void **state) {
    (void)state;
    waits w = {.wants = true};
    static const char bytes[] =
        "a page, as long as a head with eight bytes behind it, or longer";
    hd_bytes page = {0}, failure = {0}, wrong = {0};
    const size_t n = sizeof(hd_page_head) + 8;
    assert_true(n < sizeof bytes);
    engine->page_bytes[HD_KV_FULL] = 8;
    engine_request r = {
        .watch = {.ctx = &w, .pages = {.n = {2, 0}}, .room = on_room, .exported = on_exported}
    };
    assert_int_equal(engine_put_page(&page, 1, 7, HD_OK, bytes, n, NULL), HD_OK);
    assert_int_equal(engine_put_page(&wrong, 1, 7, HD_OK, "a page", 6, NULL), HD_OK);
    assert_int_equal(engine_put_page(&failure, 1, 7, HD_EAGAIN, NULL, 0, NULL), HD_OK);
    for (size_t i = 0; i < page.n; i++) assert_int_equal(take_page(&r, &page, i), HD_EPEER);
    assert_int_equal(take_page(&r, &wrong, wrong.n), HD_EPEER);
    assert_int_equal(w.n_room, 0);
    assert_int_equal(take_page(&r, &page, page.n), HD_OK);
    assert_true(w.n_exported == 1 && w.st == HD_OK && r.n_exported == 1);
    assert_memory_equal(w.page, bytes, n);
    assert_int_equal(take_page(&r, &failure, failure.n), HD_OK);
    assert_true(w.n_exported == 2 && w.st == HD_EAGAIN);
    assert_int_equal(take_page(&r, &page, page.n), HD_EPEER); /* there are two */
    r.n_exported = 1;
    w.wants = false;
    assert_int_equal(take_page(&r, &page, page.n), HD_OK);
    assert_true(w.n_exported == 2 && r.n_exported == 2);
    hd_bytes_deinit(&page);
    hd_bytes_deinit(&wrong);
    hd_bytes_deinit(&failure);
}

static hd_status take_job(hd_page_job *job, const hd_bytes *b, size_t n) {
    engine_record record;
    engine_reader from = {b->data, n};
    *job = (hd_page_job){0};
    HD_TRY(engine_take_bytes(&from, &record, sizeof record, NULL));
    return engine_take_job(engine, &from, job, NULL);
}

static void drop_job(const hd_page_job *job) {
    free((void *)(uintptr_t)job->tokens);
    free((void *)(uintptr_t)job->message);
    free(job->copy);
}

static void jobs_arrive_whole(void **state) {
    (void)state;
    static int32_t tokens[N_TOKENS];
    char message[sizeof(hd_page_head) + 8] = {0};
    hd_page_head head = {.group = HD_KV_FULL, .bytes = 8};
    hd_page_job job, got;
    engine->page_bytes[HD_KV_FULL] = 8;
    for (uint32_t page = 0; page < 2; page++) {
        hd_bytes b = {0};
        head.page = page;
        memcpy(message, &head, sizeof head);
        job = (hd_page_job){.work = HD_PAGES_PLACE,
                            .salt = 5,
                            .tokens = tokens,
                            .n_tokens = N_TOKENS,
                            .message = message,
                            .n = sizeof message,
                            .weights = 6};
        assert_int_equal(engine_put_job(&b, &job, NULL), HD_OK);
        for (size_t i = 0; i <= b.n; i++) {
            const bool right = page == 0 && i == b.n; /* the prompt has one whole page */
            assert_int_equal(take_job(&got, &b, i), right ? HD_OK : HD_EPEER);
            if (right) assert_memory_equal(got.message, message, sizeof message);
            if (right) assert_true(got.salt == 5 && got.weights == 6);
            drop_job(&got);
        }
        hd_bytes_deinit(&b);
    }
}

static void the_end_of_a_job_arrives_whole(void **state) {
    (void)state;
    hd_bytes b = {0};
    engine_record record;
    const int32_t page = hd_kv_shape_of(engine->spec).page_tokens;
    hd_page_job job = {.n_tokens = 3 * page + 1, .status = HD_EAGAIN, .weights = 9}, got = job;
    got.status = HD_OK;
    job.lacking = (hd_page_range){
        .first = {1, 2},
          .n = {2, 1}
    };
    assert_int_equal(engine_put_job_done(engine, &b, &job, NULL), HD_OK);
    engine_reader from = {b.data, b.n};
    assert_int_equal(engine_take_bytes(&from, &record, sizeof record, NULL), HD_OK);
    const engine_reader body = from;
    assert_int_equal(engine_take_job_done(engine, &from, &got, NULL), HD_OK);
    assert_true(got.status == HD_EAGAIN && got.weights == 9);
    assert_memory_equal(&got.lacking, &job.lacking, sizeof job.lacking);
    got.n_tokens = 3 * page - 1; /* it has no third page */
    from = body;
    assert_int_equal(engine_take_job_done(engine, &from, &got, NULL), HD_EPEER);
    from = (engine_reader){body.at, body.n - 1};
    assert_int_equal(engine_take_job_done(engine, &from, &got, NULL), HD_EPEER);
    hd_bytes_deinit(&b);
}

/* What is asked of another process, and the bytes that come back. */
static void a_copied_page_arrives_whole(void **state) {
    (void)state;
    const int32_t n_tokens = 2 * hd_kv_shape_of(engine->spec).page_tokens;
    const size_t bytes = engine->page_bytes[HD_KV_FULL];
    int32_t *tokens = calloc((size_t)n_tokens, sizeof *tokens);
    assert_true(bytes > 0);
    uint8_t *page = malloc(bytes), *to = malloc(bytes);
    hd_page_job got, job = {.work = HD_PAGES_COPY,
                            .tokens = tokens,
                            .n_tokens = n_tokens,
                            .kind = HD_KV_FULL,
                            .page = 1,
                            .from_disk = true,
                            .copy = to};
    hd_bytes asked = {0}, told = {0};
    engine_record record;
    for (size_t i = 0; i < bytes; i++) page[i] = (uint8_t)(i * 7 + i / 256);
    for (job.page = 1; job.page < 4; job.page += 2) {
        asked.n = 0;
        assert_int_equal(engine_put_job(&asked, &job, NULL), HD_OK);
        const bool right = job.page == 1; /* it has no fourth page */
        assert_int_equal(take_job(&got, &asked, asked.n), right ? HD_OK : HD_EPEER);
        if (right) {
            assert_true(got.work == HD_PAGES_COPY && got.page == 1 && got.from_disk);
            memcpy(got.copy, page, bytes);
            assert_int_equal(engine_put_job_done(engine, &told, &got, NULL), HD_OK);
        }
        drop_job(&got);
    }
    engine_reader from = {told.data, told.n};
    assert_int_equal(engine_take_bytes(&from, &record, sizeof record, NULL), HD_OK);
    const engine_reader body = from;
    assert_int_equal(engine_take_job_done(engine, &from, &job, NULL), HD_OK);
    assert_int_equal(from.n, 0);
    assert_memory_equal(to, page, bytes);
    from = (engine_reader){body.at, body.n - 1};
    assert_int_equal(engine_take_job_done(engine, &from, &job, NULL), HD_EPEER);
    hd_bytes_deinit(&asked);
    hd_bytes_deinit(&told);
    free(tokens);
    free(page);
    free(to);
}

int test_wire(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_arrives_whole),
        cmocka_unit_test(what_choices_have_put_out_arrives),
        cmocka_unit_test(half_a_request_is_refused),
        cmocka_unit_test(numbers_out_of_range_are_refused),
        cmocka_unit_test(an_output_arrives_whole),
        cmocka_unit_test(prompt_log_probabilities_arrive_whole),
        cmocka_unit_test(pages_arrive_whole),
        cmocka_unit_test(jobs_arrive_whole),
        cmocka_unit_test(the_end_of_a_job_arrives_whole),
        cmocka_unit_test(a_copied_page_arrives_whole),
    };
    return cmocka_run_group_tests_name("wire", tests, open_engine, close_engine);
}
