/* test_base.c - errors, arenas, random numbers, hashes, thread pools. */
#include "check.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base64.h"
#include "base/checksum.h"
#include "base/arena.h"
#include "base/checked.h"
#include "base/memory.h"
#include "base/nh.h"
#include "base/philox.h"
#include "base/thread_pool.h"
#include "base/siphash.h"
#include "base/status.h"

static void first_error_wins(void **state) {
    (void)state;
    hd_err err = {0};
    assert_int_equal(HD_FAIL(&err, HD_EIO, "disk %d\n\x1b[2J", 7), HD_EIO);
    assert_int_equal(HD_FAIL(&err, HD_EINVAL, "later"), HD_EINVAL);
    assert_int_equal(err.status, HD_EIO);
    assert_string_equal(err.msg, "disk 7\\x0a\\x1b[2J");
    assert_int_equal(HD_FAIL(NULL, HD_ENOMEM, "nobody listens"), HD_ENOMEM);
}

/* Code and field come from the place that fails, never from its sentence. */
static void refusals_have_code_and_field(void **state) {
    (void)state;
    hd_err err = {0};
    assert_int_equal(HD_REFUSE(&err, HD_EINVAL, "schema_cycle",
                               hd_field_of("messages[%d].content", 3).path, "other: %d", 7),
                     HD_EINVAL);
    assert_string_equal(err.code, "schema_cycle");
    assert_string_equal(err.field, "messages[3].content");
    assert_string_equal(err.msg, "other: 7");
    HD_REFUSE(&err, HD_EUNSUPPORTED, "later", "later", "later");
    hd_err_set_field(&err, "later");
    assert_int_equal(err.status, HD_EINVAL);
    assert_string_equal(err.code, "schema_cycle");
    assert_string_equal(err.field, "messages[3].content");

    err = (hd_err){0};
    HD_FAIL(&err, HD_EINVAL, "schema_cycle: a.b: no");
    assert_null(err.code);
    assert_string_equal(err.field, "");
    hd_err_set_field(&err, "tools");
    assert_string_equal(err.field, "tools");
    hd_err_set_field(NULL, "tools");

    char name[400];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    err = (hd_err){0};
    HD_REFUSE(&err, HD_EINVAL, NULL, name, "long");
    assert_int_equal(strlen(err.field), HD_MAX_FIELD - 1);
    assert_int_equal(HD_REFUSE(NULL, HD_ENOMEM, "x", "y", "nobody listens"), HD_ENOMEM);
}

static void sentences_are_utf8(void **state) {
    (void)state;
    const struct {
        const char *text, *shown;
    } cases[] = {
        {"gr\xc3\xbc\xc3\x9f \xe6\xb7\xb1 \xf0\x9f\x90\x8b",
         "gr\xc3\xbc\xc3\x9f \xe6\xb7\xb1 \xf0\x9f\x90\x8b"                             },
        {"caf\xe9",                                          "caf\\xe9"                 },
        {"cut \xe6\xb7",                                     "cut \\xe6\\xb7"           },
        {"\xc2\x9b[2J",                                      "\\xc2\\x9b[2J"            },
        {"\xed\xa0\x80",                                     "\\xed\\xa0\\x80"          },
        {"\xc0\xaf\xe0\x80\xaf",                             "\\xc0\\xaf\\xe0\\x80\\xaf"},
        {"\xf4\x90\x80\x80",                                 "\\xf4\\x90\\x80\\x80"     },
        {"\x7f\xff",                                         "\\x7f\\xff"               },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_err err = {0};
        HD_FAIL(&err, HD_EINVAL, "%s", cases[i].text);
        assert_string_equal(err.msg, cases[i].shown);
    }
}

/* Whatever the middle contains, the beginning and the end are readable, and no character is
 * split. */
static void long_sentences_lose_their_middle(void **state) {
    (void)state;
    static const char *const fillings[] = {"x", "\xf0\x9f\x90\x8b", "\x1b", "\xff"};
    enum { MOST = 200000 };
    char *name = malloc(MOST + 8);
    assert_non_null(name);
    for (size_t f = 0; f < HD_LEN(fillings); f++) {
        const size_t k = strlen(fillings[f]);
        for (size_t n = 100; n < MOST; n = n * 9 / 8 + 1) {
            hd_err err = {0}, again = {0};
            for (size_t at = 0; at + k <= n; at += k) memcpy(name + at, fillings[f], k + 1);
            HD_FAIL(&err, HD_EINVAL, "whale %s: too deep", name);
            const size_t length = strlen(err.msg);
            assert_true(length < sizeof err.msg);
            assert_memory_equal(err.msg, "whale ", 6);
            assert_string_equal(err.msg + length - 10, ": too deep");
            HD_FAIL(&again, HD_EINVAL, "%s", err.msg);
            assert_string_equal(again.msg, err.msg); /* it is UTF-8: nothing to escape */
        }
    }
    free(name);
}

static void sizes_do_not_wrap(void **state) {
    (void)state;
    size_t out = 5;
    assert_false(hd_mul_size(SIZE_MAX / 2, 3, &out));
    assert_false(hd_add_size(SIZE_MAX, 1, &out));
    assert_false(hd_align_size(SIZE_MAX - 3, 64, &out));
    assert_int_equal(out, 5);
    assert_true(hd_align_size(65, 64, &out));
    assert_int_equal(out, 128);
}

static size_t arrange(hd_arena *a) {
    hd_arena_take(a, 10, 64);
    size_t mark = a->used;
    hd_arena_take(a, 1000, 64);
    hd_arena_rewind(a, mark);
    hd_arena_take(a, 100, 64);
    return a->peak;
}

static void arena_measures_what_it_places(void **state) {
    (void)state;
    hd_arena a = hd_arena_measure();
    size_t peak = arrange(&a);
    assert_int_equal(peak, 64 + 1000);
    hd_block block;
    assert_int_equal(hd_block_init(&block, peak, "test", NULL), HD_OK);
    a = hd_arena_over(block.data, block.bytes);
    assert_int_equal(arrange(&a), peak);
    assert_false(a.full);
    assert_null(hd_arena_take(&a, 10000, 1));
    assert_true(a.full);
    hd_block_deinit(&block);
}

/* Known answers of the reference implementation (Random123, kat_vectors). */
static void philox_knows_its_answers(void **state) {
    (void)state;
    hd_philox a = hd_philox_at(0, 0, 0);
    assert_int_equal(a.v[0], 0x6627e8d5u);
    assert_int_equal(a.v[1], 0xe169c58du);
    assert_int_equal(a.v[2], 0xbc57ac4cu);
    assert_int_equal(a.v[3], 0x9b00dbd8u);
    hd_philox b = hd_philox_at(0x299f31d0a4093822u, 0x0370734413198a2eu, 0x85a308d3243f6a88u);
    assert_int_equal(b.v[0], 0xd16cfe09u);
    assert_int_equal(b.v[1], 0x94fdccebu);
    assert_int_equal(b.v[2], 0x5001e420u);
    assert_int_equal(b.v[3], 0x24126ea1u);
}

typedef struct tally {
    _Atomic int32_t *seen;
    int32_t n_workers;
} tally;

static void mark_task(const void *arg, int32_t task, int32_t worker) {
    const tally *t = arg;
    assert_true(worker >= 0 && worker < t->n_workers);
    atomic_fetch_add(&t->seen[task], 1);
}

/* siphash's own table: the key 00 01 .. 0f, the text 00 01 .. of as many bytes as the row says. */
static void siphash_knows_its_answers(void **state) {
    (void)state;
    static const uint64_t key[2] = {0x0706050403020100, 0x0f0e0d0c0b0a0908};
    static const uint64_t want[] = {
        0x726fdb47dd0e0e31, 0x74f839c593dc67fd, 0x0d6c8009d9a94f5a, 0x85676696d7fb7e2d,
        0xcf2794e0277187b7, 0x18765564cd99a68d, 0xcbc9466e58fee3ce, 0xab0200f58b01d137,
        0x93f5f5799a932462, 0x9e0082df0ba9e4b0, 0x7a5dbbc594ddb9f3, 0xf4b32f46226bada7,
        0x751e8fbc860ee5fb, 0x14ea5627c0843d90, 0xf723ca908e7af2ee, 0xa129ca6149be45e5,
        0x3f2acc7f57c29bdb, 0x699ae9f52cbe4794, 0x4bc1b3f0968dd39c, 0xbb6dc91da77961bd,
        0xbed65cf21aa2ee98, 0xd0f2cbb02e3b67c7, 0x93536795e3a33e88, 0xa80c038ccd5ccec8,
        0xb8ad50c6f649af94, 0xbce192de8a85b8ea, 0x17d835b85bbb15f3, 0x2f2e6163076bcfad,
        0xde4daaaca71dc9a5, 0xa6a2506687956571, 0xad87a3535c49ef28, 0x32d892fad841c342,
        0x7127512f72f27cce, 0xa7f32346f95978e3, 0x12e0b01abb051238, 0x15e034d40fa197ae,
        0x314dffbe0815a3b4, 0x027990f029623981, 0xcadcd4e59ef40c4d, 0x9abfd8766a33735c,
        0x0e3ea96b5304a7d0, 0xad0c42d6fc585992, 0x187306c89bc215a9, 0xd4a60abcf3792b95,
        0xf935451de4f21df2, 0xa9538f0419755787, 0xdb9acddff56ca510, 0xd06c98cd5c0975eb,
        0xe612a3cb9ecba951, 0xc766e62cfcadaf96, 0xee64435a9752fe72, 0xa192d576b245165a,
        0x0a8787bf8ecb74b2, 0x81b3e73d20b49b6f, 0x7fa8220ba3b2ecea, 0x245731c13ca42499,
        0xb78dbfaf3a8d83bd, 0xea1ad565322a1a0b, 0x60e61c23a3795013, 0x6606d7e446282b93,
        0x6ca4ecb15c5f91e1, 0x9f626da15c9625f3, 0xe51b38608ef25f57, 0x958a324ceb064572,
    };
    uint8_t text[HD_LEN(want)];
    for (size_t n = 0; n < HD_LEN(want); n++) {
        text[n] = (uint8_t)n;
        for (size_t cut = 0; cut <= n; cut++) { /* in one piece, and in any two */
            hd_siphash s;
            hd_siphash_init(&s, key);
            hd_siphash_add(&s, text, cut);
            hd_siphash_value(&s);
            hd_siphash_add(&s, text + cut, n - cut);
            assert_true(hd_siphash_value(&s) == want[n]);
        }
    }
}

static uint64_t short_form(const hd_nh *h, const void *text, size_t n) {
    hd_siphash s;
    hd_siphash_init(&s, (uint64_t[2]){1, 2});
    hd_nh_add(h, &s, text, n);
    return hd_siphash_value(&s);
}

/* Adds a * b to sum, by halves of words. */
static void add_product(uint64_t sum[2], uint64_t a, uint64_t b) {
    const uint64_t low = 0xffffffff, a0 = a & low, a1 = a >> 32, b0 = b & low, b1 = b >> 32;
    const uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + (middle & low);
    const uint64_t product[2] = {a * b, a1 * b1 + (middle >> 32) + (other >> 32)};
    sum[0] += product[0];
    sum[1] += product[1] + (sum[0] < product[0]);
}

static void nh_is_the_sum_of_its_products(void **state) {
    (void)state;
    static const size_t sizes[] = {0, 1, 8, 15, 16, 17, 31, 1008, 1023, 1024, 1025, 2048, 5000};
    enum { MOST = 5120, WORDS = HD_NH_BLOCK / 8 };
    static uint64_t words[MOST / 8];
    uint8_t *text = (uint8_t *)words;
    hd_nh h;
    hd_nh_init(&h, (uint64_t[2]){3, 4});
    for (size_t k = 0; k < HD_LEN(sizes); k++) {
        const size_t n = sizes[k];
        hd_siphash s;
        memset(words, 0, sizeof words);
        for (size_t i = 0; i < n; i++) text[i] = (uint8_t)(i * 197 + 255);
        hd_siphash_init(&s, (uint64_t[2]){1, 2});
        for (size_t at = 0; at < n; at += HD_NH_BLOCK) {
            uint64_t sum[2] = {0, 0};
            for (size_t i = 0; i < WORDS && at + 8 * i < n; i += 2) {
                const uint64_t *word = words + at / 8 + i;
                add_product(sum, word[0] + h.key[i], word[1] + h.key[i + 1]);
            }
            hd_siphash_add(&s, sum, sizeof sum);
        }
        assert_true(short_form(&h, text, n) == hd_siphash_value(&s));
    }
}

static void nh_sees_every_bit(void **state) {
    (void)state;
    uint8_t text[2 * HD_NH_BLOCK + 5] = {0};
    hd_nh h, other;
    hd_nh_init(&h, (uint64_t[2]){3, 4});
    hd_nh_init(&other, (uint64_t[2]){3, 5});
    const uint64_t plain = short_form(&h, text, sizeof text);
    assert_true(short_form(&other, text, sizeof text) != plain);
    for (size_t bit = 0; bit < 8 * sizeof text; bit++) {
        text[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_true(short_form(&h, text, sizeof text) != plain);
        text[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

static uint64_t of_parts(const char *a, const char *b) {
    hd_siphash s;
    hd_siphash_init_secret(&s);
    hd_siphash_add_part(&s, a);
    hd_siphash_add_part(&s, b);
    return hd_siphash_value(&s);
}

static void parts_are_not_taken_for_others(void **state) {
    (void)state;
    static const char *const parts[][2] = {
        {"ab",  "c"  },
        {"a",   "bc" },
        {"",    "abc"},
        {"abc", ""   },
        {NULL,  "abc"},
        {"abc", NULL },
        {"",    NULL },
        {NULL,  ""   },
        {NULL,  NULL },
        {"",    ""   },
    };
    for (size_t i = 0; i < HD_LEN(parts); i++) {
        for (size_t k = 0; k < HD_LEN(parts); k++) {
            const bool same =
                of_parts(parts[i][0], parts[i][1]) == of_parts(parts[k][0], parts[k][1]);
            assert_true(same == (i == k));
        }
    }
    hd_siphash secret, zero;
    hd_siphash_init_secret(&secret);
    hd_siphash_init(&zero, (uint64_t[2]){0, 0});
    assert_memory_not_equal(&secret, &zero, sizeof zero);
}

static void every_task_runs_once(void **state) {
    (void)state;
    enum { TASKS = 1000 };
    for (int32_t threads = 1; threads <= 5; threads++) {
        hd_thread_pool *pool;
        assert_int_equal(hd_thread_pool_open(&pool, threads, threads == 3, NULL), HD_OK);
        for (int32_t n = 0; n < TASKS; n += 37) {
            _Atomic int32_t seen[TASKS] = {0};
            tally t = {seen, threads};
            hd_thread_pool_run(pool, n, mark_task, &t);
            for (int32_t i = 0; i < TASKS; i++) assert_int_equal(atomic_load(&seen[i]), i < n);
        }
        hd_thread_pool_close(pool);
    }
    hd_thread_pool *pool;
    hd_err err = {0};
    assert_int_equal(hd_thread_pool_open(&pool, -1, false, &err), HD_EINVAL);
    assert_null(pool);
}

typedef struct failing_job {
    _Atomic int32_t *seen;
    int32_t fails[2]; /* these tasks do */
} failing_job;

static hd_status fail_some(const void *arg, int32_t task, hd_err *err) {
    const failing_job *job = arg;
    atomic_fetch_add(&job->seen[task], 1);
    if (task != job->fails[0] && task != job->fails[1]) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "task %d", task);
}

/* However many threads run them, the first task that fails is named, and all before it have run. */
static void the_first_failure_counts(void **state) {
    (void)state;
    enum { TASKS = 50 };
    for (int32_t threads = 1; threads <= 5; threads++) {
        for (int32_t first = 0; first <= TASKS; first++) {
            _Atomic int32_t seen[TASKS] = {0};
            const failing_job job = {
                seen, {first, first + 9}
            };
            hd_err err = {0};
            char name[32];
            snprintf(name, sizeof name, "task %d", first);
            const hd_status st = hd_tasks_run(threads, TASKS, fail_some, &job, &err);
            assert_int_equal(st, first < TASKS ? HD_EFORMAT : HD_OK);
            assert_string_equal(err.msg, first < TASKS ? name : "");
            for (int32_t i = 0; i < TASKS; i++) {
                assert_true(atomic_load(&seen[i]) == 1 ||
                            (i > first && atomic_load(&seen[i]) == 0));
            }
        }
    }
    _Atomic int32_t seen[1] = {0};
    const failing_job job = {
        seen, {1, 1}
    };
    assert_int_equal(hd_tasks_run(-1, 1, fail_some, &job, NULL), HD_OK); /* by the caller */
    assert_int_equal(atomic_load(&seen[0]), 1);
    assert_int_equal(hd_tasks_run(2, 0, fail_some, &job, NULL), HD_OK);
}

typedef struct short_job {
    int32_t *out;
    int32_t number;
} short_job;

static void write_number(const void *arg, int32_t task, int32_t worker) {
    const short_job *job = arg;
    (void)worker;
    job->out[task] = job->number;
}

/* More threads than processors, and jobs that end before most threads wake, which then find
 * a later job. */
static void late_workers_disturb_no_job(void **state) {
    (void)state;
    enum { JOBS = 20000, TASKS = 7, THREADS = 6 };
    hd_thread_pool *pool;
    assert_int_equal(hd_thread_pool_open(&pool, THREADS, false, NULL), HD_OK);
    for (int32_t i = 1; i <= JOBS; i++) {
        int32_t out[TASKS] = {0};
        const int32_t n = 2 + i % (TASKS - 1);
        hd_thread_pool_run(pool, n, write_number, &(short_job){out, i});
        for (int32_t j = 0; j < TASKS; j++) assert_int_equal(out[j], j < n ? i : 0);
    }
    hd_thread_pool_close(pool);
}

static void base64_is_decoded_strictly(void **state) {
    (void)state;
    static const struct {
        const char *text, *bytes;
    } good[] = {
        {"",         ""            },
        {"Zg==",     "f"           },
        {"Zm8=",     "fo"          },
        {"Zm9v",     "foo"         },
        {"Zm9vYmE=", "fooba"       },
        {"+/+/",     "\xfb\xff\xbf"}
    };
    static const char *const bad[] = {"Z",    "Zg",   "Zg=",    "Zh==", "Zm9=", "Zg==Zg==",
                                      "Z=g=", "====", "Zm9v\n", "Zm-v", "Zm9v="};
    uint8_t out[16];
    size_t n;
    for (size_t i = 0; i < HD_LEN(good); i++) {
        assert_true(hd_base64_decode(out, &n, good[i].text, strlen(good[i].text)));
        assert_int_equal(n, strlen(good[i].bytes));
        assert_memory_equal(out, good[i].bytes, n);
    }
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        assert_false(hd_base64_decode(out, &n, bad[i], strlen(bad[i])));
    }
}

/* One changed bit, a moved byte or another length is seen, at every place. */
static void checksums_see_every_byte(void **state) {
    (void)state;
    uint8_t bytes[100] = {0};
    for (size_t n = 0; n < sizeof bytes; n++) {
        const uint64_t zeros = hd_checksum(0, bytes, n);
        assert_true(zeros != hd_checksum(0, bytes, n + 1));
        assert_true(zeros != hd_checksum(1, bytes, n));
        for (size_t i = 0; i < n; i++) {
            bytes[i] = 128;
            assert_true(zeros != hd_checksum(0, bytes, n));
            bytes[i] = 0;
        }
    }
}

int test_base(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_error_wins),
        cmocka_unit_test(refusals_have_code_and_field),
        cmocka_unit_test(sentences_are_utf8),
        cmocka_unit_test(long_sentences_lose_their_middle),
        cmocka_unit_test(sizes_do_not_wrap),
        cmocka_unit_test(arena_measures_what_it_places),
        cmocka_unit_test(philox_knows_its_answers),
        cmocka_unit_test(siphash_knows_its_answers),
        cmocka_unit_test(nh_is_the_sum_of_its_products),
        cmocka_unit_test(nh_sees_every_bit),
        cmocka_unit_test(parts_are_not_taken_for_others),
        cmocka_unit_test(every_task_runs_once),
        cmocka_unit_test(the_first_failure_counts),
        cmocka_unit_test(late_workers_disturb_no_job),
        cmocka_unit_test(base64_is_decoded_strictly),
        cmocka_unit_test(checksums_see_every_byte),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
