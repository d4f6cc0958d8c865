/* test_disk_tier.c - the prefix cache with a disk tier, in the world where every page remembers its
 * content (cache_world.h): sequences wait for reads, others run meanwhile, the disk fails, and the
 * process is killed and starts again over what the disk has. Every page that a sequence reads is
 * that of its own prefix. */
#include "check.h"

#include <errno.h>

#include "base/checked.h"
#include "fakes/disk_files.h"
#include "kv/cache_world.h"
#include "kv/disk_tier.h"

enum { CONTENT = sizeof(content), STEP_NS = 1000000 };

typedef struct disk_world {
    world w; /* first, so that its pages stay when it is opened again */
    fake_disk files;
    hd_disk_tier *tier;
    bool waits[N_SEQS]; /* a sequence that waits for its prefix: its request is l + 1 */
    int64_t now_ns;
    bool copied;
    int64_t restarts, rebuilds;
    bool failing[HD_N_DISK_JOBS];
    int64_t told;
    hd_disk_tier_stats before; /* of processes that ended */
    uint64_t quota;
} disk_world;

static void *host_page(void *ctx, hd_kv_group group, hd_host_page host) {
    disk_world *d = ctx;
    return &d->w.host[group][host.n];
}

/* Is told when something begins or ends, never twice. */
static void tell(void *ctx, hd_disk_job_kind kind, int why) {
    disk_world *d = ctx;
    assert_true(d->failing[kind] != (why != 0));
    d->failing[kind] = why != 0;
    d->told++;
}

static void open_tier(disk_world *d) {
    const hd_cache_options *o = &d->w.o;
    hd_disk *disk;
    hd_err err = {0};
    const size_t window = o->lookback ? CONTENT : 0;
    if (hd_disk_open(&disk,
                     &(hd_disk_options){
                         .files = fake_disk_files(&d->files),
                         .where = "here",
                         .bytes = d->quota,
                         .page_tokens = o->page_tokens,
                         .page_bytes = {CONTENT, window},
                         .identity = "a world"
    },
                     &err) != HD_OK) {
        fail_msg("%s", err.msg);
    }
    assert_int_equal(hd_disk_tier_open(&d->tier,
                                       &(hd_disk_tier_options){
                                           .disk = disk,
                                           .page_tokens = o->page_tokens,
                                           .seq_pages = o->seq_pages,
                                           .lookback = o->lookback,
                                           .host_page = host_page,
                                           .page_bytes = {CONTENT, window},
                                           .tell = tell,
                                           .ctx = d
    },
                                       &err),
                     HD_OK);
}

/* A process: the tree and all memory are new, the disk is what it was. */
static void open_process(disk_world *d) {
    hd_cache_options o = d->w.o;
    const uint64_t seed = d->w.seed, draws = d->w.draws;
    const hd_kv_shape shape = d->w.shape;
    open_tier(d);
    o.name_key = hd_disk_tier_key(d->tier);
    cache_world_open(&d->w, &o, seed);
    d->w.draws = draws;
    d->w.shape = shape;
    hd_disk_tier_attach(d->tier, d->w.cache);
    memset(d->waits, 0, sizeof d->waits);
    memset(d->failing, 0, sizeof d->failing);
    d->copied = false;
}

/* shape: its tails; NULL: none */
static void open_disk_world(disk_world *d, const hd_cache_options *o, const hd_kv_shape *shape,
                            uint64_t quota, uint64_t seed) {
    memset(d, 0, sizeof *d);
    fake_disk_init(&d->files, seed);
    d->w.o = *o;
    if (shape) d->w.shape = *shape;
    d->w.seed = seed;
    d->quota = quota;
    open_process(d);
}

static void add_figures(disk_world *d) {
    const hd_disk_tier_stats s = hd_disk_tier_read_stats(d->tier);
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        d->before.written[g] += s.written[g];
        d->before.read[g] += s.read[g];
    }
    d->before.write_failed += s.write_failed;
    d->before.read_failed += s.read_failed;
    d->before.late += s.late;
    d->before.declined += s.declined;
    d->rebuilds += d->w.rebuilds;
}

static void end_process(disk_world *d) {
    add_figures(d);
    hd_disk_tier_stop(d->tier);
    cache_world_close(&d->w);
    hd_disk_tier_close(d->tier);
}

static void close_disk_world(disk_world *d) {
    end_process(d);
    fake_disk_deinit(&d->files);
}

static void run_copies(disk_world *d) {
    int32_t n;
    hd_cache_copies(d->w.cache, &n);
    d->copied = d->copied || n;
    cache_world_run_copies(&d->w);
}

/* Killed, or without power. */
static void kill_process(disk_world *d, bool power_cut) {
    run_copies(d);
    d->files.dies_at = d->files.n_calls + cache_world_draw(&d->w, 6);
    for (int i = 0; i < 3; i++) {
        d->now_ns += STEP_NS;
        hd_disk_tier_step(d->tier, d->now_ns, false);
    }
    end_process(d);
    fake_disk_restart(&d->files, power_cut);
    d->restarts++;
    open_process(d);
}

static void admit(disk_world *d, int32_t l) {
    world *w = &d->w;
    int32_t hit;
    if (hd_cache_acquire(w->cache, l, w->salt[l], w->tokens[l], w->n_tokens[l], &hit) ==
        HD_OK) {
        cache_world_begin(w, l, hit);
    }
}

/* As a scheduler does between two steps. */
static void step_tier(disk_world *d) {
    uint64_t id;
    d->now_ns += STEP_NS;
    run_copies(d);
    hd_disk_tier_step(d->tier, d->now_ns, d->copied);
    d->copied = false;
    while ((id = hd_disk_tier_ended(d->tier)) != 0) {
        assert_true(d->waits[id - 1]);
        d->waits[id - 1] = false;
        admit(d, (int32_t)id - 1);
    }
    if (d->w.o.write_through) {
        for (int g = 0; g < HD_N_KV_GROUPS; g++) {
            hd_cache_save_unwritten(d->w.cache, (hd_kv_group)g, 2);
        }
    }
    if (cache_world_draw(&d->w, 3) == 0) hd_disk_tier_save(d->tier);
    run_copies(d);
}

static void start(disk_world *d, int32_t l) {
    world *w = &d->w;
    cache_world_choose_text(w, l);
    d->waits[l] = hd_disk_tier_ask(d->tier, (uint64_t)l + 1, w->salt[l], w->tokens[l],
                                   w->n_tokens[l], cache_world_draw(w, 2) ? 0 : 1e5, d->now_ns);
    if (!d->waits[l]) admit(d, l);
}

static void run_sequence(disk_world *d, int32_t l) {
    world *w = &d->w;
    if (d->waits[l]) {
        if (cache_world_draw(w, 20)) return;
        hd_disk_tier_cancel(d->tier, (uint64_t)l + 1);
        d->waits[l] = false;
    } else if (!w->open[l]) {
        start(d, l);
    } else if (w->done[l] < w->n_tokens[l]) {
        const int32_t end =
            hd_min_i32(w->done[l] + 1 + (int32_t)cache_world_draw(w, 30), w->n_tokens[l]);
        if (hd_cache_extend(w->cache, l, end) == HD_OK) {
            run_copies(d);
            cache_world_compute(w, l, end);
        } else if (cache_world_draw(w, 3) == 0) {
            hd_cache_release(w->cache, l, false);
            w->open[l] = false;
        }
    } else {
        hd_cache_release(w->cache, l, cache_world_draw(w, 2));
        w->open[l] = false;
    }
}

/* New weights: everything that ran is computed anew. */
static void renew(disk_world *d) {
    world *w = &d->w;
    for (int32_t l = 0; l < N_SEQS; l++) {
        if (w->open[l]) hd_cache_release(w->cache, l, false);
        w->open[l] = false;
    }
    run_copies(d);
    hd_disk_tier_stop(d->tier);
    hd_cache_renew(w->cache);
    w->weights = ++w->draws;
    hd_disk_tier_renew(d->tier, w->weights);
}

static void disturb(disk_world *d) {
    world *w = &d->w;
    fake_disk *f = &d->files;
    static const int whys[] = {EIO, ENOSPC, EROFS, ENODEV};
    switch (cache_world_draw(w, 400)) {
    case 0:
        kill_process(d, false);
        break;
    case 1:
        kill_process(d, true);
        break;
    case 2:
        run_copies(d);
        hd_disk_tier_stop(d->tier);
        hd_cache_flush(w->cache);
        break;
    case 3:
        run_copies(d);
        hd_disk_tier_stop(d->tier);
        hd_disk_tier_clear(d->tier);
        break;
    case 4:
        renew(d);
        break;
    case 5:
        f->why = whys[cache_world_draw(w, 4)];
        f->fails_at = f->n_calls;
        f->fails_to = f->n_calls + cache_world_draw(w, 12);
        break;
    case 6:
        f->reads_fail = true;
        break;
    case 7:
    case 8:
    case 9:
        f->reads_fail = false;
        break;
    case 10:
        if (f->files[HD_DISK_PAGES].n) {
            f->files[HD_DISK_PAGES]
                .now[cache_world_draw(w, (uint32_t)f->files[HD_DISK_PAGES].n)] ^= 4;
        }
        break;
    case 11:
        hd_cache_set_costs(w->cache,
                           &(hd_cache_costs){
                               .token = 1,
                               .page = {cache_world_draw(w, 3),     cache_world_draw(w, 9) },
                               .disk = {cache_world_draw(w, 3) * 5, cache_world_draw(w, 60)}
        });
        break;
    default:
        break;
    }
}

static void every_page_is_of_its_own_prefix(void **state) {
    (void)state;
    disk_world *d = malloc(sizeof *d);
    hd_disk_tier_stats all = {0};
    int64_t restarts = 0, rebuilds = 0;
    for (uint64_t seed = 0; seed < 240; seed++) {
        const int32_t reaches[] = {0, 1, 7, 8, 9, 20};
        const int32_t host[] = {1, 2, 10, 40, 100};
        const int32_t extents[] = {1, 5, 50, 400};
        const hd_kv_shape shape = {
            .page_tokens = PAGE,
            .lookback = reaches[seed % 6],
            .tail = {.n = seed % 6 ? (int32_t)(seed / 6 % 5) : 0,
                     .step = reaches[seed % 6],
                     .rebuilds = seed / 30 % 2}
        };
        const hd_cache_options o = {
            .page_tokens = PAGE,
            .lookback = shape.lookback,
            .tail = hd_kv_longest_tail(&shape),
            .rebuild = hd_kv_rebuild_length(&shape),
            .n_pages = {40 + (int32_t)(seed % 60) * 4, seed % 6 ? 20 + (int32_t)seed * 2 : 0},
            .n_host = {host[seed % 5],                seed % 6 ? host[seed / 5 % 5] : 0    },
            .max_seqs = N_SEQS,
            .seq_pages = LONG / PAGE,
            .write_through = seed / 3 % 3 == 0
        };
        const uint64_t each = hd_disk_stride(CONTENT) + sizeof(hd_disk_head);
        open_disk_world(d, &o, &shape,
                        sizeof(hd_disk_header) + 2 * each * (uint64_t)extents[seed % 4], seed);
        for (int i = 0; i < 4000; i++) {
            step_tier(d);
            run_sequence(d, (int32_t)cache_world_draw(&d->w, N_SEQS));
            disturb(d);
            assert_true(fake_disk_bytes(&d->files) <= d->quota);
            hd_err err = {0};
            if (i % 16 == 0 && hd_cache_check(d->w.cache, false, &err) != HD_OK) {
                fail_msg("seed %d, step %d: %s", (int)seed, i, err.msg);
            }
        }
        add_figures(d);
        all.written[0] += d->before.written[0];
        all.read[0] += d->before.read[0];
        all.read[1] += d->before.read[1];
        all.write_failed += d->before.write_failed;
        all.read_failed += d->before.read_failed;
        all.declined += d->before.declined;
        restarts += d->restarts;
        rebuilds += d->rebuilds;
        close_disk_world(d);
    }
    /* everything that the world can do was done */
    assert_true(all.written[0] > 1000 && all.read[0] > 1000 && all.read[1] > 100);
    assert_true(all.write_failed > 10 && all.read_failed > 10 && all.declined > 10);
    assert_true(restarts > 100 && rebuilds > 100);
    free(d);
}

/* ---- one prompt, step by step ---- */

enum { N = 12 * PAGE + 1, PAGES = 12 };

static const hd_cache_options roomy = {
    .page_tokens = PAGE,
    .lookback = PAGE,
    .n_pages = {40, 40},
    .n_host = {40, 40},
    .max_seqs = N_SEQS,
    .seq_pages = LONG / PAGE
};

static void run_prompt(disk_world *d, const int32_t *tokens) {
    world *w = &d->w;
    int32_t hit;
    memcpy(w->tokens[0], tokens, N * sizeof *tokens);
    w->n_tokens[0] = N;
    w->salt[0] = 7;
    assert_int_equal(hd_cache_acquire(w->cache, 0, 7, tokens, N, &hit), HD_OK);
    cache_world_begin(w, 0, hit);
    assert_int_equal(hd_cache_extend(w->cache, 0, N), HD_OK);
    run_copies(d);
    cache_world_compute(w, 0, N);
    hd_cache_release(w->cache, 0, true);
    w->open[0] = false;
}

static void write_all(disk_world *d) {
    for (int i = 0; i < 100; i++) {
        d->now_ns += STEP_NS;
        hd_disk_tier_step(d->tier, d->now_ns, true);
        hd_disk_tier_save(d->tier);
        run_copies(d);
    }
}

/* Asks, and returns the hit once the read has ended. */
static int32_t read_back(disk_world *d, const int32_t *tokens, double ns_of_token) {
    uint64_t id = 0;
    if (hd_disk_tier_ask(d->tier, 9, 7, tokens, N, ns_of_token, d->now_ns)) {
        for (int i = 0; i < 4000 && !id; i++) {
            d->now_ns += STEP_NS;
            hd_disk_tier_step(d->tier, d->now_ns, false);
            id = hd_disk_tier_ended(d->tier);
        }
        assert_int_equal(id, 9);
    }
    return hd_cache_match(d->w.cache, 7, tokens, N);
}

/* shape: its tails; NULL: none */
static disk_world *open_with(const hd_kv_shape *shape, int32_t tokens[N], uint64_t quota) {
    disk_world *d = malloc(sizeof *d);
    hd_cache_options o = roomy;
    if (shape) o.rebuild = hd_kv_rebuild_length(shape);
    open_disk_world(d, &o, shape, quota, 1);
    for (int32_t i = 0; i < N; i++) tokens[i] = 100 + i;
    run_prompt(d, tokens);
    write_all(d);
    return d;
}

static disk_world *open_with_prompt(int32_t tokens[N], uint64_t quota) {
    return open_with(NULL, tokens, quota);
}

static void restart(disk_world *d) {
    end_process(d);
    fake_disk_restart(&d->files, true);
    open_process(d);
}

static void a_prompt_comes_back_after_a_power_cut(void **state) {
    (void)state;
    int32_t tokens[N];
    disk_world *d = open_with_prompt(tokens, 1 << 20);
    restart(d);
    assert_int_equal(hd_cache_match(d->w.cache, 7, tokens, N), 0);
    assert_int_equal(read_back(d, tokens, 0), PAGES * PAGE);
    run_prompt(d, tokens); /* asserts that what it reads is right */
    assert_int_equal(hd_cache_read_stats(d->w.cache).disk_tokens, PAGES * PAGE);
    close_disk_world(d);
    free(d);
}

/* The end of the prefix is gone: what is before it is used as far as a window lies there. */
static void a_part_of_a_prefix_is_used(void **state) {
    (void)state;
    int32_t tokens[N];
    disk_world *d = open_with_prompt(tokens, 1 << 20);
    for (int32_t i = 9 * PAGE; i < N; i++) tokens[i]++;
    run_prompt(d, tokens); /* another end: page 8 is a branch point, whose window is written */
    write_all(d);
    restart(d);
    for (int32_t i = 9 * PAGE; i < N; i++) tokens[i]++;
    assert_int_equal(read_back(d, tokens, 0), 9 * PAGE);
    run_prompt(d, tokens);
    close_disk_world(d);
    free(d);
}

/* The disk has entries before the end, and no window there: they are read for a rebuild, if what that
 * saves is more than reading them takes. */
static void entries_are_read_for_a_rebuild(void **state) {
    (void)state;
    const hd_kv_shape shape = {
        .page_tokens = PAGE,
        .lookback = PAGE,
        .tail = {.n = 3, .step = PAGE, .rebuilds = true}
    };
    static const struct {
        hd_cache_costs costs;
        int32_t pages; /* that are read */
    } cases[] = {
        {{0},                                              9},
        {{.token = 1, .disk = {6.0 / 9 * PAGE - 0.01, 0}},
         9                                                  }, /* 9 pages, less 3 for the rebuild */
        {{.token = 1, .disk = {6.0 / 9 * PAGE + 0.01, 0}}, 0},
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        int32_t tokens[N];
        disk_world *d = open_with(&shape, tokens, 1 << 20);
        assert_int_equal(d->w.o.rebuild, 3 * PAGE);
        restart(d);
        hd_cache_set_costs(d->w.cache, &cases[i].costs);
        for (int32_t k = 9 * PAGE; k < N; k++) tokens[k]++;
        assert_int_equal(read_back(d, tokens, 0), cases[i].pages * PAGE);
        assert_int_equal(hd_disk_tier_read_stats(d->tier).read[HD_KV_FULL], cases[i].pages);
        assert_int_equal(hd_disk_tier_read_stats(d->tier).read[HD_KV_WINDOW], 0);
        run_prompt(d, tokens);
        assert_int_equal(hd_cache_read_stats(d->w.cache).rebuilt, cases[i].pages > 0);
        close_disk_world(d);
        free(d);
    }
}

/* What the disk has, and reads sooner than it is computed, leaves host memory before what it lacks. */
static void host_memory_keeps_what_the_disk_lacks(void **state) {
    (void)state;
    static const double reads[] = {0.1 * PAGE, 3 * PAGE};
    for (size_t i = 0; i < HD_LEN(reads); i++) {
        int32_t tokens[N], other[N];
        disk_world *d = open_with_prompt(tokens, 1 << 20);
        world *w = &d->w;
        bool left[2] = {false, false};
        hd_cache_set_costs(w->cache, &(hd_cache_costs){
                                         .token = 1, .disk = {reads[i], reads[i]}
        });
        for (int32_t k = 0; k < N; k++) other[k] = 5000 + k;
        run_prompt(d, other); /* no step of the tier, so that it is not written */
        run_prompt(d, tokens);
        for (int32_t text = 2; !left[0] && !left[1]; text++) {
            int32_t more[N];
            assert_true(text < 20);
            for (int32_t k = 0; k < N; k++) more[k] = 9000 * text + k;
            run_prompt(d, more);
            left[0] = hd_cache_match(w->cache, 7, tokens, N) < PAGES * PAGE;
            left[1] = hd_cache_match(w->cache, 7, other, N) < PAGES * PAGE;
        }
        assert_true(left[i] && !left[1 - i]);
        close_disk_world(d);
        free(d);
    }
}

/* A process that is killed while a request runs: what it computed is on the disk, if that is written through. */
static void a_running_request_survives_a_kill(void **state) {
    (void)state;
    for (int through = 0; through < 2; through++) {
        disk_world *d = malloc(sizeof *d);
        hd_cache_options o = roomy;
        int32_t tokens[N], hit;
        o.write_through = through;
        for (int32_t i = 0; i < N; i++) tokens[i] = 100 + i;
        open_disk_world(d, &o, NULL, 1 << 20, 1);
        world *w = &d->w;
        memcpy(w->tokens[0], tokens, sizeof tokens);
        w->n_tokens[0] = N;
        w->salt[0] = 7;
        assert_int_equal(hd_cache_acquire(w->cache, 0, 7, tokens, N, &hit), HD_OK);
        cache_world_begin(w, 0, hit);
        assert_int_equal(hd_cache_extend(w->cache, 0, N), HD_OK);
        cache_world_compute(w, 0, N);
        for (int i = 0; i < 10; i++) step_tier(d);
        restart(d);
        assert_int_equal(read_back(d, tokens, 0), through ? PAGES * PAGE : 0);
        close_disk_world(d);
        free(d);
    }
}

static void reading_is_predicted_and_given_up(void **state) {
    (void)state;
    int32_t tokens[N];
    disk_world *d = open_with_prompt(tokens, 1 << 20);
    restart(d);
    hd_cache_costs slow = {
        .token = 1, .disk = {2 * PAGE, 0}
    };
    hd_cache_set_costs(d->w.cache, &slow);
    assert_int_equal(read_back(d, tokens, 0), 0);
    assert_int_equal(hd_disk_tier_read_stats(d->tier).declined, 1);
    assert_int_equal(hd_disk_tier_read_stats(d->tier).read[HD_KV_FULL], 0);
    hd_cache_costs fast = {
        .token = 1, .disk = {0.5 * PAGE, PAGE}
    };
    hd_cache_set_costs(d->w.cache, &fast);
    d->now_ns += STEP_NS;
    assert_true(hd_disk_tier_ask(d->tier, 9, 7, tokens, N, 1, d->now_ns));
    hd_disk_tier_step(d->tier, d->now_ns + (int64_t)1e9, false); /* much later than computing */
    assert_int_equal(hd_disk_tier_ended(d->tier), 9);
    assert_int_equal(hd_disk_tier_read_stats(d->tier).late, 1);
    assert_true(hd_cache_match(d->w.cache, 7, tokens, N) < PAGES * PAGE);
    close_disk_world(d);
    free(d);
}

/* Without a disk that works the cache does what it does without one; when it works again, pages
 * are written. */
static void a_disk_that_fails_costs_nothing_else(void **state) {
    (void)state;
    int32_t tokens[N];
    disk_world *d = malloc(sizeof *d);
    open_disk_world(d, &roomy, NULL, 1 << 20, 1);
    d->files.fails_at = d->files.n_calls;
    d->files.fails_to = 1 << 30;
    d->files.why = ENOSPC;
    for (int32_t i = 0; i < N; i++) tokens[i] = 100 + i;
    run_prompt(d, tokens);
    write_all(d);
    assert_int_equal(d->told, 1);
    assert_int_equal(hd_disk_tier_read_stats(d->tier).written[HD_KV_FULL], 0);
    assert_true(hd_disk_tier_look_ns(d->tier) > d->now_ns); /* tried again later, not at once */
    d->files.fails_at = -1;
    d->now_ns += (int64_t)120e9;
    write_all(d);
    assert_int_equal(hd_disk_tier_read_stats(d->tier).written[HD_KV_FULL], PAGES);
    assert_int_equal(d->told, 2);
    d->files.why = EIO;
    restart(d);
    d->files.reads_fail = true;
    assert_int_equal(read_back(d, tokens, 0), 0);
    assert_int_equal(d->told, 3);
    close_disk_world(d);
    free(d);
}

int test_disk_tier(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prompt_comes_back_after_a_power_cut),
        cmocka_unit_test(a_part_of_a_prefix_is_used),
        cmocka_unit_test(entries_are_read_for_a_rebuild),
        cmocka_unit_test(host_memory_keeps_what_the_disk_lacks),
        cmocka_unit_test(a_running_request_survives_a_kill),
        cmocka_unit_test(reading_is_predicted_and_given_up),
        cmocka_unit_test(a_disk_that_fails_costs_nothing_else),
        cmocka_unit_test(every_page_is_of_its_own_prefix),
    };
    return cmocka_run_group_tests_name("disk_tier", tests, NULL, NULL);
}
