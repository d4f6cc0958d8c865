/* test_tiers.c - KV pages in host memory change no text: conversations that come back when the
 * device has dropped their pages, with host memory for none, few and all of them. */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fakes/engine_rig.h"
#include "engine/sizes.h"
#include "kv/hisparse_choice.h"
#include "kv/disk_files.h"
#include "kv/kv.h"

enum { N_TEXTS = 3, ROUNDS = 2, CHOICES = 2, CONTEXT = 768, FULL_HOST = 100 };

/* Bytes of a page that is in host memory. */
static double page_bytes(const char *model, hd_kv_group group) {
    hd_model_spec *spec;
    assert_int_equal(hd_model_spec_open(&spec, model, NULL), HD_OK);
    const size_t bytes =
        hd_kv_page_bytes(spec, spec->n_layers + spec->n_mtp, group, HD_F32, HD_MAX_DRAFTS);
    hd_model_spec_close(spec);
    return (double)bytes;
}

/* Two KV pools of one context, and n_host pages for entries in host memory; 0: none. hisparse: where
 * their entries lie before. */
static hd_engine *open_tight(const char *model, int32_t n_host, const char *hisparse) {
    enum { WINDOWS = 64, PAGE = 128 };
    const double windows = WINDOWS * page_bytes(model, HD_KV_WINDOW);
    const double entries = (n_host + 0.5) * page_bytes(model, HD_KV_FULL);
    return rig_open("cpu",
                    &(hd_engine_options){.model_dir = model,
                                         .max_running = 3,
                                         .max_context = CONTEXT,
                                         .kv_tokens = CONTEXT,
                                         .chunk_tokens = 48,
                                         .snapshot_tokens = WINDOWS * PAGE,
                                         .hisparse = hisparse,
                                         .kv_host_gb = n_host ? (windows + entries) / 1e9 : 0});
}

static hd_engine *open_roomy(const char *model) {
    return rig_open("cpu", &(hd_engine_options){.model_dir = model,
                                                .max_running = 3,
                                                .max_context = CONTEXT,
                                                .kv_tokens = 8 * N_TEXTS * CONTEXT});
}

/* A text of its own that grows in every round. */
static void write_messages(char *out, size_t size, int text, int round) {
    int n = snprintf(out, size, "[{\"role\": \"user\", \"content\": \"");
    for (int i = 0; i < 40 * (round + 4); i++) {
        n += snprintf(out + n, size - (size_t)n, "%d ", (text + 3) * (i + 7) % 97);
    }
    snprintf(out + n, size - (size_t)n, "and a story.\"}]");
}

/* Asks text after text, so that each comes back when all others came between. */
static void ask(hd_engine *e, rig_answer *out, int32_t drafts) {
    static char messages[4096];
    for (int r = 0; r < ROUNDS; r++) {
        for (int t = 0; t < N_TEXTS; t++) {
            write_messages(messages, sizeof messages, t, r);
            rig_run(e,
                    &(hd_request){.size = sizeof(hd_request),
                                  .messages = messages,
                                  .thinking = -1,
                                  .max_tokens = 24,
                                  .temperature = 1,
                                  .seed = (uint64_t)t,
                                  .draft_tokens = drafts,
                                  .response_format = t ? HD_FORMAT_FREE : HD_FORMAT_REGEX,
                                  .format_text = t ? NULL : "[0-9 ]{20,90}",
                                  .n = CHOICES},
                    out + (r * N_TEXTS + t) * CHOICES);
        }
    }
}

/* By round, text and choice. */
enum { N_ANSWERS = ROUNDS * N_TEXTS * CHOICES };
static rig_answer roomy[N_ANSWERS], tight[N_ANSWERS];

static void drop(rig_answer *answers) {
    for (int i = 0; i < N_ANSWERS; i++) rig_deinit(&answers[i]);
}

/* Compares with `roomy`, in which so many tokens were cached. */
static void compare(const char *model, int32_t n_host, int32_t drafts, const char *hisparse,
                    int64_t cached) {
    hd_engine *e = open_tight(model, n_host, hisparse);
    hd_engine_stats s;
    ask(e, tight, drafts);
    hd_engine_read_stats(e, &s);
    hd_engine_close(e);
    for (int i = 0; i < N_ANSWERS; i++) rig_same(&roomy[i], &tight[i]);
    drop(tight);
    assert_int_equal(s.host_pages[HD_KV_FULL], n_host);
    assert_true((s.host_saved[HD_KV_FULL] > 0) == (n_host > 0));
    assert_true((s.hisparse.fetched > 0) == (hisparse != NULL));
    if (n_host < FULL_HOST) return;
    assert_true(s.host_loaded[HD_KV_FULL] > 0);
    assert_true(s.cached_tokens >= cached); /* as if the device had room for all */
}

static void tiers_change_no_text(void **state) {
    (void)state;
    static const char *const models[] = {"models/tiny-v4", "models/tiny-v3"};
    static const int32_t host[] = {0, 1, 7, FULL_HOST};
    static const char *const rows[] = {"2000", NULL, "256", "700"}; /* a row chooses 256 */
    for (size_t m = 0; m < (is_brief() ? 1 : HD_LEN(models)); m++) {
        hd_engine_stats s;
        hd_engine *e = open_roomy(models[m]);
        ask(e, roomy, 0);
        hd_engine_read_stats(e, &s);
        hd_engine_close(e);
        for (size_t h = 0; h < HD_LEN(host); h++) {
            if (is_brief() && host[h] != 7) continue;
            if (m > 0 && h % 2 == 0 && !is_long()) continue; /* this model has fewer groups */
            compare(models[m], host[h], h % 2 ? 3 : 0, m == 0 ? rows[h] : NULL,
                    s.cached_tokens);
        }
        drop(roomy);
    }
}

/* ---- entries in host memory ---- */

/* Buffers take what other pools leave of 7/8 of the memory, if the pools do not fit into that. */
static void buffers_take_what_is_left(void **state) {
    (void)state;
    static const hd_engine_options o = {.max_context = 8000, .kv_tokens = 100000};
    hd_model_spec *spec;
    assert_int_equal(hd_model_spec_open(&spec, TINY, NULL), HD_OK);
    const int32_t n_layers = spec->n_layers + spec->n_mtp;
    hd_engine_sizes z = hd_engine_sizes_of(spec, true, &o);
    const double all = (double)hd_engine_kv_bytes(&z, spec, n_layers, HD_F32);
    double least = 0;
    int32_t before = 1 << 20;
    for (double part = 1.01; part > 0.1; part -= 0.05) {
        const size_t room = (size_t)(all * part), free = (size_t)((double)room / 0.875);
        z = hd_engine_sizes_of(spec, true, &o);
        hd_engine_sizes_fit(&z, spec, n_layers, HD_F32, free);
        assert_true((z.resident > 0) == (part < 1));
        if (!z.resident) continue;
        assert_true(z.resident <= before && z.resident >= spec->index_topk);
        before = z.resident;
        const size_t bytes = hd_engine_kv_bytes(&z, spec, n_layers, HD_F32);
        if (z.resident == spec->index_topk) {
            least = (double)bytes;
        } else {
            assert_true(bytes < room + 4096);
        }
        z.resident = 0;
        assert_true(bytes < hd_engine_kv_bytes(&z, spec, n_layers, HD_F32));
    }
    assert_true(least > 0);
    hd_model_spec_close(spec);
}

/* Pools that do not fit become smaller, down to one sequence. */
static void pools_shrink_to_what_fits(void **state) {
    (void)state;
    static const hd_engine_options o = {
        .max_context = 8000, .kv_tokens = 100000, .max_running = 8};
    hd_model_spec *spec;
    assert_int_equal(hd_model_spec_open(&spec, TINY, NULL), HD_OK);
    const int32_t n_layers = spec->n_layers + spec->n_mtp;
    const hd_engine_sizes all = hd_engine_sizes_of(spec, true, &o);
    const double bytes = (double)hd_engine_kv_bytes(&all, spec, n_layers, HD_F32);
    assert_true(hd_engine_sizes_requests(&all) == 8); /* not 12: no more run */
    for (double part = 1.05; part > 0.05; part -= 0.05) {
        const double room = bytes * part;
        hd_engine_sizes z = all;
        const bool any =
            hd_engine_sizes_shrink(&z, spec, n_layers, HD_F32, (size_t)(room / HD_POOLS_PART));
        assert_int_equal(any, z.n_pages[HD_KV_FULL] >= z.seq_pages);
        if (!any) continue;
        assert_true((double)hd_engine_kv_bytes(&z, spec, n_layers, HD_F32) <= room + 1);
        z.n_pages[HD_KV_FULL]++;
        const double more = (double)hd_engine_kv_bytes(&z, spec, n_layers, HD_F32);
        assert_true(part > 1 || more > room - 1);
    }
    hd_model_spec_close(spec);
}

/* On where the tokens of a step would take longer in smaller batches than what it fetches. */
static void hisparse_is_on_where_it_pays(void **state) {
    (void)state;
    static const struct {
        double requests, fitting, step_s, fitting_s, miss_s;
        bool on;
    } cases[] = {
        {60, 20, 0.030, 0.020, 0.010, true },
        {60, 20, 0.030, 0.020, 0.031, false}, /* 3 steps of 20 take 30 ms longer */
        {20, 20, 0.020, 0.020, 0.001, false}, /* no request waits for memory */
        {60, 20, 0.060, 0.020, 0.001, false}, /* a larger batch is as slow */
        {60, 0,  0.030, 0,     9.000, true }, /* nothing would run */
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_hisparse_choice c = {.requests = cases[i].requests, .fitting = cases[i].fitting};
        hd_hisparse_decide(&c, cases[i].step_s, cases[i].fitting_s, cases[i].miss_s);
        assert_int_equal(c.on, cases[i].on);
        assert_true(c.miss_s == cases[i].miss_s);
    }
}

/* As tiny-v4 chose: entries of stories of 6,800 and 3,000 tokens, of which a row selects 256. */
static void misses_are_those_of_real_choices(void **state) {
    (void)state;
    static const struct {
        double rows, entries, measured;
    } cases[] = {
        {256,  1700, 0.507 },
        {384,  1700, 0.372 },
        {512,  1700, 0.272 },
        {768,  1700, 0.150 },
        {1024, 1700, 0.078 },
        {1280, 1700, 0.036 },
        {256,  750,  0.371 },
        {384,  750,  0.211 },
        {512,  750,  0.103 },
        {768,  750,  0.0035},
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        const double share = hd_hisparse_miss_share(cases[i].rows, cases[i].entries, 256);
        assert_true(fabs(share - cases[i].measured) < 0.04);
    }
    assert_true(hd_hisparse_miss_share(16, 1e6, 256) <= 1);
    hd_model_spec *spec;
    assert_int_equal(hd_model_spec_open(&spec, TINY, NULL), HD_OK);
    const double one = hd_hisparse_miss_bytes(spec, spec->n_layers, HD_BF16, 2560, 8000, 10);
    const double want = hd_hisparse_miss_share(256, 2000, 256) * 10 * 256 * 2 * 1024;
    assert_true(fabs(one - want) < 1); /* two layers select entries of 1024 bytes */
    hd_model_spec_close(spec);
}

/* A CPU's memory is the host's. */
static void auto_is_off_on_a_cpu(void **state) {
    (void)state;
    hd_engine_stats s;
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.hisparse = "auto"});
    hd_engine_read_stats(e, &s);
    assert_true(s.hisparse.rows == 0 && s.hisparse.host_bytes == 0);
    hd_engine_close(e);
    char why[600];
    const hd_engine_options v3 = {.size = sizeof v3,
                                  .model_dir = "models/tiny-v3",
                                  .backend = "cpu",
                                  .threads = 1,
                                  .hisparse = "512"};
    assert_int_equal(hd_engine_open(&e, &v3, why, sizeof why), HD_EUNSUPPORTED);
    assert_non_null(strstr(why, "attention reads all entries, and selects none"));
}

/* ---- a disk ---- */

/* As open_tight(), with a folder for pages; few pages fit host memory. */
static hd_engine *open_with_disk(const char *model, const char *disk, int32_t ranks) {
    return rig_open("cpu", &(hd_engine_options){.model_dir = model,
                                                .cp = ranks,
                                                .max_running = 3,
                                                .max_context = CONTEXT,
                                                .kv_tokens = CONTEXT,
                                                .chunk_tokens = 48,
                                                .kv_host_gb = 0.04,
                                                .kv_disk = disk});
}

static hd_engine_stats stats_of(hd_engine *e) {
    hd_engine_stats s;
    hd_engine_read_stats(e, &s);
    return s;
}

/* A disk that others use may be silent for a while. */
static void await_written(hd_engine *e) {
    enum { QUIET = 10 };
    hd_kv_disk_figures before, now = stats_of(e).kv_disk;
    for (int quiet = 0; quiet < QUIET; quiet++) {
        before = now;
        usleep(20000);
        now = stats_of(e).kv_disk;
        if (now.pages[HD_KV_FULL] == 0 ||
            memcmp(now.written, before.written, sizeof now.written) != 0) {
            quiet = 0;
        }
    }
}

/* Texts do not change, whether pages are written, read back by the same process or by the next, which
 * has other ranks. */
static void a_disk_changes_no_text(void **state) {
    (void)state;
    static const char *const models[] = {"models/tiny-v3", "models/tiny-v4"};
    for (size_t m = 0; m < (is_brief() ? 1 : HD_LEN(models)); m++) {
        char dir[] = "/tmp/hadal_tier_XXXXXX", disk[64];
        int n;
        assert_non_null(mkdtemp(dir));
        snprintf(disk, sizeof disk, "%s:0.5", dir);
        hd_engine *e = open_roomy(models[m]);
        ask(e, roomy, 0);
        hd_engine_close(e);
        for (int process = 0; process < 2; process++) {
            e = open_with_disk(models[m], disk, (process + (int)m) % 2 + 1);
            ask(e, tight, process ? 3 : 0);
            await_written(e);
            const hd_engine_stats s = stats_of(e);
            assert_true(s.kv_disk.pages[HD_KV_FULL] > 0);
            assert_true(process == 0 || s.kv_disk.tokens > 0);
            assert_true(s.kv_disk.read_failed == 0 && s.kv_disk.write_failed == 0);
            hd_engine_close(e);
            for (int i = 0; i < N_ANSWERS; i++) rig_same(&roomy[i], &tight[i]);
            drop(tight);
        }
        drop(roomy);
        assert_int_equal(hd_disk_files_delete(dir, 0, &n, NULL), HD_OK);
        assert_int_equal(rmdir(dir), 0);
    }
}

static void refuse(hd_engine_options *o, const char *disk, const char *text) {
    char why[600];
    hd_engine *e;
    o->kv_disk = disk;
    assert_true(hd_engine_open(&e, o, why, sizeof why) != 0);
    if (!strstr(why, text)) fail_msg("%s instead of %s", why, text);
}

static void a_disk_that_cannot_be_is_refused(void **state) {
    (void)state;
    hd_engine_options o = {
        .size = sizeof o, .model_dir = TINY, .backend = "cpu", .threads = 1, .kv_host_gb = 0.1};
    static const char *const wrong[] = {"",       ":1",    "dir",     "dir:",     "dir:x",
                                        "dir:-1", "dir:0", "dir:1GB", "dir:1e99", "dir:nan"};
    for (size_t i = 0; i < HD_LEN(wrong); i++) refuse(&o, wrong[i], "must be DIR:GB");
    refuse(&o, "/nowhere/at/all:1", "/nowhere/at/all: No such file or directory");
    refuse(&o, "/dev/null:1", "/dev/null: Not a directory");
    o.kv_host_gb = 0;
    refuse(&o, "/tmp:1", "kv_disk without kv_host");
    o.kv_host_gb = 0.1;
    o.backend = "null";
    refuse(&o, "/tmp:1", "the null backend");
}

/* A budget without room for a page is refused, with what a page takes. */
static void a_budget_below_a_page_is_refused(void **state) {
    (void)state;
    char why[600];
    hd_engine *e;
    hd_engine_options o = {.size = sizeof o, .model_dir = TINY, .backend = "cpu", .threads = 1};
    o.kv_host_gb = 1e-6;
    assert_int_equal(hd_engine_open(&e, &o, why, sizeof why), HD_EINVAL);
    assert_non_null(strstr(why, "kv_host_gb 1e-06 holds no page: one of entries has "));
    o.kv_host_gb = -1;
    assert_int_equal(hd_engine_open(&e, &o, why, sizeof why), HD_EINVAL);
    assert_non_null(strstr(why, "kv_host_gb is -1; must be 0 to "));
}

int test_tiers(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers_change_no_text),
        cmocka_unit_test(buffers_take_what_is_left),
        cmocka_unit_test(pools_shrink_to_what_fits),
        cmocka_unit_test(hisparse_is_on_where_it_pays),
        cmocka_unit_test(misses_are_those_of_real_choices),
        cmocka_unit_test(auto_is_off_on_a_cpu),
        cmocka_unit_test(a_disk_changes_no_text),
        cmocka_unit_test(a_disk_that_cannot_be_is_refused),
        cmocka_unit_test(a_budget_below_a_page_is_refused),
    };
    return cmocka_run_group_tests_name("tiers", tests, NULL, NULL);
}
