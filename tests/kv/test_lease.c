/* test_lease.c - what one machine of kv/lease.h does with each message, right or wrong. */
#include "check.h"

#include "kv/lease.h"

enum { EPOCH = 5, PEER_EPOCH = 9, N_PAGES = 3, N_TOKENS = 20 };

/* One machine and its peer 0, whose messages the test writes. */
typedef struct side {
    uint64_t memory[1400];
    hd_leases *l;
    hd_lease_action done[8]; /* of the last event */
    int32_t n_done;
    uint64_t now_ns;
} side;

static hd_status step(side *s, hd_lease_event e) {
    e.now_ns = s->now_ns;
    const hd_status status = hd_leases_step(s->l, &e);
    s->n_done = 0;
    while (hd_leases_take(s->l, &s->done[s->n_done])) s->n_done++;
    assert_int_equal(hd_leases_check(s->l, false, NULL), HD_OK);
    return status;
}

static void setup(side *s) {
    *s = (side){.now_ns = 100};
    const hd_lease_options o = {.epoch = EPOCH,
                                .max_time_ns = 1000,
                                .max_leases = 2,
                                .max_per_peer = 1,
                                .max_peers = 1,
                                .max_pages = 4};
    assert_in_range(hd_leases_bytes(&o), 1, sizeof s->memory);
    s->l = hd_leases_place(s->memory, &o);
    assert_int_equal(step(s, (hd_lease_event){.kind = HD_LEASE_EV_HELLO, .epoch = PEER_EPOCH}),
                     HD_OK);
}

static const hd_lease_id theirs = {.generation = 77, .slot = 1};

static hd_status hear(side *s, hd_lease_message m, uint64_t digest) {
    if (!m.from_epoch) m.from_epoch = PEER_EPOCH;
    if (!m.to_epoch) m.to_epoch = EPOCH;
    if (!m.from.generation) m.from = theirs;
    return step(s,
                (hd_lease_event){.kind = HD_LEASE_EV_MESSAGE, .message = &m, .digest = digest});
}

static hd_lease_id open_receiver(side *s) {
    setup(s);
    const hd_lease_event open = {.kind = HD_LEASE_EV_OPEN,
                                 .request = 1,
                                 .n_tokens = N_TOKENS,
                                 .n_pages = N_PAGES,
                                 .time_ns = 500};
    assert_int_equal(step(s, open), HD_OK);
    assert_int_equal(s->n_done, 1);
    assert_int_equal(s->done[0].message.kind, HD_LEASE_MSG_RESERVE);
    return s->done[0].id;
}

static hd_status hear_reserve(side *s, uint64_t generation, uint32_t n_pages) {
    return hear(s,
                (hd_lease_message){
                    .kind = HD_LEASE_MSG_RESERVE,
                    .from = {.generation = generation, .slot = 1},
                    .time_ns = 500,
                    .n_tokens = N_TOKENS,
                    .n_pages = n_pages
    },
                0);
}

static hd_lease_id open_sender(side *s) {
    setup(s);
    assert_int_equal(hear_reserve(s, theirs.generation, N_PAGES), HD_OK);
    assert_int_equal(s->done[0].kind, HD_LEASE_DO_PREFILL);
    const hd_lease_id id = s->done[0].id;
    assert_int_equal(step(s, (hd_lease_event){.kind = HD_LEASE_EV_ACCEPT, .id = id}), HD_OK);
    return id;
}

static hd_status hear_page(side *s, hd_lease_id to, uint32_t page) {
    return hear(
        s, (hd_lease_message){.kind = HD_LEASE_MSG_PAGE, .to = to, .page = page, .digest = 6},
        6);
}

static hd_status write_page(side *s, hd_lease_id id, uint32_t page) {
    return step(s, (hd_lease_event){.kind = HD_LEASE_EV_WRITTEN, .id = id, .page = page});
}

static hd_status hear_commit(side *s, hd_lease_id to, uint32_t n_pages, uint32_t n_tokens) {
    return hear(
        s,
        (hd_lease_message){
            .kind = HD_LEASE_MSG_COMMIT, .to = to, .n_pages = n_pages, .n_tokens = n_tokens},
        0);
}

static hd_status hear_short(side *s, hd_lease_message_kind kind, hd_lease_id to) {
    return hear(s, (hd_lease_message){.kind = kind, .to = to, .reason = HD_LEASE_CANCEL}, 0);
}

static bool does(const side *s, hd_lease_action_kind kind) {
    for (int32_t i = 0; i < s->n_done; i++) {
        if (s->done[i].kind == kind) return true;
    }
    return false;
}

static bool says(const side *s, hd_lease_message_kind kind) {
    for (int32_t i = 0; i < s->n_done; i++) {
        if (s->done[i].kind == HD_LEASE_DO_SEND && s->done[i].message.kind == kind) return true;
    }
    return false;
}

static uint64_t discarded(const side *s, hd_lease_reason reason) {
    return hd_leases_read_counts(s->l).discarded[reason];
}

static hd_lease_state state_of(const side *s, hd_lease_id id) {
    return hd_leases_at(s->l, (int32_t)id.slot)->state;
}

static void a_handover_goes_through(void **state) {
    (void)state;
    side s;
    hd_lease_id id = open_receiver(&s);
    assert_int_equal(hear_short(&s, HD_LEASE_MSG_GRANT, id), HD_OK);
    assert_int_equal(state_of(&s, id), HD_LEASE_GRANTED);
    for (uint32_t p = 0; p < N_PAGES; p++) {
        assert_int_equal(hear_page(&s, id, p), HD_OK);
        assert_true(does(&s, HD_LEASE_DO_WRITE));
        assert_int_equal(write_page(&s, id, p), HD_OK);
    }
    assert_int_equal(hear_commit(&s, id, N_PAGES, N_TOKENS), HD_OK);
    assert_true(does(&s, HD_LEASE_DO_OWN) && says(&s, HD_LEASE_MSG_OWNED));
    assert_int_equal(hd_leases_check(s.l, true, NULL), HD_OK);

    id = open_sender(&s);
    assert_true(says(&s, HD_LEASE_MSG_GRANT));
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_COMPUTED, .id = id, .n_pages = 2});
    assert_int_equal(s.done[0].kind, HD_LEASE_DO_PAGES);
    assert_int_equal(s.done[0].n_pages, 2);
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_COMPUTED, .id = id, .n_pages = 3});
    assert_int_equal(s.done[0].page, 2);
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_SENT, .id = id, .n_pages = 3});
    assert_true(says(&s, HD_LEASE_MSG_COMMIT));
    assert_int_equal(hear_short(&s, HD_LEASE_MSG_OWNED, id), HD_OK);
    assert_true(does(&s, HD_LEASE_DO_RELEASE));
    assert_int_equal(hd_leases_check(s.l, true, NULL), HD_OK);
}

/* X07: an unknown kind changes nothing. */
static void unknown_kinds_only_count(void **state) {
    (void)state;
    side s;
    const hd_lease_id id = open_receiver(&s);
    assert_int_equal(hear_short(&s, (hd_lease_message_kind)8, id), HD_EFORMAT);
    assert_int_equal(hear_short(&s, (hd_lease_message_kind)0, id), HD_EFORMAT);
    assert_int_equal(discarded(&s, HD_LEASE_TYPE), 2);
    assert_int_equal(state_of(&s, id), HD_LEASE_RESERVED);
}

/* X11, X17: a page outside the lease is not written; the lease ends and the peer is suspect. */
static void pages_outside_end_the_lease(void **state) {
    (void)state;
    static const uint32_t outside[] = {N_PAGES, 4, 1u << 31, UINT32_MAX};
    for (size_t i = 0; i < HD_LEN(outside); i++) {
        side s;
        const hd_lease_id id = open_receiver(&s);
        assert_int_equal(hear_page(&s, id, outside[i]), HD_EFORMAT);
        assert_false(does(&s, HD_LEASE_DO_WRITE));
        assert_true(does(&s, HD_LEASE_DO_RELEASE) && says(&s, HD_LEASE_MSG_ABORT));
        assert_int_equal(hd_leases_suspicion(s.l, 0), 1);
    }
}

/* X12, FT58: the second copy of a page is not written. */
static void a_page_is_written_once(void **state) {
    (void)state;
    side s;
    const hd_lease_id id = open_receiver(&s);
    assert_int_equal(hear_page(&s, id, 1), HD_OK);
    assert_int_equal(hear_page(&s, id, 1), HD_EFORMAT);
    assert_int_equal(write_page(&s, id, 1), HD_OK);
    assert_int_equal(hear_page(&s, id, 1), HD_EFORMAT);
    assert_int_equal(discarded(&s, HD_LEASE_REPEATED), 2);
}

/* X13: a count of pages outside the limits is refused, before a prefill. */
static void page_counts_are_checked(void **state) {
    (void)state;
    static const uint32_t counts[] = {0, 5, UINT32_MAX};
    for (size_t i = 0; i < HD_LEN(counts); i++) {
        side s;
        setup(&s);
        assert_int_equal(hear_reserve(&s, 1, counts[i]), HD_EFORMAT);
        assert_true(says(&s, HD_LEASE_MSG_GONE) && !does(&s, HD_LEASE_DO_PREFILL));
        const hd_lease_event open = {.kind = HD_LEASE_EV_OPEN, .n_pages = counts[i]};
        assert_int_equal(step(&s, open), HD_EINVAL);
    }
}

/* X14: an unknown lease is answered. */
static void unknown_leases_are_answered(void **state) {
    (void)state;
    side s;
    setup(&s);
    assert_int_equal(hear_page(&s, (hd_lease_id){1, 2, 0}, 0), HD_EFORMAT);
    assert_true(says(&s, HD_LEASE_MSG_GONE));
    assert_int_equal(hear_page(&s, (hd_lease_id){1, UINT32_MAX, 0}, 0), HD_EFORMAT);
    const hd_lease_message far = {
        .kind = HD_LEASE_MSG_RESERVE,
        .from = {.generation = 90, .slot = 2},
        .n_pages = 1
    }; /* no process has a third slot */
    assert_int_equal(hear(&s, far, 0), HD_EFORMAT);
    assert_int_equal(s.n_done, 0);
    assert_int_equal(discarded(&s, HD_LEASE_UNKNOWN), 3);
}

/* X15, FT62: data of a former lease of the slot, and late completions, change nothing. */
static void former_leases_change_nothing(void **state) {
    (void)state;
    side s;
    hd_lease_id old = open_receiver(&s);
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_ABORT, .id = old, .reason = HD_LEASE_CANCEL});
    const hd_lease_event open = {.kind = HD_LEASE_EV_OPEN, .n_pages = 1, .time_ns = 9};
    assert_int_equal(step(&s, open), HD_OK);
    assert_int_equal(s.done[0].id.slot, old.slot);
    assert_int_equal(hear_page(&s, old, 0), HD_EFORMAT);
    assert_false(does(&s, HD_LEASE_DO_WRITE));
    assert_int_equal(write_page(&s, old, 0), HD_EFORMAT);
    assert_int_equal(discarded(&s, HD_LEASE_STALE), 2);
}

/* X16: GRANT and COMMIT in the wrong state, and messages for the other side. */
static void states_are_checked(void **state) {
    (void)state;
    side s;
    hd_lease_id id = open_receiver(&s);
    assert_int_equal(hear_short(&s, HD_LEASE_MSG_OWNED, id), HD_EFORMAT);
    assert_int_equal(hear_commit(&s, id, N_PAGES, N_TOKENS), HD_OK);
    assert_int_equal(hear_commit(&s, id, N_PAGES, N_TOKENS), HD_EFORMAT);
    assert_int_equal(hear_short(&s, HD_LEASE_MSG_GRANT, id), HD_EFORMAT);
    id = open_sender(&s);
    assert_int_equal(hear_page(&s, id, 0), HD_EFORMAT);
    assert_int_equal(hear_short(&s, HD_LEASE_MSG_OWNED, id), HD_EFORMAT);
    assert_int_equal(discarded(&s, HD_LEASE_STATE), 2);
}

/* X18: pages that are missing after COMMIT are waited for, until the deadline. */
static void a_hole_ends_with_the_deadline(void **state) {
    (void)state;
    side s;
    const hd_lease_id id = open_receiver(&s);
    hear_page(&s, id, 0);
    write_page(&s, id, 0);
    assert_int_equal(hear_commit(&s, id, N_PAGES, N_TOKENS), HD_OK);
    assert_false(does(&s, HD_LEASE_DO_OWN));
    s.now_ns = 600;
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_TICK});
    assert_int_equal(s.done[s.n_done - 1].reason, HD_LEASE_HOLE);
}

/* X19, FT60: pages, GRANT and COMMIT in any order. */
static void any_order_is_accepted(void **state) {
    (void)state;
    side s;
    const hd_lease_id id = open_receiver(&s);
    assert_int_equal(hear_commit(&s, id, N_PAGES, N_TOKENS), HD_OK);
    for (uint32_t p = N_PAGES; p-- > 0;) {
        assert_int_equal(hear_page(&s, id, p), HD_OK);
        assert_false(does(&s, HD_LEASE_DO_OWN));
        assert_int_equal(write_page(&s, id, p), HD_OK);
    }
    assert_true(does(&s, HD_LEASE_DO_OWN));
}

/* X20, FT59: a page with a wrong digest is not written; the peer is suspect. */
static void a_wrong_digest_ends_the_lease(void **state) {
    (void)state;
    side s;
    const hd_lease_id id = open_receiver(&s);
    const hd_lease_message m = {.kind = HD_LEASE_MSG_PAGE, .to = id, .digest = 6};
    assert_int_equal(hear(&s, m, 7), HD_EFORMAT);
    assert_false(does(&s, HD_LEASE_DO_WRITE));
    assert_true(does(&s, HD_LEASE_DO_RELEASE));
    assert_int_equal(hd_leases_suspicion(s.l, 0), 1);
}

/* X21: COMMIT with another number of pages or tokens. */
static void commits_are_counted(void **state) {
    (void)state;
    side s;
    hd_lease_id id = open_receiver(&s);
    assert_int_equal(hear_commit(&s, id, N_PAGES - 1, N_TOKENS), HD_EFORMAT);
    assert_true(does(&s, HD_LEASE_DO_RELEASE));
    id = open_receiver(&s);
    assert_int_equal(hear_commit(&s, id, N_PAGES, N_TOKENS + 1), HD_EFORMAT);
    assert_int_equal(discarded(&s, HD_LEASE_COUNT), 1);
}

/* X22: COMMIT after the lease was owned has the same answer and no second effect. */
static void a_repeated_commit_has_the_same_answer(void **state) {
    (void)state;
    side s;
    const hd_lease_id id = open_receiver(&s);
    for (uint32_t p = 0; p < N_PAGES; p++) {
        hear_page(&s, id, p);
        write_page(&s, id, p);
    }
    hear_commit(&s, id, N_PAGES, N_TOKENS);
    assert_int_equal(hear_commit(&s, id, N_PAGES, N_TOKENS), HD_EFORMAT);
    assert_true(says(&s, HD_LEASE_MSG_OWNED) && s.n_done == 1);
}

/* X23: ABORT of unknown, finished and running leases is answered. */
static void aborts_are_always_answered(void **state) {
    (void)state;
    side s;
    const hd_lease_id id = open_sender(&s);
    hear_short(&s, HD_LEASE_MSG_ABORT, (hd_lease_id){5, 1, 0});
    assert_true(says(&s, HD_LEASE_MSG_GONE));
    hear_short(&s, HD_LEASE_MSG_ABORT, id);
    assert_true(says(&s, HD_LEASE_MSG_GONE) && does(&s, HD_LEASE_DO_RELEASE));
    hear_short(&s, HD_LEASE_MSG_ABORT, id);
    assert_true(says(&s, HD_LEASE_MSG_GONE) && s.n_done == 1);
    hear_short(&s, HD_LEASE_MSG_GONE, id);
    assert_int_equal(s.n_done, 0);
}

/* X24, FT53: data after an abort is not written, and pages are released when writes have ended. */
static void release_waits_for_writes(void **state) {
    (void)state;
    side s;
    hd_lease_id id = open_receiver(&s);
    hear_page(&s, id, 0);
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_ABORT, .id = id, .reason = HD_LEASE_CANCEL});
    assert_false(does(&s, HD_LEASE_DO_RELEASE));
    assert_int_equal(hear_page(&s, id, 1), HD_EFORMAT);
    assert_false(does(&s, HD_LEASE_DO_WRITE));
    write_page(&s, id, 0);
    assert_true(does(&s, HD_LEASE_DO_RELEASE));

    id = open_sender(&s);
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_COMPUTED, .id = id, .n_pages = 2});
    hear_short(&s, HD_LEASE_MSG_ABORT, id);
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_SENT, .id = id, .n_pages = 1});
    assert_false(does(&s, HD_LEASE_DO_RELEASE));
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_SENT, .id = id, .n_pages = 1});
    assert_true(does(&s, HD_LEASE_DO_RELEASE));
}

/* X28, X29, FT54: the newer life of a peer ends the leases of the older, whose messages and
 * greetings change nothing. */
static void a_newer_epoch_wins(void **state) {
    (void)state;
    side s;
    const hd_lease_id id = open_receiver(&s);
    const hd_lease_event newer = {.kind = HD_LEASE_EV_HELLO, .epoch = PEER_EPOCH + 1};
    const hd_lease_event older = {.kind = HD_LEASE_EV_HELLO, .epoch = PEER_EPOCH};
    assert_int_equal(step(&s, newer), HD_OK);
    assert_true(does(&s, HD_LEASE_DO_RELEASE));
    assert_int_equal(step(&s, older), HD_EFORMAT);
    assert_int_equal(hear_page(&s, id, 0), HD_EFORMAT);
    const hd_lease_message late = {.kind = HD_LEASE_MSG_PAGE,
                                   .to = id,
                                   .from_epoch = PEER_EPOCH + 1,
                                   .to_epoch = EPOCH - 1};
    assert_int_equal(hear(&s, late, 0), HD_EFORMAT);
    assert_int_equal(discarded(&s, HD_LEASE_EPOCH), 3);
}

/* FT45, FT48, FT55, FT61: a silent peer, and results that nobody fetches, end with the deadline
 * and without new work. */
static void deadlines_end_leases(void **state) {
    (void)state;
    side s;
    hd_lease_id id = open_receiver(&s);
    assert_int_equal(hd_leases_next_deadline(s.l), 600);
    s.now_ns = 599;
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_TICK});
    assert_int_equal(s.n_done, 0);
    s.now_ns = 600;
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_TICK});
    assert_true(does(&s, HD_LEASE_DO_RELEASE) && says(&s, HD_LEASE_MSG_ABORT));
    id = open_sender(&s);
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_COMPUTED, .id = id, .n_pages = N_PAGES});
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_SENT, .id = id, .n_pages = N_PAGES});
    assert_int_equal(state_of(&s, id), HD_LEASE_COMMITTED);
    s.now_ns = 600;
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_TICK});
    assert_true(does(&s, HD_LEASE_DO_RELEASE));
    assert_int_equal(hd_leases_next_deadline(s.l), UINT64_MAX);
}

/* FT63: after twelve hours without an event the first handover works. */
static void idle_hours_change_nothing(void **state) {
    (void)state;
    side s;
    setup(&s);
    s.now_ns += 12ull * 3600 * 1000000000;
    assert_int_equal(step(&s, (hd_lease_event){.kind = HD_LEASE_EV_TICK}), HD_OK);
    assert_int_equal(hear_reserve(&s, 1, N_PAGES), HD_OK);
    assert_true(does(&s, HD_LEASE_DO_PREFILL));
}

/* FT52: the client leaves before GRANT: the sender finds its lease by the receiver's id, and a
 * RESERVE that comes after its ABORT starts nothing. */
static void an_early_abort_is_heard(void **state) {
    (void)state;
    side s;
    open_sender(&s);
    hear_short(&s, HD_LEASE_MSG_ABORT, (hd_lease_id){0});
    assert_true(does(&s, HD_LEASE_DO_RELEASE));
    setup(&s);
    hear_short(&s, HD_LEASE_MSG_ABORT, (hd_lease_id){0});
    assert_int_equal(hear_reserve(&s, theirs.generation, N_PAGES), HD_EFORMAT);
    assert_int_equal(discarded(&s, HD_LEASE_STALE), 1);
}

static void a_peer_has_a_bounded_number_of_leases(void **state) {
    (void)state;
    side s;
    open_sender(&s);
    assert_int_equal(hear_reserve(&s, theirs.generation, N_PAGES), HD_EFORMAT); /* repeated */
    assert_int_equal(s.n_done, 0);
    assert_int_equal(hear_reserve(&s, theirs.generation + 1, N_PAGES), HD_EFORMAT);
    assert_true(says(&s, HD_LEASE_MSG_GONE));
    assert_int_equal(discarded(&s, HD_LEASE_BUSY), 1);
}

/* FT46, FT47, FT49: the link is lost while pages move: nothing is said, all is released. */
static void a_lost_link_ends_leases(void **state) {
    (void)state;
    side s;
    const hd_lease_id id = open_receiver(&s);
    hear_page(&s, id, 0);
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_LOST});
    assert_int_equal(s.n_done, 0);
    write_page(&s, id, 0);
    assert_true(does(&s, HD_LEASE_DO_RELEASE) && s.n_done == 1);
    const hd_lease_event open = {.kind = HD_LEASE_EV_OPEN, .n_pages = 1};
    assert_int_equal(step(&s, open), HD_EAGAIN);
}

/* Another server takes a number: its epochs and generations begin anew. */
static void a_peer_is_forgotten_when_nothing_is_left_of_it(void **state) {
    (void)state;
    side s;
    const hd_lease_id id = open_receiver(&s);
    const hd_lease_event hello = {.kind = HD_LEASE_EV_HELLO, .epoch = PEER_EPOCH - 1};
    assert_int_equal(hd_leases_forget(s.l, 0), HD_EAGAIN); /* it is up */
    hear_page(&s, id, 0);
    step(&s, (hd_lease_event){.kind = HD_LEASE_EV_LOST});
    assert_int_equal(hd_leases_forget(s.l, 0), HD_EAGAIN); /* a copy still runs */
    write_page(&s, id, 0);
    assert_int_equal(step(&s, hello), HD_EFORMAT);
    assert_int_equal(hd_leases_forget(s.l, 0), HD_OK);
    assert_int_equal(step(&s, hello), HD_OK);
    assert_int_equal(hd_leases_suspicion(s.l, 0), 0);
}

int test_lease(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_handover_goes_through),
        cmocka_unit_test(unknown_kinds_only_count),
        cmocka_unit_test(pages_outside_end_the_lease),
        cmocka_unit_test(a_page_is_written_once),
        cmocka_unit_test(page_counts_are_checked),
        cmocka_unit_test(unknown_leases_are_answered),
        cmocka_unit_test(former_leases_change_nothing),
        cmocka_unit_test(states_are_checked),
        cmocka_unit_test(a_hole_ends_with_the_deadline),
        cmocka_unit_test(any_order_is_accepted),
        cmocka_unit_test(a_wrong_digest_ends_the_lease),
        cmocka_unit_test(commits_are_counted),
        cmocka_unit_test(a_repeated_commit_has_the_same_answer),
        cmocka_unit_test(aborts_are_always_answered),
        cmocka_unit_test(release_waits_for_writes),
        cmocka_unit_test(a_newer_epoch_wins),
        cmocka_unit_test(deadlines_end_leases),
        cmocka_unit_test(idle_hours_change_nothing),
        cmocka_unit_test(an_early_abort_is_heard),
        cmocka_unit_test(a_peer_has_a_bounded_number_of_leases),
        cmocka_unit_test(a_lost_link_ends_leases),
        cmocka_unit_test(a_peer_is_forgotten_when_nothing_is_left_of_it),
    };
    return cmocka_run_group_tests_name("lease", tests, NULL, NULL);
}
