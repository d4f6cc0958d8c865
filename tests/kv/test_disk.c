/* test_disk.c - the store of the disk tier: what it says it has is exactly that, or is missed,
 * after a kill or a power cut at any call, and with any byte changed. */
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fakes/disk_files.h"
#include "kv/disk_io.h"

enum { FULL_BYTES = 700, WINDOW_BYTES = 4000, EXTENTS = 5, N_NAMES = 16 };

static const size_t page_bytes[HD_N_KV_GROUPS] = {FULL_BYTES, WINDOW_BYTES};

static uint64_t bytes_for(int32_t extents) {
    uint64_t most = 0;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        const uint64_t n = hd_disk_stride(page_bytes[g]) + sizeof(hd_disk_head);
        if (n > most) most = n;
    }
    return sizeof(hd_disk_header) + HD_N_KV_GROUPS * (uint64_t)extents * most;
}

static hd_status open_with(hd_disk **out, fake_disk *f, const char *identity, uint64_t bytes,
                           hd_err *err) {
    return hd_disk_open(out,
                        &(hd_disk_options){
                            .files = fake_disk_files(f),
                            .where = "here",
                            .bytes = bytes,
                            .page_tokens = 8,
                            .page_bytes = {FULL_BYTES, WINDOW_BYTES},
                            .identity = identity
    },
                        err);
}

static hd_disk *open_store(fake_disk *f) {
    hd_disk *d;
    hd_err err = {0};
    if (open_with(&d, f, "one model", bytes_for(EXTENTS), &err) != HD_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(hd_disk_check(d, NULL), HD_OK);
    return d;
}

static hd_page_name name_of(int i) {
    return (hd_page_name){(uint64_t)i * 0x9E3779B97F4A7C15u + 1, (uint64_t)i};
}

static void fill_page(uint8_t *page, hd_kv_group group, int i) {
    for (size_t k = 0; k < page_bytes[group]; k++) {
        page[k] = (uint8_t)(k * 7 + (size_t)i * 31 + (size_t)group * 101 + k / 256);
    }
}

/* Returns 0 or an errno. */
static int put(hd_disk *d, hd_kv_group group, int i) {
    uint8_t page[WINDOW_BYTES];
    const int32_t extent = hd_disk_begin_write(d, group, name_of(i), i);
    assert_true(extent >= 0);
    fill_page(page, group, i);
    const int why = hd_disk_write(d, group, extent, page);
    hd_disk_end_write(d, group, extent, why == 0);
    return why;
}

/* Returns whether the store has the page; what it reads is right. */
static bool get(hd_disk *d, hd_kv_group group, int i) {
    uint8_t page[WINDOW_BYTES], want[WINDOW_BYTES];
    const int32_t extent = hd_disk_begin_read(d, group, name_of(i));
    if (extent < 0) return false;
    const int why = hd_disk_read(d, group, extent, page);
    hd_disk_end_read(d, group, extent, why == 0);
    assert_int_equal(hd_disk_has(d, group, name_of(i)), why == 0);
    if (why) return false;
    fill_page(want, group, i);
    assert_memory_equal(page, want, page_bytes[group]);
    return true;
}

static void pages_survive_a_restart(void **state) {
    (void)state;
    fake_disk f;
    fake_disk_init(&f, 1);
    hd_disk *d = open_store(&f);
    uint64_t key[2];
    memcpy(key, hd_disk_key(d), sizeof key);
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        for (int i = 0; i < EXTENTS; i++) assert_int_equal(put(d, (hd_kv_group)g, i), 0);
    }
    for (int turn = 0; turn < 2; turn++) {
        for (int g = 0; g < HD_N_KV_GROUPS; g++) {
            for (int i = 0; i < EXTENTS; i++) assert_true(get(d, (hd_kv_group)g, i));
            assert_int_equal(hd_disk_read_stats(d).used[g], EXTENTS);
            assert_false(get(d, (hd_kv_group)g, EXTENTS));
        }
        hd_disk_close(d);
        d = open_store(&f);
        assert_memory_equal(hd_disk_key(d), key, sizeof key);
    }
    assert_int_equal(hd_disk_clear(d), 0);
    assert_false(get(d, HD_KV_FULL, 0));
    hd_disk_close(d);
    d = open_store(&f);
    assert_false(get(d, HD_KV_FULL, 0));
    hd_disk_close(d);
    fake_disk_deinit(&f);
}

/* The least recently used prefix makes room, its end first; what is read stays. */
static void the_least_recently_used_makes_room(void **state) {
    (void)state;
    fake_disk f;
    fake_disk_init(&f, 1);
    hd_disk *d = open_store(&f);
    for (int i = 0; i < EXTENTS; i++) {
        if (i == 3) (void)hd_disk_begin_use(d); /* 0, 1, 2 of one prefix; 3, 4 of another */
        put(d, HD_KV_FULL, i);
    }
    put(d, HD_KV_FULL, 10);
    assert_false(hd_disk_has(d, HD_KV_FULL, name_of(2)));
    const uint64_t time = hd_disk_begin_use(d);
    assert_true(hd_disk_use(d, HD_KV_FULL, name_of(0), time));
    (void)hd_disk_begin_use(d); /* of another cache, meanwhile */
    assert_true(hd_disk_use(d, HD_KV_FULL, name_of(1), time));
    const int32_t reading = hd_disk_begin_read(d, HD_KV_FULL, name_of(4));
    put(d, HD_KV_FULL, 11);
    assert_false(hd_disk_has(d, HD_KV_FULL, name_of(10)));
    put(d, HD_KV_FULL, 12);
    assert_false(hd_disk_has(d, HD_KV_FULL, name_of(3)));
    assert_true(hd_disk_has(d, HD_KV_FULL, name_of(4)));
    hd_disk_end_read(d, HD_KV_FULL, reading, true);
    assert_int_equal(hd_disk_read_stats(d).replaced[HD_KV_FULL], 3);
    assert_int_equal(hd_disk_check(d, NULL), HD_OK);
    hd_disk_close(d);
    fake_disk_deinit(&f);
}

/* What is in the store for sure: written, and not replaced since. */
typedef struct sure {
    bool written[HD_N_KV_GROUPS][N_NAMES], synced[HD_N_KV_GROUPS][N_NAMES];
} sure;

static void drop_replaced(hd_disk *d, sure *s) {
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        for (int i = 0; i < N_NAMES; i++) {
            const bool has = hd_disk_has(d, (hd_kv_group)g, name_of(i));
            s->written[g][i] = s->written[g][i] && has;
            s->synced[g][i] = s->synced[g][i] && has;
        }
    }
}

/* Twice as many pages as there is room for, a sync after every third. */
static void write_many(hd_disk *d, sure *s) {
    for (int i = 0; i < 2 * EXTENTS; i++) {
        const hd_kv_group group = i % 4 == 3 ? HD_KV_WINDOW : HD_KV_FULL;
        (void)hd_disk_begin_use(d);
        const bool good = put(d, group, i) == 0;
        drop_replaced(d, s);
        s->written[group][i] = good;
        if (i % 3 == 2 && hd_disk_sync(d) == 0) memcpy(s->synced, s->written, sizeof s->synced);
    }
}

/* An extent whose page was to be replaced may be half overwritten: only pages that still were in the
 * index, or came to be, are sure. */
static void check_after(fake_disk *f, const sure *s, bool power_cut) {
    fake_disk_restart(f, power_cut);
    hd_disk *d = open_store(f);
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        for (int i = 0; i < N_NAMES; i++) {
            const bool must = power_cut ? s->synced[g][i] : s->written[g][i];
            const bool has = get(d, (hd_kv_group)g, i);
            if (must && !has) fail_msg("page %d of group %d is gone", i, g);
        }
    }
    assert_int_equal(put(d, HD_KV_FULL, 15), 0); /* and it goes on */
    assert_true(get(d, HD_KV_FULL, 15));
    assert_true(fake_disk_bytes(f) <= bytes_for(EXTENTS));
    hd_disk_close(d);
}

static int64_t calls_of_all(void) {
    fake_disk f;
    sure s = {0};
    fake_disk_init(&f, 1);
    hd_disk *d = open_store(&f);
    write_many(d, &s);
    hd_disk_clear(d);
    hd_disk_close(d);
    const int64_t n = f.n_calls;
    fake_disk_deinit(&f);
    return n;
}

/* Killed, or without power, at each write, sync and cut in turn. */
static void an_end_at_any_call_leaves_hits_or_misses(void **state) {
    (void)state;
    const int64_t n = calls_of_all();
    assert_true(n > 30);
    for (int64_t at = 0; at <= n; at++) {
        for (uint64_t seed = 0; seed < 12; seed++) {
            const bool power_cut = seed > 1;
            fake_disk f;
            sure s = {0};
            hd_disk *d;
            fake_disk_init(&f, seed);
            f.dies_at = at;
            if (open_with(&d, &f, "one model", bytes_for(EXTENTS), NULL) == HD_OK) {
                write_many(d, &s);
                if (hd_disk_clear(d) == 0 || at >= n - 6) s = (sure){0};
                hd_disk_close(d);
            }
            check_after(&f, &s, power_cut);
            fake_disk_deinit(&f);
        }
    }
}

/* A call fails, or a few do: what was to be written is missing, all else is there. */
static void a_failed_call_costs_one_page(void **state) {
    (void)state;
    static const int whys[] = {EIO, ENOSPC, EROFS};
    for (int64_t at = 0; at < 40; at++) {
        fake_disk f;
        sure s = {0};
        fake_disk_init(&f, (uint64_t)at);
        hd_disk *d = open_store(&f);
        f.why = whys[at % 3];
        f.fails_at = f.n_calls + at;
        f.fails_to = f.fails_at + at % 4;
        write_many(d, &s);
        for (int g = 0; g < HD_N_KV_GROUPS; g++) {
            for (int i = 0; i < N_NAMES; i++) {
                assert_int_equal(get(d, (hd_kv_group)g, i), s.written[g][i]);
            }
        }
        hd_disk_close(d);
        check_after(&f, &s, false);
        fake_disk_deinit(&f);
    }
}

static void a_page_that_cannot_be_read_is_forgotten(void **state) {
    (void)state;
    fake_disk f;
    fake_disk_init(&f, 1);
    hd_disk *d = open_store(&f);
    put(d, HD_KV_FULL, 0);
    f.reads_fail = true;
    f.why = EIO;
    assert_false(get(d, HD_KV_FULL, 0));
    f.reads_fail = false;
    assert_false(get(d, HD_KV_FULL, 0));
    put(d, HD_KV_FULL, 0);
    assert_true(get(d, HD_KV_FULL, 0));
    hd_disk_close(d);
    fake_disk_deinit(&f);
}

/* Every byte of every file, in turn: a page is exact or missed, and nothing else can be wrong. */
static void any_changed_byte_is_found(void **state) {
    (void)state;
    fake_disk f;
    fake_disk_init(&f, 1);
    hd_disk *d = open_store(&f);
    for (int i = 0; i < 2; i++) put(d, HD_KV_FULL, i);
    put(d, HD_KV_WINDOW, 2);
    hd_disk_close(d);
    for (int file = 0; file < HD_N_DISK_FILES; file++) {
        for (uint64_t at = 0; at < f.files[file].n; at++) {
            uint8_t *byte = &f.files[file].now[at], before = *byte;
            uint8_t header[sizeof(hd_disk_header)];
            memcpy(header, f.files[HD_DISK_STORE].now, sizeof header);
            *byte ^= (uint8_t)(1 << at % 8);
            if (open_with(&d, &f, "one model", bytes_for(EXTENTS), NULL) == HD_OK) {
                int n = 0;
                for (int i = 0; i < 3; i++) n += get(d, i < 2 ? HD_KV_FULL : HD_KV_WINDOW, i);
                /* all but the page of the byte; none without the key; gaps belong to no page */
                const bool gap = file == HD_DISK_PAGES && at % 4096 >= FULL_BYTES;
                assert_int_equal(n, file == HD_DISK_STORE ? 0 : gap ? 3 : 2);
                hd_disk_close(d);
            } else {
                assert_true(file == HD_DISK_STORE &&
                            at < 12); /* no store, or of another version */
            }
            *byte = before;
            memcpy(f.files[HD_DISK_STORE].now, header, sizeof header);
            f.files[file].now[at] = before;
        }
    }
    fake_disk_deinit(&f);
}

static void the_quota_is_kept_to_the_byte(void **state) {
    (void)state;
    for (uint64_t bytes = 0; bytes < bytes_for(4); bytes += 97) {
        fake_disk f;
        hd_disk *d;
        sure s = {0};
        fake_disk_init(&f, 1);
        if (open_with(&d, &f, "one model", bytes, NULL) == HD_OK) {
            assert_true(hd_disk_read_stats(d).bytes <= bytes);
            write_many(d, &s);
            assert_true(fake_disk_bytes(&f) <= bytes);
            hd_disk_close(d);
        } else {
            assert_int_equal(fake_disk_bytes(&f), 0);
        }
        fake_disk_deinit(&f);
    }
}

/* A smaller quota cuts the files; what is left is found. */
static void a_smaller_quota_keeps_what_fits(void **state) {
    (void)state;
    fake_disk f;
    fake_disk_init(&f, 1);
    hd_disk *d = open_store(&f);
    for (int i = 0; i < EXTENTS; i++) put(d, HD_KV_FULL, i);
    hd_disk_close(d);
    assert_int_equal(open_with(&d, &f, "one model", bytes_for(1), NULL), HD_OK);
    const int32_t n = hd_disk_read_stats(d).extents[HD_KV_FULL];
    assert_true(n < EXTENTS && fake_disk_bytes(&f) <= bytes_for(1));
    for (int i = 0; i < EXTENTS; i++) assert_int_equal(get(d, HD_KV_FULL, i), i < n);
    hd_disk_close(d);
    fake_disk_deinit(&f);
}

static void another_model_is_refused(void **state) {
    (void)state;
    fake_disk f;
    hd_disk *d;
    hd_err err = {0}, small = {0};
    fake_disk_init(&f, 1);
    hd_disk_close(open_store(&f));
    assert_int_equal(open_with(&d, &f, "another model", bytes_for(EXTENTS), &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "'one model' instead of 'another model'"));
    assert_int_equal(open_with(&d, &f, "one model", 5000, &small), HD_EINVAL);
    assert_non_null(strstr(small.msg, "5000 bytes hold no page of "));
    hd_disk_close(open_store(&f));
    fake_disk_deinit(&f);
}

/* ---- a folder ---- */

static void path_in(char out[300], const char *dir, hd_disk_file f) {
    snprintf(out, 300, "%s/%s", dir, hd_disk_file_name(f));
}

static void a_folder_belongs_to_one_process(void **state) {
    (void)state;
    char dir[] = "/tmp/hadal_disk_XXXXXX", path[300];
    hd_disk_files a, b;
    hd_err err = {0};
    struct stat st;
    int n;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(hd_disk_files_open(&a, dir, 0, false, NULL), HD_EINVAL);
    assert_int_equal(hd_disk_files_open(&a, dir, 0, true, NULL), HD_OK);
    assert_int_equal(hd_disk_files_open(&b, dir, 0, true, &err), HD_EAGAIN);
    assert_non_null(strstr(err.msg, "another process uses this store"));
    assert_int_equal(hd_disk_files_delete(dir, 0, &n, NULL), HD_EAGAIN);
    assert_int_equal(hd_disk_files_open(&b, dir, 0, false, NULL), HD_OK);
    b.close(b.ctx);
    for (int f = 0; f < HD_N_DISK_FILES; f++) {
        path_in(path, dir, (hd_disk_file)f);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_mode & 07777, 0600);
    }
    a.close(a.ctx);
    path_in(path, dir, HD_DISK_PAGES);
    assert_int_equal(chmod(path, 0644), 0);
    err = (hd_err){0};
    assert_int_equal(hd_disk_files_open(&a, dir, 0, true, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "full.pages: mode 0644"));
    assert_int_equal(hd_disk_files_delete(dir, 0, &n, NULL), HD_OK);
    assert_int_equal(n, HD_N_DISK_FILES);
    assert_int_equal(symlink("/dev/null", path), 0);
    assert_int_equal(hd_disk_files_open(&a, dir, 0, true, NULL), HD_EIO);
    assert_int_equal(hd_disk_files_delete(dir, 0, &n, NULL), HD_OK);
    assert_int_equal(rmdir(dir), 0);
}

static void files_read_and_write_what_they_say(void **state) {
    (void)state;
    char dir[] = "/tmp/hadal_disk_XXXXXX", text[4];
    hd_disk_files a;
    uint64_t bytes;
    int n;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(hd_disk_files_open(&a, dir, 0, true, NULL), HD_OK);
    assert_int_equal(a.write(a.ctx, HD_DISK_PAGES, "abcd", 4, 10), 0);
    assert_int_equal(a.size(a.ctx, HD_DISK_PAGES, &bytes), 0);
    assert_int_equal(bytes, 14);
    assert_int_equal(a.read(a.ctx, HD_DISK_PAGES, text, 4, 10), 0);
    assert_memory_equal(text, "abcd", 4);
    assert_int_equal(a.read(a.ctx, HD_DISK_PAGES, text, 4, 11), ENODATA);
    assert_int_equal(a.sync(a.ctx, HD_DISK_PAGES), 0);
    assert_int_equal(a.cut(a.ctx, HD_DISK_PAGES, 20), 0);
    assert_int_equal(a.size(a.ctx, HD_DISK_PAGES, &bytes), 0);
    assert_int_equal(bytes, 14);
    assert_int_equal(a.cut(a.ctx, HD_DISK_PAGES, 12), 0);
    assert_int_equal(a.read(a.ctx, HD_DISK_PAGES, text, 4, 10), ENODATA);
    a.close(a.ctx);
    assert_int_equal(hd_disk_files_delete(dir, 0, &n, NULL), HD_OK);
    assert_int_equal(rmdir(dir), 0);
}

/* ---- several caches ---- */

enum { CACHES = 4, TURNS = 400 };

typedef struct sharer {
    hd_disk *disk;
    unsigned seed;
    int32_t read, cancelled;
    bool good; /* what was read */
} sharer;

static int draw(sharer *s, int n) {
    s->seed = s->seed * 1103515245u + 12345u;
    return (int)(s->seed >> 16) % n;
}

/* 0, or ECANCELED: the pages were dropped meanwhile. */
static void note_end(sharer *s, int why) {
    s->cancelled += why == ECANCELED;
    s->good = s->good && (why == 0 || why == ECANCELED);
}

static void write_one(sharer *s, hd_kv_group group, int i, uint8_t *page) {
    const int32_t extent = hd_disk_begin_write(s->disk, group, name_of(i), i);
    if (extent < 0) return; /* others use all */
    fill_page(page, group, i);
    const int why = hd_disk_write(s->disk, group, extent, page);
    hd_disk_end_write(s->disk, group, extent, why == 0);
    note_end(s, why);
}

static void read_one(sharer *s, hd_kv_group group, int i, uint8_t *page) {
    uint8_t want[WINDOW_BYTES];
    const int32_t extent = hd_disk_begin_read(s->disk, group, name_of(i));
    if (extent < 0) return;
    const int why = hd_disk_read(s->disk, group, extent, page);
    hd_disk_end_read(s->disk, group, extent, why == 0);
    note_end(s, why);
    if (why) return;
    fill_page(want, group, i);
    s->good = s->good && memcmp(page, want, page_bytes[group]) == 0;
    s->read++;
}

static void *use_store(void *arg) {
    sharer *s = arg;
    uint8_t page[WINDOW_BYTES];
    for (int turn = 0; turn < TURNS; turn++) {
        const hd_kv_group group = (hd_kv_group)draw(s, HD_N_KV_GROUPS);
        const int i = draw(s, N_NAMES), what = draw(s, 60);
        if (what == 0) {
            s->good = s->good && hd_disk_clear(s->disk) == 0;
        } else if (what < 30) {
            write_one(s, group, i, page);
        } else {
            (void)hd_disk_use(s->disk, group, name_of(i), hd_disk_begin_use(s->disk));
            read_one(s, group, i, page);
        }
    }
    hd_disk_close(s->disk);
    return NULL;
}

/* What one of them wrote is there for all, or for none once one has dropped everything. */
static void caches_share_a_store(void **state) {
    (void)state;
    char dir[] = "/tmp/hadal_disk_XXXXXX";
    hd_disk_options o = {
        .where = dir,
        .bytes = bytes_for(EXTENTS),
        .page_tokens = 8,
        .page_bytes = {FULL_BYTES, WINDOW_BYTES},
        .identity = "one model"
    };
    pthread_t threads[CACHES];
    sharer all[CACHES];
    hd_disk *d;
    int n, read = 0;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(hd_disk_files_open(&o.files, dir, 0, true, NULL), HD_OK);
    assert_int_equal(hd_disk_open(&d, &o, NULL), HD_OK);
    for (int i = 0; i < CACHES; i++) {
        all[i] = (sharer){.disk = hd_disk_share(d), .seed = (unsigned)i, .good = true};
        assert_int_equal(pthread_create(&threads[i], NULL, use_store, &all[i]), 0);
    }
    for (int i = 0; i < CACHES; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_true(all[i].good);
        read += all[i].read;
    }
    assert_true(read > TURNS / 4);
    assert_int_equal(hd_disk_check(d, NULL), HD_OK);
    hd_disk_close(d);
    assert_int_equal(hd_disk_files_delete(dir, 0, &n, NULL), HD_OK);
    assert_int_equal(rmdir(dir), 0);
}

/* Everything is dropped between the beginning and the end of a transfer. */
static void transfers_end_when_all_is_dropped(void **state) {
    (void)state;
    uint8_t page[WINDOW_BYTES] = {0};
    fake_disk f;
    fake_disk_init(&f, 1);
    hd_disk *d = open_store(&f);
    put(d, HD_KV_FULL, 0);
    const int32_t reading = hd_disk_begin_read(d, HD_KV_FULL, name_of(0));
    const int32_t writing = hd_disk_begin_write(d, HD_KV_FULL, name_of(1), 1);
    assert_int_equal(hd_disk_clear(d), 0);
    assert_false(hd_disk_use(d, HD_KV_FULL, name_of(0), hd_disk_begin_use(d)));
    assert_int_equal(hd_disk_read(d, HD_KV_FULL, reading, page), ECANCELED);
    assert_int_equal(hd_disk_write(d, HD_KV_FULL, writing, page), ECANCELED);
    hd_disk_end_read(d, HD_KV_FULL, reading, false);
    hd_disk_end_write(d, HD_KV_FULL, writing, true); /* it ended before, say */
    assert_int_equal(hd_disk_check(d, NULL), HD_OK);
    assert_int_equal(hd_disk_read_stats(d).used[HD_KV_FULL], 0);
    assert_int_equal(fake_disk_bytes(&f), sizeof(hd_disk_header));
    assert_int_equal(put(d, HD_KV_FULL, 0), 0);
    assert_true(get(d, HD_KV_FULL, 0));
    hd_disk_close(d);
    fake_disk_deinit(&f);
}

/* Weights of the files have one root for good; others one for each store that is opened. */
static void weights_have_roots(void **state) {
    (void)state;
    fake_disk f;
    fake_disk_init(&f, 1);
    hd_page_name before = {0, 0};
    for (int turn = 0; turn < 2; turn++) {
        hd_disk *d = open_store(&f);
        const hd_page_name none = {0, 0}, one = hd_disk_root(d, 1);
        assert_true(hd_page_name_equal(hd_disk_root(d, 0), none));
        assert_true(hd_page_name_equal(one, hd_disk_root(d, 1)));
        assert_false(hd_page_name_equal(one, hd_disk_root(d, 2)));
        assert_false(hd_page_name_equal(one, before) || hd_page_name_equal(one, none));
        before = one;
        hd_disk_close(d);
    }
    fake_disk_deinit(&f);
}

/* ---- threads ---- */

enum { THREADS = 3, JOBS = 4 };

static void count_wakes(void *ctx) {
    atomic_fetch_add((atomic_int *)ctx, 1);
}

/* Submits a transfer of each page, as many at a time as there is room for, and takes them back. */
static void move_all(hd_disk *d, hd_disk_io *io, hd_disk_job_kind kind,
                     uint8_t pages[EXTENTS][WINDOW_BYTES]) {
    hd_disk_job job;
    int submitted = 0, taken = 0;
    while (taken < EXTENTS) {
        while (submitted < EXTENTS && submitted - taken < JOBS) {
            const hd_page_name name = name_of(submitted);
            const int32_t extent = kind == HD_DISK_WRITE
                                       ? hd_disk_begin_write(d, HD_KV_FULL, name, submitted)
                                       : hd_disk_begin_read(d, HD_KV_FULL, name);
            assert_true(extent >= 0);
            hd_disk_io_submit(io, &(hd_disk_job){.kind = kind,
                                                 .tag = submitted,
                                                 .extent = extent,
                                                 .page = pages[submitted]});
            submitted++;
        }
        hd_disk_io_wait(io);
        while (hd_disk_io_take(io, &job)) {
            assert_int_equal(job.why, 0);
            if (kind == HD_DISK_WRITE) {
                hd_disk_end_write(d, HD_KV_FULL, job.extent, true);
            } else {
                hd_disk_end_read(d, HD_KV_FULL, job.extent, true);
            }
            taken++;
        }
    }
}

static void threads_move_pages(void **state) {
    (void)state;
    char dir[] = "/tmp/hadal_disk_XXXXXX";
    static uint8_t pages[EXTENTS][WINDOW_BYTES], want[WINDOW_BYTES];
    hd_disk_options o = {
        .where = dir,
        .bytes = bytes_for(EXTENTS),
        .page_tokens = 8,
        .page_bytes = {FULL_BYTES, WINDOW_BYTES},
        .identity = "one model"
    };
    atomic_int wakes = 0;
    hd_disk *d;
    hd_disk_io *io;
    int n;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(hd_disk_files_open(&o.files, dir, 0, true, NULL), HD_OK);
    assert_int_equal(hd_disk_open(&d, &o, NULL), HD_OK);
    assert_int_equal(hd_disk_io_open(&io, d, THREADS, JOBS, count_wakes, &wakes, NULL), HD_OK);
    for (int i = 0; i < EXTENTS; i++) fill_page(pages[i], HD_KV_FULL, i);
    move_all(d, io, HD_DISK_WRITE, pages);
    memset(pages, 0, sizeof pages);
    move_all(d, io, HD_DISK_READ, pages);
    hd_disk_io_submit(io, &(hd_disk_job){.kind = HD_DISK_SYNC});
    hd_disk_io_close(io); /* ends what was submitted */
    assert_true(atomic_load(&wakes) >= 2 * EXTENTS);
    for (int i = 0; i < EXTENTS; i++) {
        fill_page(want, HD_KV_FULL, i);
        assert_memory_equal(pages[i], want, FULL_BYTES);
    }
    hd_disk_close(d);
    assert_int_equal(hd_disk_files_delete(dir, 0, &n, NULL), HD_OK);
    assert_int_equal(rmdir(dir), 0);
}

int test_disk(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_survive_a_restart),
        cmocka_unit_test(the_least_recently_used_makes_room),
        cmocka_unit_test(an_end_at_any_call_leaves_hits_or_misses),
        cmocka_unit_test(a_failed_call_costs_one_page),
        cmocka_unit_test(a_page_that_cannot_be_read_is_forgotten),
        cmocka_unit_test(any_changed_byte_is_found),
        cmocka_unit_test(the_quota_is_kept_to_the_byte),
        cmocka_unit_test(a_smaller_quota_keeps_what_fits),
        cmocka_unit_test(another_model_is_refused),
        cmocka_unit_test(caches_share_a_store),
        cmocka_unit_test(transfers_end_when_all_is_dropped),
        cmocka_unit_test(weights_have_roots),
        cmocka_unit_test(a_folder_belongs_to_one_process),
        cmocka_unit_test(files_read_and_write_what_they_say),
        cmocka_unit_test(threads_move_pages),
    };
    return cmocka_run_group_tests_name("disk", tests, NULL, NULL);
}
