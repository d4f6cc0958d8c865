/* test_rebuild.c - V4's windows before a page border are rebuilt from the entries that are kept: the
 * window has the bytes of the whole pass, the entries stay as they are, and texts, log-probabilities
 * and drafts are the same. */
#include "fakes/crowd.h"

#include <string.h>

#include "base/checked.h"
#include "fakes/gpus.h"

enum { PROMPT = 420, SAMPLED = 10, DRAFTS = 3, FIRST = 0, OTHER = 3 };

static machine m;
static hd_kv_shape shape;
static request whole[SLOTS], some[SLOTS];

static void open_one(const char *backend, const char *name) {
    if (strcmp(name, "v4_wide_index") == 0) {
        open_machine_all_ids(&m, name); /* a vocabulary too small for the crowd's text */
    } else {
        open_machine_on(&m, backend, name, 0.0f, false);
    }
    shape = hd_kv_shape_of(m.spec);
    assert_true(hd_kv_rebuild_length(&shape) > shape.lookback);
}

static void init_one(request *r, int32_t slot, int32_t chunk) {
    init_request(r, &m, slot, PROMPT, 5);
    r->sampling.params.temperature = 1.0f;
    r->sampling.params.n_top = 2;
    r->most = PROMPT + SAMPLED;
    r->n_drafts = hd_weights_n_mtp(m.weights) ? DRAFTS : 0;
    r->chunk = chunk;
}

/* ---- bytes of pages ---- */

typedef struct content {
    uint8_t *at;
    size_t n;
} content;

/* Adds what a page has of a pool, or with out NULL sets its bytes. */
static void visit(content *out, int byte, hd_rows rows, int64_t width, int32_t page) {
    const size_t bytes = rows.data ? hd_dtype_bytes(rows.type, width) : 0;
    if (!bytes) return;
    uint8_t *at = (uint8_t *)rows.data + (size_t)page * bytes;
    uint8_t *host = malloc(bytes);
    assert_non_null(host);
    if (out) {
        out->at = realloc(out->at, out->n + bytes);
        assert_non_null(out->at);
        hd_stream_download(m.stream, out->at + out->n, at, bytes);
        out->n += bytes;
    } else {
        memset(host, byte, bytes);
        hd_stream_upload(m.stream, at, host, bytes);
    }
    assert_int_equal(hd_stream_sync(m.stream, NULL), HD_OK);
    free(host);
}

static void visit_page(content *out, int byte, hd_kv_group group, int32_t page) {
    static const hd_pool_kind kinds[HD_N_KV_GROUPS][2] = {
        {HD_POOL_COMPRESSED, HD_POOL_INDEX  },
        {HD_POOL_SLIDING,    HD_POOL_SLIDING}
    };
    const int32_t *const tables[HD_N_KV_GROUPS] = {0};
    const hd_kv *kv = hd_model_runner_kv(m.model_runner);
    const int32_t n_layers = m.spec->n_layers + hd_weights_n_mtp(m.weights);
    for (int32_t l = 0; l < n_layers; l++) {
        for (int k = 0; k < 2; k++) {
            const hd_paged p = hd_kv_pool(kv, l, kinds[group][k], tables, 1);
            visit(out, byte, p.rows, (int64_t)p.page_entries * p.width, page);
            if (group != HD_KV_WINDOW) continue;
            const hd_ring r = hd_kv_state(kv, l, k != 0, tables, 1);
            visit(out, byte, r.rows, (int64_t)r.ring * r.width, page);
        }
    }
}

/* A slot's pages from, ..., end - 1. */
static content read_pages(hd_kv_group group, int32_t slot, int32_t from, int32_t end) {
    content c = {0};
    for (int32_t i = hd_max_i32(from, 0); i < end; i++) {
        visit_page(&c, 0, group, m.pages[group][slot][i]);
    }
    return c;
}

static bool same(content a, content b) {
    const bool equal = a.n == b.n && a.n > 0 && memcmp(a.at, b.at, a.n) == 0;
    free(a.at);
    free(b.at);
    return equal;
}

/* The pages that a sequence reads behind a border. */
static content read_window(int32_t slot, int32_t border) {
    const int32_t end = border / shape.page_tokens;
    const int32_t n = (int32_t)hd_ceil_div(shape.lookback, shape.page_tokens);
    return read_pages(HD_KV_WINDOW, slot, end - n, end);
}

/* ---- continuing ---- */

enum { ZERO = 0, NAN_BITS = 0xff };

/* A slot has the entries before a border of the first one, and any bytes in its windows. It begins
 * `length` positions before the border. */
static void rebuild_at(request *r, int32_t border, int32_t length, int byte) {
    enter(&m, r);
    for (int32_t i = 0; i < m.seq_pages; i++) {
        visit_page(NULL, byte, HD_KV_WINDOW, m.pages[HD_KV_WINDOW][r->slot][i]);
    }
    for (int32_t p = 0; p < border / shape.page_tokens; p++) {
        m.pages[HD_KV_FULL][r->slot][p] = m.pages[HD_KV_FULL][FIRST][p];
    }
    r->done = hd_max_i32(border - length, 0);
    r->ends.rebuilt = border;
}

static void check_same(const request *a, const request *b) {
    const size_t n = (size_t)(a->n - PROMPT);
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->text, b->text, (size_t)a->n * sizeof a->text[0]);
    assert_memory_equal(a->logprob + PROMPT, b->logprob + PROMPT, n * sizeof a->logprob[0]);
    assert_memory_equal(a->top + PROMPT, b->top + PROMPT, n * sizeof a->top[0]);
    assert_true(a->drafted == b->drafted && a->accepted == b->accepted);
}

/* Rebuilds in one slot, while another one answers, and compares with the first. */
static void check_border(int32_t border, int32_t chunk) {
    const int32_t pages = border / shape.page_tokens;
    const content before = read_pages(HD_KV_FULL, FIRST, 0, pages);
    init_one(&some[0], 1, chunk);
    rebuild_at(&some[0], border, hd_kv_rebuild_length(&shape), NAN_BITS);
    some[1] = whole[OTHER];
    while (!some[0].ended) step(&m, some, 2);
    run_all(&m, some, 2);
    check_same(&whole[FIRST], &some[0]);
    assert_true(same(before, read_pages(HD_KV_FULL, 1, 0, pages)));
    assert_true(same(read_window(FIRST, border), read_window(1, border)));
    for (int32_t p = 0; p < pages; p++) {
        m.pages[HD_KV_FULL][1][p] = m.seq_pages + p; /* its own again */
    }
}

/* The first slot answers to the end; the other one has begun to. */
static void answer(void) {
    for (int32_t s = FIRST; s <= OTHER; s += OTHER - FIRST) {
        init_one(&whole[s], s, 100);
        if (s == OTHER) whole[s].n = whole[s].n_prompt = 30;
        enter(&m, &whole[s]);
    }
    run_all(&m, &whole[FIRST], 1);
    step(&m, &whole[OTHER], 1);
}

static const char *const models[] = {"v4_small_mtp", "v4_odd", "v4_wide_index", "v4_dspark"};

/* At every border, in chunks that end anywhere. */
static void check_model(const char *backend, const char *name) {
    static const int32_t chunks[] = {150, 128, 40, 17, 7};
    open_one(backend, name);
    answer();
    const int32_t size = shape.page_tokens;
    for (int32_t border = size, i = 0; border < PROMPT; border += size, i++) {
        if (border > 6 * size && border < PROMPT - 2 * size) continue;
        check_border(border, chunks[i % (int32_t)HD_LEN(chunks)]);
    }
    const int32_t last = (PROMPT - 1) / size * size;
    for (size_t c = 0; c < HD_LEN(chunks); c++) check_border(last, chunks[c]);
    close_machine(&m);
}

static void rebuilt_windows_have_the_same_bytes(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(models); i++) check_model("cpu", models[i]);
}

static void rebuilt_windows_have_the_same_bytes_on_a_gpu(void **state) {
    (void)state;
    if (!gpus_are_wanted()) skip();
    check_model("cuda", "v4_small_mtp");
    check_model("cuda", "v4_odd");
    check_model("cuda", "v4_dspark");
}

/* Fewer positions do not rebuild a window: not its own length alone, and not one position less than
 * the layers need. */
static void shorter_replays_are_not_exact(void **state) {
    (void)state;
    open_one("cpu", "v4_small_mtp");
    answer();
    const int32_t border = (PROMPT - 1) / shape.page_tokens * shape.page_tokens;
    const int32_t length = hd_kv_rebuild_length(&shape);
    const int32_t lengths[] = {shape.page_tokens, length - shape.tail.step, length - 1, length};
    for (size_t i = 0; i < HD_LEN(lengths); i++) {
        init_one(&some[0], 1, 150);
        rebuild_at(&some[0], border, lengths[i], ZERO);
        run_all(&m, some, 1);
        const bool exact = same(read_window(FIRST, border), read_window(1, border));
        assert_int_equal(exact, lengths[i] == length);
    }
    close_machine(&m);
}

/* A layer computes the rows that the next one needs. */
static void rebuilds_take_the_rows_of_their_tails(void **state) {
    static int64_t load[HD_N_ROW_PHASES * 64];
    (void)state;
    open_one("cpu", "v4_small_mtp");
    const int32_t border = (PROMPT - 1) / shape.page_tokens * shape.page_tokens;
    const int32_t experts = m.spec->route.n_experts, n = m.spec->n_layers;
    assert_true(hd_model_n_expert_rows(m.spec) <= (int64_t)HD_LEN(load));
    init_one(&some[0], 1, 50);
    some[0].n_drafts = 0;
    rebuild_at(&some[0], border, hd_kv_rebuild_length(&shape), NAN_BITS);
    while (some[0].n == PROMPT) step(&m, some, 1);
    assert_int_equal(hd_model_runner_read_experts(m.model_runner, load, NULL), HD_OK);
    for (int32_t l = 0; l < n; l++) {
        int64_t rows = 0;
        for (int32_t phase = 0; phase < HD_N_ROW_PHASES; phase++) {
            for (int32_t e = 0; e < experts; e++) rows += load[(phase * n + l) * experts + e];
        }
        assert_int_equal(rows / m.spec->route.top_k,
                         PROMPT - border + hd_kv_tail_length(&shape, l + 1));
    }
    close_machine(&m);
}

int test_rebuild(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rebuilt_windows_have_the_same_bytes),
        cmocka_unit_test(rebuilt_windows_have_the_same_bytes_on_a_gpu),
        cmocka_unit_test(shorter_replays_are_not_exact),
        cmocka_unit_test(rebuilds_take_the_rows_of_their_tails),
    };
    return cmocka_run_group_tests_name("rebuild", tests, NULL, NULL);
}
