/* test_kept.c - responses that go on in the background, and those that are stored. */
#include "check.h"

#include <stdio.h>
#include <string.h>

#include "api/background.h"
#include "fakes/api_rig.h"

int test_kept(void);

static rig r;

static int setup(void **state) {
    (void)state;
    rig_init(&r);
    r.ctx.background = api_background_open();
    return 0;
}

static int teardown(void **state) {
    (void)state;
    api_background_close(r.ctx.background);
    rig_deinit(&r);
    return 0;
}

static void done(rig_call *c) {
    assert_true(rig_ended(c));
    assert_true(rig_release(c));
}

/* A response in the background with a stream, and its first words. */
static rig_call *post_in_background(void) {
    r.n_requests = 0;
    rig_call *c =
        rig_post(&r, "/v1/responses", "{\"input\":\"q\",\"background\":true,\"stream\":true}");
    rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "first");
    assert_int_equal(rig_status(c), 200);
    return c;
}

/* Its events count as an answer that is not read, until it ends. */
static void test_background_events_are_held(void **state) {
    (void)state;
    rig_call *c = post_in_background();
    const size_t held = r.held;
    assert_true(held >= strlen(rig_text(c)));
    rig_call *late = rig_get(&r, "/v1/responses/resp_call-1?stream=true");
    for (int i = 0; i < 100; i++) rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "and more");
    assert_true(r.held > held);
    rig_end(&r, 0, 0, HD_FINISH_STOP);
    assert_int_equal(r.held, 0);
    assert_string_equal(rig_text(late), rig_text(c));
    done(late);
    late = rig_get(&r, "/v1/responses/resp_call-1?stream=true"); /* of the store */
    assert_string_equal(rig_text(late), rig_text(c));
    done(late);
    done(c);
}

/* Without room its events are not kept. It goes on, and so do those that follow it. */
static void test_background_events_without_room(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        r.max_held = i ? 4096 : 0;
        rig_call *c = post_in_background();
        rig_call *before = i ? rig_get(&r, "/v1/responses/resp_call-1?stream=true") : NULL;
        for (int k = 0; k < 100; k++) rig_say(&r, 0, 0, HD_DELTA_CONTENT, 0, "and more");
        assert_int_equal(r.held, 0);
        rig_call *late = rig_get(&r, "/v1/responses/resp_call-1?stream=true");
        assert_int_equal(rig_status(late), 503);
        assert_non_null(strstr(rig_text(late), "out_of_memory"));
        done(late);
        rig_end(&r, 0, 0, HD_FINISH_STOP);
        assert_int_equal(r.held, 0);
        assert_non_null(strstr(rig_text(c), "response.completed"));
        if (before) assert_string_equal(rig_text(before), rig_text(c));
        if (before) done(before);
        done(c);
        late = rig_get(&r, "/v1/responses/resp_call-1?stream=true");
        assert_int_equal(rig_status(late), 400);
        done(late);
        late = rig_get(&r, "/v1/responses/resp_call-1");
        assert_non_null(strstr(rig_text(late), "\"status\":\"completed\""));
        done(late);
    }
}

static void test_store_is_bounded(void **state) {
    (void)state;
    api_store *s = api_store_open(8192);
    for (int i = 0; i < 100; i++) {
        char id[16];
        api_text object = {0}, items = {0};
        api_puts(&object, "object");
        api_puts(&items, "items");
        snprintf(id, sizeof id, "id%d", i);
        api_store_put(s, id, 1, &object, &items);
        assert_null(object.data);
    }
    assert_true(api_store_get(s, "id99", 1, NULL, NULL));
    assert_false(api_store_get(s, "id99", 2, NULL, NULL));
    assert_false(api_store_get(s, "id0", 1, NULL, NULL));
    api_store_close(s);
}

int test_kept(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_background_events_are_held, setup, teardown),
        cmocka_unit_test_setup_teardown(test_background_events_without_room, setup, teardown),
        cmocka_unit_test(test_store_is_bounded),
    };
    return cmocka_run_group_tests_name("kept", tests, NULL, NULL);
}
