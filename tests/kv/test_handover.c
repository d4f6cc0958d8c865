/* test_handover.c - pages of a prompt as messages between two caches: each arrives as it left,
 * in memory that is large or small, and wrong messages change nothing. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kv/handover.h"

enum { N_PAGES = 6, PROMPT_PAGES = 4, SEQ = 0, SALT = 7 };

typedef struct side {
    hd_device *device;
    hd_handover h;
} side;

static hd_model_spec *spec;
static int32_t *prompt;

static void open_side(side *s, int32_t n_host) {
    const hd_kv_shape shape = hd_kv_shape_of(spec);
    assert_int_equal(hd_device_open_cpu(&s->device, &(hd_cpu_options){.n_threads = 1}, NULL),
                     HD_OK);
    s->h = (hd_handover){.page_tokens = shape.page_tokens,
                         .salt = SALT,
                         .tokens = prompt,
                         .n_tokens = PROMPT_PAGES * shape.page_tokens + 1};
    assert_int_equal(hd_stream_open(&s->h.stream, s->device, NULL), HD_OK);
    const hd_kv_options kv = {
        .n_pages = {N_PAGES,                   N_PAGES             },
        .n_host = {n_host,                    n_host              },
        .replay = {spec->route.n_experts > 0, spec->index_topk > 0}
    };
    assert_int_equal(
        hd_kv_open(&s->h.kv, spec, spec->n_layers + spec->n_mtp, s->device, &kv, NULL), HD_OK);
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        hd_kv_host_page(s->h.kv, (hd_kv_group)g, (hd_host_page){0}, &s->h.page_bytes[g]);
    }
    const hd_cache_options cache = {
        .page_tokens = shape.page_tokens,
        .lookback = shape.lookback,
        .n_pages = {N_PAGES, N_PAGES},
        .n_host = {n_host,  n_host },
        .max_seqs = 1,
        .seq_pages = N_PAGES
    };
    assert_int_equal(hd_cache_open(&s->h.cache, &cache, NULL), HD_OK);
}

static void close_side(side *s) {
    assert_int_equal(hd_cache_check(s->h.cache, true, NULL), HD_OK);
    hd_cache_close(s->h.cache);
    hd_kv_close(s->h.kv);
    hd_stream_close(s->h.stream);
    hd_device_close(s->device);
}

/* Lets a sequence compute the prompt: random entries, and its pages in the cache. */
static void compute(side *s) {
    int32_t hit;
    const int32_t n = s->h.n_tokens;
    assert_int_equal(hd_cache_acquire(s->h.cache, SEQ, SALT, prompt, n, &hit), HD_OK);
    assert_int_equal(hit, 0);
    assert_int_equal(hd_cache_extend(s->h.cache, SEQ, n), HD_OK);
    hd_kv_random_fill(s->h.kv, s->h.stream);
    hd_cache_commit(s->h.cache, SEQ, prompt, n);
    hd_cache_release(s->h.cache, SEQ, true);
}

static bool has_windows(void) {
    return hd_kv_shape_of(spec).lookback > 0;
}

/* Moves pages in order until one fails. Returns how many were moved. */
static int32_t move(const side *from, const side *to) {
    int32_t n = 0;
    for (int32_t p = 0; p < hd_handover_pages(&from->h); p++) {
        for (int g = 0; g < (has_windows() ? HD_N_KV_GROUPS : 1); g++) {
            const size_t bytes = hd_handover_bytes(&from->h, (hd_kv_group)g);
            uint8_t *message = malloc(bytes);
            const hd_status st = hd_handover_export(&from->h, (hd_kv_group)g, p, message, NULL);
            const hd_status arrived =
                st == HD_OK ? hd_handover_import(&to->h, message, bytes, NULL) : st;
            free(message);
            if (arrived != HD_OK) return n;
            assert_int_equal(hd_cache_check(to->h.cache, false, NULL), HD_OK);
            n++;
        }
    }
    return n;
}

/* Compares the device pages of an open sequence with what the sender's messages say. */
static void compare(const side *from, const side *to, int32_t hit) {
    int32_t n;
    const hd_page_copy *copies = hd_cache_copies(to->h.cache, &n);
    hd_kv_copy(to->h.kv, to->h.stream, copies, n);
    hd_cache_copied(to->h.cache);
    for (int32_t p = 0; p < hit / to->h.page_tokens; p++) {
        for (int g = 0; g < HD_N_KV_GROUPS; g++) {
            const int32_t page = hd_cache_block_table(to->h.cache, SEQ, (hd_kv_group)g)[p];
            if (page < 0 || (g == HD_KV_WINDOW && !has_windows())) continue;
            const size_t size = hd_handover_bytes(&from->h, (hd_kv_group)g);
            uint8_t *message = malloc(size);
            assert_int_equal(hd_handover_export(&from->h, (hd_kv_group)g, p, message, NULL),
                             HD_OK);
            hd_kv_copy(to->h.kv, to->h.stream,
                       &(hd_page_copy){(hd_kv_group)g, true, {page}, {0}}, 1);
            hd_stream_wait(to->h.stream);
            size_t bytes;
            const void *got =
                hd_kv_host_page(to->h.kv, (hd_kv_group)g, (hd_host_page){0}, &bytes);
            assert_memory_equal(got, message + sizeof(hd_page_head), bytes);
            free(message);
        }
    }
}

static void open_model(const char *model) {
    assert_int_equal(hd_model_spec_open(&spec, model, NULL), HD_OK);
    const int32_t n = N_PAGES * hd_kv_shape_of(spec).page_tokens;
    prompt = calloc((size_t)n, sizeof *prompt);
    for (int32_t i = 0; i < n; i++) prompt[i] = i * 31 % 97;
}

static void close_model(void) {
    free(prompt);
    hd_model_spec_close(spec);
}

static const char *const models[] = {"models/tiny-v4", "models/tiny-v3"};

static void pages_arrive_as_they_left(void **state) {
    (void)state;
    for (size_t m = 0; m < HD_LEN(models); m++) {
        for (int32_t host = 1; host <= N_PAGES; host++) {
            side a, b;
            int32_t hit;
            open_model(models[m]);
            open_side(&a, 1); /* each page of the sender leaves through the same memory */
            open_side(&b, host);
            compute(&a);
            const int32_t groups = has_windows() ? HD_N_KV_GROUPS : 1;
            const int32_t moved = move(&a, &b);
            assert_int_equal(moved, groups * hd_min_i32(host, PROMPT_PAGES));
            assert_int_equal(hd_cache_acquire(b.h.cache, SEQ, SALT, prompt, b.h.n_tokens, &hit),
                             HD_OK);
            assert_int_equal(hit, moved / groups * b.h.page_tokens);
            compare(&a, &b, hit);
            hd_cache_release(b.h.cache, SEQ, true);
            assert_true(move(&a, &b) >= moved); /* what is on the device leaves room for more */
            close_side(&a);
            close_side(&b);
            close_model();
        }
    }
}

/* Changes one byte of a message at a time, and its length; a right one arrives after all. */
static void a_wrong_message_changes_nothing(void **state) {
    (void)state;
    side a, b;
    hd_err why = {0};
    open_model(models[0]);
    open_side(&a, 1);
    open_side(&b, N_PAGES);
    compute(&a);
    const size_t n = hd_handover_bytes(&a.h, HD_KV_FULL);
    uint8_t *message = malloc(n);
    assert_int_equal(hd_handover_export(&a.h, HD_KV_FULL, 0, message, NULL), HD_OK);
    for (size_t i = 0; i < n; i += i < sizeof(hd_page_head) ? 1 : 977) {
        message[i] ^= 1;
        assert_int_equal(hd_handover_import(&b.h, message, n, NULL), HD_EFORMAT);
        message[i] ^= 1;
    }
    assert_int_equal(hd_handover_import(&b.h, message, n - 1, &why), HD_EFORMAT);
    assert_non_null(strstr(why.msg, " sent; a page has "));
    for (size_t k = 0; k < sizeof(hd_page_head); k++) {
        assert_int_equal(hd_handover_import(&b.h, message, k, NULL), HD_EFORMAT);
    }
    why = (hd_err){0};
    prompt[1]++; /* of another prompt */
    assert_int_equal(hd_handover_import(&b.h, message, n, &why), HD_EFORMAT);
    assert_string_equal(why.msg, "page message: the digest of page 0 is wrong");
    prompt[1]--;
    assert_int_equal(hd_cache_read_stats(b.h.cache).nodes, 0);
    assert_int_equal(hd_handover_import(&b.h, message, n, NULL), HD_OK);
    assert_int_equal(hd_cache_read_stats(b.h.cache).nodes, 1);
    free(message);
    close_side(&a);
    close_side(&b);
    close_model();
}

/* A page before those above it, or a WINDOW page before its FULL page, has no place. */
static void pages_out_of_order_have_no_place(void **state) {
    (void)state;
    side a, b;
    open_model(models[0]);
    open_side(&a, 1);
    open_side(&b, N_PAGES);
    compute(&a);
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        const size_t n = hd_handover_bytes(&a.h, (hd_kv_group)g);
        uint8_t *message = malloc(n);
        const int32_t page = g == HD_KV_FULL;
        assert_int_equal(hd_handover_export(&a.h, (hd_kv_group)g, page, message, NULL), HD_OK);
        assert_int_equal(hd_handover_import(&b.h, message, n, NULL), HD_EAGAIN);
        free(message);
    }
    assert_int_equal(hd_cache_read_stats(b.h.cache).nodes, 0);
    close_side(&a);
    close_side(&b);
    close_model();
}

int test_handover(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_arrive_as_they_left),
        cmocka_unit_test(a_wrong_message_changes_nothing),
        cmocka_unit_test(pages_out_of_order_have_no_place),
    };
    return cmocka_run_group_tests_name("handover", tests, NULL, NULL);
}
