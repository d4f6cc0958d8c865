/* test_record.c - expert records without a model: rows and maps, a reader that is too slow,
 * generated traffic. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "moe/recorder.h"
#include "moe/traffic.h"

enum { LAYERS = 4, EXPERTS = 6, SLOTS = 8, TOP_K = 2, MOST = 1 << 16 };

/* Layer 0 is dense, 3 an MTP layer. In layer 2 expert 5 comes first, and has a copy. */
static hd_recorder *open_recorder(size_t most) {
    static int32_t map[LAYERS][SLOTS] = {
        {-1, -1, -1, -1, -1, -1, -1, -1},
        {0,  1,  2,  3,  4,  5,  -1, -1},
        {5,  4,  3,  2,  1,  0,  5,  -1},
        {0,  1,  2,  3,  4,  5,  0,  1 },
    };
    const hd_record_head head = {.layers = LAYERS,
                                 .n_mtp = 1,
                                 .experts = EXPERTS,
                                 .top_k = TOP_K,
                                 .slots = SLOTS,
                                 .ranks = 4,
                                 .nodes = 2,
                                 .slot_expert = &map[0][0]};
    hd_err err = {0};
    hd_recorder *r;
    if (hd_recorder_open(&r, &head, most, &err) != HD_OK) fail_msg("%s", err.msg);
    return r;
}

static FILE *file_of(hd_recorder *r) {
    static uint8_t bytes[MOST];
    size_t n = 0, got;
    hd_recorder_end(r);
    while ((got = hd_recorder_take(r, hd_recorder_read_state(r).begun, bytes + n, 7)) > 0) {
        n += got;
    }
    FILE *in = fmemopen(bytes, n, "rb");
    assert_non_null(in);
    return in;
}

static void add_rows(hd_recorder *r) {
    static const int32_t step[] = {0, 5, 5, 1}, draft[] = {1, 2};
    hd_recorder_row(r, HD_RECORD_DECODE, 17, 40, step, TOP_K);
    hd_recorder_row(r, HD_RECORD_DECODE, 18, 9, step, TOP_K);
    hd_recorder_row(r, HD_RECORD_DRAFT, 17, 40, draft, TOP_K);
    hd_recorder_end_pass(r);
    hd_recorder_row(r, HD_RECORD_PREFILL, 3, 0, step, TOP_K);
    hd_recorder_end_pass(r);
}

/* Logical counts come before the map, physical ones behind it. */
static void rows_are_counted_by_slot(void **state) {
    (void)state;
    for (int mode = HD_RECORD_PER_PASS; mode <= HD_RECORD_PER_TOKEN; mode++) {
        hd_recorder *r = open_recorder(MOST);
        hd_record_reader reader;
        hd_err err = {0};
        hd_recorder_begin(r, (hd_record_mode)mode);
        add_rows(r);
        FILE *in = file_of(r);
        if (hd_record_open(&reader, in, "it", &err) != HD_OK) fail_msg("%s", err.msg);
        const hd_record_row *row = &reader.row;
        assert_int_equal(hd_record_next(&reader, &err), HD_OK);
        const int32_t n = mode == HD_RECORD_PER_PASS ? 2 : 1;
        assert_int_equal(row->phase, HD_RECORD_DECODE);
        assert_int_equal(row->tokens, n);
        assert_int_equal(row->logical[1 * EXPERTS + 5], n);
        assert_int_equal(row->logical[2 * EXPERTS + 5], n);
        assert_int_equal(row->physical[1 * SLOTS + 5], n);
        assert_int_equal(row->physical[2 * SLOTS + 0], n); /* the first copy of expert 5 */
        assert_int_equal(row->physical[2 * SLOTS + 4], n);
        for (int32_t i = 0; i < EXPERTS; i++) {
            assert_int_equal(row->logical[i] + row->logical[3 * EXPERTS + i], 0);
        }
        int32_t rows = 1;
        while (hd_record_next(&reader, &err) == HD_OK && !reader.ended) rows++;
        assert_int_equal(rows, mode == HD_RECORD_PER_PASS ? 3 : 4);
        assert_int_equal(row->pass, 1);
        assert_int_equal(row->phase, HD_RECORD_PREFILL);
        assert_false(reader.cut);
        hd_record_close(&reader);
        fclose(in);
        hd_recorder_close(r);
    }
}

static void counters_become_rows(void **state) {
    (void)state;
    int64_t counts[3 * 3 * EXPERTS + EXPERTS] = {0};
    hd_recorder *r = open_recorder(MOST);
    hd_traffic t;
    hd_record_head head;
    hd_err err = {0};
    bool cut;
    counts[(1 * 3 + 2) * EXPERTS + 5] = INT64_C(5000000000); /* DECODE, layer 2 */
    counts[(1 * 3 + 2) * EXPERTS + 0] = INT64_C(5000000000);
    counts[3 * 3 * EXPERTS + 1] = 8; /* DRAFT */
    hd_recorder_begin(r, HD_RECORD_STAT);
    add_rows(r); /* nothing to a record of counts */
    hd_recorder_stat(r, counts, 9);
    FILE *in = file_of(r);
    assert_int_equal(hd_traffic_read(&t, &head, &cut, in, "it", HD_TRAFFIC_STEPS, &err), HD_OK);
    assert_int_equal(t.passes, 1);
    assert_int_equal(t.layers, 2);
    assert_int_equal(t.layer[1], 2);
    assert_int_equal(hd_traffic_rows(&t, 0, 1)[5], INT64_C(5000000000));
    assert_int_equal(hd_traffic_rows(&t, 0, 0)[5], 0);
    hd_traffic_close(&t);
    free(head.slot_expert);
    rewind(in);
    hd_record_reader reader;
    assert_int_equal(hd_record_open(&reader, in, "it", NULL), HD_OK);
    assert_int_equal(hd_record_next(&reader, NULL), HD_OK);
    assert_int_equal(reader.row.physical[2 * SLOTS + 0],
                     INT64_C(2500000000)); /* both slots of expert 5 */
    assert_int_equal(reader.row.physical[2 * SLOTS + 6], INT64_C(2500000000));
    hd_record_close(&reader);
    rewind(in);
    assert_int_equal(hd_traffic_read(&t, &head, &cut, in, "it", HD_TRAFFIC_DRAFT, &err), HD_OK);
    assert_int_equal(t.layers, 1);
    assert_int_equal(t.tokens[0], 4);
    assert_int_equal(hd_traffic_rows(&t, 0, 0)[1], 8);
    hd_traffic_close(&t);
    free(head.slot_expert);
    fclose(in);
    hd_recorder_close(r);
}

/* Rows without room are dropped whole and counted; later ones come again when there is room. */
static void slow_readers_lose_rows(void **state) {
    (void)state;
    static uint8_t bytes[1024];
    hd_recorder *r = open_recorder(300);
    hd_recorder_begin(r, HD_RECORD_PER_TOKEN);
    for (int i = 0; i < 50; i++) add_rows(r);
    const hd_recorder_state full = hd_recorder_read_state(r);
    assert_int_equal(full.rows + full.dropped, 200);
    assert_true(full.rows > 0 && full.dropped > 0);
    const size_t n = hd_recorder_take(r, full.begun, bytes, sizeof bytes);
    assert_int_equal(n, 56 + 2 * LAYERS * SLOTS + full.rows * (24 + LAYERS * TOP_K));
    assert_int_equal(hd_recorder_take(r, full.begun + 1, bytes, sizeof bytes), 0);
    add_rows(r);
    assert_int_equal(hd_recorder_read_state(r).rows, full.rows + 4);
    hd_recorder_close(r);
}

static double skew_of(const hd_traffic *t, int32_t layer) {
    double most = 0, sum = 0;
    for (int32_t e = 0; e < t->experts; e++) {
        double n = 0;
        for (int32_t p = 0; p < t->passes; p++) n += (double)hd_traffic_rows(t, p, layer)[e];
        most = n > most ? n : most;
        sum += n;
    }
    return most / (sum / t->experts);
}

static void traffic_is_generated(void **state) {
    (void)state;
    hd_traffic_spec spec = {.passes = 10,
                            .layers = 2,
                            .experts = 64,
                            .top_k = 6,
                            .tokens = 300,
                            .seed = 5,
                            .zipf = 1};
    hd_traffic t, again;
    hd_err err = {0};
    assert_int_equal(hd_traffic_generate(&t, &spec, &err), HD_OK);
    assert_int_equal(hd_traffic_generate(&again, &spec, &err), HD_OK);
    assert_memory_equal(t.rows, again.rows, 10 * 2 * 64 * sizeof *t.rows);
    for (int32_t i = 0; i < 20; i++) {
        const int64_t *rows = hd_traffic_rows(&t, i / 2, i % 2);
        int64_t sum = 0;
        for (int32_t e = 0; e < 64; e++) {
            assert_true(rows[e] >= 0 && rows[e] <= 300); /* a token's experts differ */
            sum += rows[e];
        }
        assert_int_equal(sum, 300 * 6);
    }
    assert_true(skew_of(&t, 0) > 4);
    hd_traffic_close(&t);
    hd_traffic_close(&again);
    spec.zipf = 0; /* all shares equal */
    assert_int_equal(hd_traffic_generate(&t, &spec, &err), HD_OK);
    assert_true(skew_of(&t, 0) < 1.5);
    hd_traffic_close(&t);
    spec.top_k = 64; /* every expert for every token */
    assert_int_equal(hd_traffic_generate(&t, &spec, &err), HD_OK);
    assert_int_equal(hd_traffic_rows(&t, 9, 1)[63], 300);
    hd_traffic_close(&t);
    spec.top_k = 65;
    assert_int_equal(hd_traffic_generate(&t, &spec, &err), HD_EINVAL);
}

/* Experts may have moved since the recorder was opened. */
static void a_record_begins_with_the_map_in_force(void **state) {
    (void)state;
    static const int32_t map[SLOTS] = {3, 4, 5, 0, 1, 2, 3, 3};
    hd_record_reader in;
    hd_recorder *r = open_recorder(MOST);
    hd_recorder_set_map(r, 1, map);
    hd_recorder_begin(r, HD_RECORD_PER_PASS);
    add_rows(r);
    FILE *f = file_of(r);
    assert_int_equal(hd_record_open(&in, f, "a record", NULL), HD_OK);
    assert_memory_equal(in.head.slot_expert + SLOTS, map, sizeof map);
    assert_int_equal(hd_record_next(&in, NULL), HD_OK);
    assert_int_equal(in.row.physical[SLOTS + 3], 2); /* both rows chose expert 0 */
    hd_record_close(&in);
    fclose(f);
    hd_recorder_close(r);
}

static size_t take_part(hd_recorder *part, uint8_t *out) {
    const hd_recorder_state s = hd_recorder_read_state(part);
    assert_int_equal(hd_recorder_take(part, s.begun, out, MOST), s.waiting);
    return s.waiting;
}

/* What two parts recorded in a pass is as if one recorder had the rows of both. */
static void parts_are_joined(void **state) {
    (void)state;
    static const int32_t step[] = {0, 5, 5, 1}, other[] = {2, 5, 3, 4}, draft[] = {1, 2};
    static uint8_t bytes[MOST], whole_bytes[MOST];
    for (int mode = HD_RECORD_PER_PASS; mode <= HD_RECORD_PER_TOKEN; mode++) {
        hd_recorder *all = open_recorder(MOST), *joined = open_recorder(MOST);
        hd_recorder *parts[] = {open_recorder(MOST), open_recorder(MOST)};
        hd_recorder_begin(all, (hd_record_mode)mode);
        hd_recorder_begin(joined, (hd_record_mode)mode);
        for (int k = 0; k < 2; k++) hd_recorder_begin_part(parts[k], (hd_record_mode)mode);
        for (int pass = 0; pass < 3; pass++) {
            for (int k = 0; k < 2; k++) {
                hd_recorder *const to[] = {all, parts[k]};
                for (size_t i = 0; i < HD_LEN(to); i++) {
                    hd_recorder_row(to[i], HD_RECORD_DECODE, 17 + pass, 40,
                                    k == pass ? other : step, TOP_K);
                    if (k) hd_recorder_row(to[i], HD_RECORD_DRAFT, 3, 1, draft, TOP_K);
                }
                hd_recorder_end_pass(parts[k]);
                const size_t n = take_part(parts[k], bytes);
                assert_int_equal(hd_recorder_join(joined, bytes, n, NULL), HD_OK);
                assert_int_equal(hd_recorder_join(joined, bytes, n - 1, NULL), HD_EPEER);
            }
            hd_recorder_end_pass(all);
            hd_recorder_end_pass(joined);
        }
        const size_t n = take_part(all, whole_bytes);
        assert_int_equal(take_part(joined, bytes), n);
        assert_memory_equal(bytes, whole_bytes, n);
        hd_recorder_close(all);
        hd_recorder_close(joined);
        for (int k = 0; k < 2; k++) hd_recorder_close(parts[k]);
    }
}

/* Layer 2 has expert 5 in slots 0 and 6. */
static void rows_count_at_the_slot_they_went_to(void **state) {
    (void)state;
    enum {
        TO_6 = 5 + EXPERTS * (6 + 1),
        TO_0 = 5 + EXPERTS,
        TO_ANOTHERS = 5 + EXPERTS * (4 + 1)
    };
    static const int32_t rows[][4] = {
        {1, 2, TO_6,        0},
        {1, 2, TO_6,        3},
        {1, 2, TO_0,        0},
        {1, 2, 5,           0},
        {1, 2, TO_ANOTHERS, 0}
    };
    for (int mode = HD_RECORD_PER_PASS; mode <= HD_RECORD_PER_TOKEN; mode++) {
        hd_record_reader in;
        hd_recorder *r = open_recorder(MOST);
        hd_recorder_begin(r, (hd_record_mode)mode);
        for (size_t i = 0; i < HD_LEN(rows); i++) {
            hd_recorder_row(r, HD_RECORD_DECODE, 1, (int32_t)i, rows[i], TOP_K);
        }
        hd_recorder_end_pass(r);
        FILE *f = file_of(r);
        assert_int_equal(hd_record_open(&in, f, "a record", NULL), HD_OK);
        assert_int_equal(hd_record_next(&in, NULL), HD_OK);
        if (mode == HD_RECORD_PER_PASS) {
            assert_int_equal(in.row.physical[2 * SLOTS + 6], 2);
            assert_int_equal(in.row.physical[2 * SLOTS + 0], 3);
        } else {
            assert_int_equal(in.row.choices[2 * TOP_K], 5);
        }
        hd_record_close(&in);
        fclose(f);
        hd_recorder_close(r);
    }
}

/* A head without its end is refused; of rows, those that are whole are read. */
static void files_are_cut_at_every_byte(void **state) {
    (void)state;
    static uint8_t bytes[MOST];
    for (int mode = HD_RECORD_PER_PASS; mode <= HD_RECORD_PER_TOKEN; mode++) {
        hd_recorder *r = open_recorder(MOST);
        hd_recorder_begin(r, (hd_record_mode)mode);
        add_rows(r);
        const uint64_t rows = hd_recorder_read_state(r).rows;
        const size_t n = take_part(r, bytes);
        size_t head = 0, row = 0;
        for (size_t at = 1; at <= n; at++) {
            hd_record_reader in;
            FILE *f = fmemopen(bytes, at, "rb");
            if (hd_record_open(&in, f, "it", NULL) == HD_OK) {
                if (!head) {
                    head = at;
                    row = hd_record_row_bytes(&in.head);
                    assert_int_equal((n - head) / row, rows);
                }
                while (!in.ended) assert_int_equal(hd_record_next(&in, NULL), HD_OK);
                assert_int_equal(in.n_read, (at - head) / row);
                assert_int_equal(in.cut, (at - head) % row != 0);
            } else {
                assert_int_equal(head, 0);
            }
            hd_record_close(&in);
            fclose(f);
        }
        assert_true(head > 0);
        hd_recorder_close(r);
    }
}

int test_record(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(files_are_cut_at_every_byte),
        cmocka_unit_test(rows_count_at_the_slot_they_went_to),
        cmocka_unit_test(parts_are_joined),
        cmocka_unit_test(rows_are_counted_by_slot),
        cmocka_unit_test(counters_become_rows),
        cmocka_unit_test(a_record_begins_with_the_map_in_force),
        cmocka_unit_test(slow_readers_lose_rows),
        cmocka_unit_test(traffic_is_generated),
    };
    return cmocka_run_group_tests_name("record", tests, NULL, NULL);
}
