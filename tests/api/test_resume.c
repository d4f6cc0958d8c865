/* test_resume.c - the place of a stream: read from a header, whatever it says, and told again. */
#include "check.h"

#include <string.h>

#include "api/resume.h"

int test_resume(void);

enum { N = 2 };

static api_choice choices[N];
static api_format format = {.chunk_object = "chunk"};

static api_job job_of(const char *header) {
    api_job job = {
        .format = &format, .choices = choices, .n_choices = N, .created = 5, .nonce = 6};
    memset(choices, 0, sizeof choices);
    job.w.stream = true;
    job.seed = 4;
    api_resume_begin(&job, header);
    return job;
}

/* What is told behind an event. */
static void expect_told(api_job *job, const char *text) {
    api_text_clear(&job->out);
    api_puts(&job->out, "x");
    api_resume_tell(job);
    assert_int_equal(job->out.n, strlen(text) + 1);
    assert_memory_equal(job->out.data + 1, text, strlen(text));
    api_text_deinit(&job->out);
}

static void places_are_read_and_told(void **state) {
    (void)state;
    uint64_t seed = 1;
    api_job job = job_of("7 8 9 3 12,-1");
    expect_told(&job, ": hadal 4 8 9 3 12,-1\n\n"); /* the seed is the request's */
    assert_true(choices[0].opened && choices[0].skip == 12 && !choices[1].opened);
    job = job_of("7 8 9 0 0f,3f");
    expect_told(&job, ": hadal 4 8 9 0 0f,3f\n\n");
    assert_true(api_resume_seed("7 8 9 0 0f,3f", &seed) && seed == 7);
    job = job_of("");
    expect_told(&job, ": hadal 4 5 6 0 -1,-1\n\n");
    job = job_of(NULL);
    expect_told(&job, "");
    job = job_of("");
    api_resume_tell(&job);
    assert_int_equal(job.out.n, 0); /* behind no event */
    api_text_deinit(&job.out);
}

static void malformed_places_are_none(void **state) {
    (void)state;
    static const char *const bad[] = {" ",
                                      "x",
                                      "7",
                                      "7 8",
                                      "7 8 9",
                                      "7 8 9 3",
                                      "7 8 9 3 ",
                                      "7 8 9 3 1",
                                      "7 8 9 3 1,",
                                      "7 8 9 3 1,2,",
                                      "7 8 9 3 1,2 ",
                                      "7 8 9 3 1,2,3",
                                      "7 8 9 3 -2,1",
                                      "7 8 9 3 1f2,1",
                                      "-7 8 9 3 1,1",
                                      "7 8 9 3 1,f",
                                      "7 8 9 3 --1,1",
                                      "7  8 9 3 1,1",
                                      "7 8 9 3 1;1",
                                      "+7 8 9 3 1,1",
                                      "7 8 9 2147483648 1,1",
                                      "7 8 9 3 111111111111111111111,1"};
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        api_job job = job_of(bad[i]);
        expect_told(&job, ": hadal 4 5 6 0 -1,-1\n\n");
        assert_int_equal(choices[0].skip + choices[1].skip, 0);
    }
    uint64_t seed = 1;
    assert_false(api_resume_seed(NULL, &seed) || api_resume_seed("", &seed) ||
                 api_resume_seed("7", &seed));
    assert_int_equal(seed, 1);
}

/* The tokens of events that repeat all are no bytes to be left out. */
static void cumulative_events_have_tokens(void **state) {
    (void)state;
    format.cumulative = true;
    api_job job = {.format = &format, .choices = choices, .n_choices = N};
    job.w.stream = job.w.token_ids = job.w.logprobs = true;
    memset(choices, 0, sizeof choices);
    api_resume_begin(&job, "7 8 9 0 12,3f");
    format.cumulative = false;
    assert_true(job.tells && job.resumed);
    assert_true(choices[0].skip == 0 && choices[0].written == 12 && choices[1].finish_written);
    api_resume_begin(&job, "7 8 9 0 12,3f");
    assert_false(job.tells); /* ids would lack */
}

static void put_part(api_text *out, const hd_delta *part) {
    api_put(out, part->text, part->n);
    api_puts(out, ".");
}

static void expect_text(api_text *text, const char *expected) {
    assert_int_equal(text->n, strlen(expected));
    if (text->n) assert_memory_equal(text->data, expected, text->n);
    api_text_deinit(text);
}

/* Texts are cut anywhere; the beginning and the end of a call are left out whole. */
static void what_was_written_is_left_out(void **state) {
    (void)state;
    typedef struct row {
        hd_delta_kind kind;
        const char *text;
    } row;
    static const row rows[] = {
        {HD_DELTA_REASONING, "abc"},
        {HD_DELTA_CONTENT,   "de" },
        {HD_DELTA_CALL,      "f"  },
        {HD_DELTA_ARGUMENTS, "{}" },
        {HD_DELTA_CALL_END,  ""   },
        {HD_DELTA_CONTENT,   "g"  }
    };
    static const struct {
        int64_t skip;
        const char *left, *had;
    } cases[] = {
        {0,  "abc.de.f.{}..g.", ""               },
        {1,  "bc.de.f.{}..g.",  "a."             },
        {3,  "de.f.{}..g.",     "abc."           },
        {5,  "f.{}..g.",        "abc.de."        },
        {7,  "{}..g.",          "abc.de.f."      },
        {8,  "}..g.",           "abc.de.f.{."    },
        {9,  ".g.",             "abc.de.f.{}."   },
        {10, "g.",              "abc.de.f.{}.."  },
        {11, "",                "abc.de.f.{}..g."},
        {99, "",                "abc.de.f.{}..g."}
    };
    for (size_t k = 0; k < HD_LEN(cases); k++) {
        api_choice c = {.skip = cases[k].skip};
        api_text left = {0}, gone = {0};
        for (size_t i = 0; i < HD_LEN(rows); i++) {
            const hd_delta whole = {.text = rows[i].text, .n = strlen(rows[i].text)};
            const api_resume_parts p = api_resume_split(&c, rows[i].kind, &whole);
            if (p.has_had) put_part(&gone, &p.had);
            if (p.has_lacks) put_part(&left, &p.lacks);
        }
        assert_int_equal(c.collected, 11);
        expect_text(&left, cases[k].left);
        expect_text(&gone, cases[k].had);
    }
}

int test_resume(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(places_are_read_and_told),
        cmocka_unit_test(malformed_places_are_none),
        cmocka_unit_test(cumulative_events_have_tokens),
        cmocka_unit_test(what_was_written_is_left_out),
    };
    return cmocka_run_group_tests_name("resume", tests, NULL, NULL);
}
