/* test_pd.c - what another server sent is checked before it is used, servers that differ are told
 * by name, and links carry frames whole. */
#include "check.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "pd/pd_internal.h"

enum { PAGE = 4, VOCAB = 100, BEFORE = 7 };

static pd_hello hello(void) {
    return (pd_hello){
        .epoch = 1,
        .facts = {.version = "1", .family = "f", .number_format = "n", .page_tokens = PAGE},
        .name = "host:1"
    };
}

static hd_status read_hello(const pd_hello *h, size_t n) {
    uint8_t bytes[BEFORE + sizeof *h + 1] = {0};
    pd_hello out;
    memcpy(bytes + BEFORE, h, sizeof *h);
    return pd_hello_read(&out, bytes, BEFORE, n, NULL);
}

static void greetings_are_checked(void **state) {
    (void)state;
    pd_hello h = hello();
    assert_int_equal(read_hello(&h, BEFORE + sizeof h), HD_OK);
    assert_int_equal(read_hello(&h, BEFORE + sizeof h - 1), HD_EFORMAT);
    assert_int_equal(read_hello(&h, BEFORE + sizeof h + 1), HD_EFORMAT);
    assert_int_equal(read_hello(&h, 0), HD_EFORMAT);
    h.epoch = 0;
    assert_int_equal(read_hello(&h, BEFORE + sizeof h), HD_EFORMAT);
    static const char *const names[] = {"", "a b", "a\"b", "a\\b", "a\nb", "\x7f"};
    for (size_t i = 0; i < HD_LEN(names); i++) {
        h = hello();
        snprintf(h.name, sizeof h.name, "%s", names[i]);
        assert_int_equal(read_hello(&h, BEFORE + sizeof h), HD_EFORMAT);
    }
    char *const texts[] = {h.facts.version, h.facts.family, h.facts.number_format, h.name};
    const size_t sizes[] = {PD_WORD, PD_WORD, PD_WORD, PD_NAME};
    for (size_t i = 0; i < HD_LEN(texts); i++) { /* without an end */
        h = hello();
        memset(texts[i], 'x', sizes[i]);
        assert_int_equal(read_hello(&h, BEFORE + sizeof h), HD_EFORMAT);
    }
}

/* FT66: another version, too */
static void differences_have_names(void **state) {
    (void)state;
    const pd_facts a = hello().facts;
    pd_facts b[7] = {a, a, a, a, a, a, a};
    static const char *const names[] = {"version",
                                        "model family",
                                        "number format",
                                        "weights",
                                        "page size",
                                        "page size",
                                        "order of sums (--sum-in-ranks)"};
    b[0].version[0] = '2';
    b[1].family[0] = 'g';
    b[2].number_format[0] = 'm';
    b[3].weights = 1;
    b[4].page_tokens = 5;
    b[5].page_bytes[HD_KV_WINDOW] = 1;
    b[6].sums[2] = 2;
    assert_null(pd_facts_difference(&a, &a));
    for (size_t i = 0; i < HD_LEN(b); i++) {
        assert_string_equal(pd_facts_difference(&a, &b[i]), names[i]);
    }
}

static void messages_stand_in_their_frames(void **state) {
    (void)state;
    uint8_t bytes[512] = {0};
    static const pd_frame_kind frames[] = {PD_FRAME_LEASE, PD_FRAME_RESERVE, PD_FRAME_PAGE};
    static const size_t least[] = {sizeof(hd_lease_message),
                                   sizeof(hd_lease_message) + sizeof(pd_prompt),
                                   sizeof(hd_lease_message) + sizeof(hd_page_head)};
    for (uint32_t kind = 0; kind <= HD_LEASE_MSG_GONE + 1; kind++) {
        hd_lease_message m = {.kind = kind};
        memcpy(bytes, &m, sizeof m);
        const size_t own = kind == HD_LEASE_MSG_RESERVE ? 1 : kind == HD_LEASE_MSG_PAGE ? 2 : 0;
        for (size_t f = 0; f < HD_LEN(frames); f++) {
            assert_int_equal(pd_lease_read(&m, frames[f], bytes, least[f], NULL),
                             f == own ? HD_OK : HD_EFORMAT);
            assert_int_equal(pd_lease_read(&m, frames[f], bytes, least[f] - 1, NULL),
                             HD_EFORMAT);
        }
        assert_int_equal(pd_lease_read(&m, PD_FRAME_LEASE, bytes, least[0] + 1, NULL),
                         HD_EFORMAT);
    }
}

/* A RESERVE of 3 whole pages. */
typedef struct reserve {
    hd_lease_message m;
    pd_prompt prompt;
    int32_t tokens[3 * PAGE + 1];
} reserve;

enum { WHOLE = offsetof(reserve, tokens) + sizeof((reserve){0}.tokens) };

static reserve right(void) {
    return (reserve){
        .m = {.kind = HD_LEASE_MSG_RESERVE, .n_tokens = 3 * PAGE + 1, .n_pages = 3},
        .prompt = {.n_tokens = 3 * PAGE + 1,                            .pages = {.first = {1, 2}, .n = {2, 1}}                            }
    };
}

static hd_status read_prompt(const reserve *r, size_t n) {
    pd_prompt out;
    const int32_t *tokens;
    return pd_prompt_read(&out, &tokens, r, n, PAGE, VOCAB, NULL);
}

static void prompts_are_checked(void **state) {
    (void)state;
    const reserve r = right();
    reserve bad[] = {r, r, r, r, r, r, r, r, r, r, r};
    assert_int_equal(read_prompt(&r, WHOLE), HD_OK);
    assert_int_equal(read_prompt(&r, WHOLE - 1), HD_EFORMAT);
    assert_int_equal(read_prompt(&r, WHOLE - sizeof(int32_t)), HD_EFORMAT);
    bad[0].prompt.n_tokens = 3 * PAGE;
    bad[0].m.n_tokens = 3 * PAGE;
    bad[1].prompt.n_tokens = -1;
    bad[2].m.n_pages = 4;
    bad[3].m.n_tokens = 1;
    bad[4].prompt.pages.first[HD_KV_FULL] = -1;
    bad[5].prompt.pages.n[HD_KV_FULL] = -1;
    bad[6].prompt.pages.n[HD_KV_FULL] = 3;
    bad[7].prompt.pages.first[HD_KV_WINDOW] = INT32_MAX;
    bad[8].tokens[0] = VOCAB;
    bad[9].tokens[3 * PAGE] = -1;
    memset(bad[10].prompt.trace_id, 1, sizeof bad[10].prompt.trace_id);
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        assert_int_equal(read_prompt(&bad[i], WHOLE), HD_EFORMAT);
    }
    hd_kv_group group;
    static const int32_t pages[] = {1, 2, 2};
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(hd_page_range_at(&r.prompt.pages, i, &group), pages[i]);
        assert_int_equal(group, i < 2 ? HD_KV_FULL : HD_KV_WINDOW);
    }
}

static void lists_are_checked(void **state) {
    (void)state;
    static const char *const bad[] = {"a",     "a:1,a:1",        ":1",
                                      "a:1=b", "a:1=10.0.0.1:2", "a:1=,=b:2",
                                      "dns:a", "dns:a:1=2",      "dns:127.0.0.1:1=b:2"};
    static pd p;
    hd_err err;
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        p = (pd){
            .o = {.role = PD_ROLE_DECODE, .peers = bad[i]}
        };
        err = (hd_err){0};
        assert_int_equal(pd_peers_open(&p, &err), HD_EINVAL);
        assert_non_null(strstr(err.msg, "--prefill-peers: "));
    }
    p = (pd){
        .o = {.role = PD_ROLE_BOTH, .peers = "a.b:1=127.0.0.1:2,localhost:3"}
    };
    assert_int_equal(pd_peers_open(&p, NULL), HD_OK);
    assert_string_equal(p.peers[2].name, "");
    assert_string_equal(p.peers[0].name, "a.b:1");
    assert_string_equal(p.peers[0].address, "127.0.0.1:2");
    assert_string_equal(p.peers[1].address, "localhost:" PD_PORT);
}

static void options_are_checked(void **state) {
    (void)state;
    static const struct {
        pd_options o;
        const char *why;
    } bad[] = {
        {{.role = PD_ROLE_PREFILL, .peers = "a:1"},                   "decode or both"         },
        {{.role = PD_ROLE_DECODE, .transfer_at = "a:1"},              "prefill or both"        },
        {{.role = PD_ROLE_BOTH, .transfer_at = "0.0.0.0:1"},          "--peer-key-file"        },
        {{.role = PD_ROLE_PREFILL, .transfer_at = "nothing"},         "nothing is no HOST:PORT"},
        {{.role = PD_ROLE_PREFILL, .transfer_at = "127.0.0.1:0"},     "no HOST:PORT"           },
        {{.role = PD_ROLE_PREFILL, .transfer_at = "127.0.0.1:99999"}, "no HOST:PORT"           },
    };
    int listener;
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        hd_err err = {0};
        assert_int_not_equal(pd_bind(&listener, &bad[i].o, &err), HD_OK);
        if (!strstr(err.msg, bad[i].why)) fail_msg("%s", err.msg);
        assert_int_equal(listener, -1);
    }
}

static const uint32_t most[PD_N_FRAMES] = {
    [PD_FRAME_CHALLENGE] = 16, [PD_FRAME_JOIN] = 16, [PD_FRAME_PAGE] = 1 << 20};

/* X02: more than a socket takes at once goes through in order, and damaged frames do not. */
static void links_carry_frames(void **state) {
    (void)state;
    enum { N = 8, BYTES = 1 << 19 };
    const uint64_t key[2] = {1, 2};
    int fd[2];
    pd_link a = {0}, b = {0};
    static uint8_t bytes[BYTES];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
    hd_channel_init(&a.channel, fd[0], true, key);
    hd_channel_init(&b.channel, fd[1], false, key);
    a.channel.limits = b.channel.limits = (hd_frame_limits){most, PD_N_FRAMES};
    assert_int_equal(pd_link_say(&a, PD_FRAME_CHALLENGE, a.channel.nonce[0], 16, 1), HD_OK);
    for (int i = 0; i < N; i++) {
        memset(bytes, i, sizeof bytes);
        assert_int_equal(pd_link_say(&a, PD_FRAME_PAGE, bytes, sizeof bytes, 1), HD_OK);
    }
    for (int got = -1; got < N;) {
        assert_int_equal(pd_link_flush(&a, NULL), HD_OK);
        const hd_status st = pd_link_read(&b, 2, NULL);
        if (st == HD_EAGAIN) continue;
        assert_int_equal(st, HD_OK);
        if (got >= 0) assert_int_equal(b.channel.payload[BYTES - 1], got);
        got++;
    }
    assert_int_equal(a.queued, 0);
    assert_int_equal(a.bytes_out, b.bytes_in);
    pd_out *o = pd_out_new(4);
    memset(pd_out_payload(o), 0, 4);
    pd_link_put(&a, PD_FRAME_PAGE, o, 3);
    *(uint8_t *)pd_out_payload(o) = 1; /* after it was sealed */
    assert_int_equal(pd_link_flush(&a, NULL), HD_OK);
    assert_int_equal(pd_link_read(&b, 4, NULL), HD_EFORMAT);
    assert_int_equal(pd_link_say(&a, PD_FRAME_LEASE, bytes, 1, 1), HD_OK); /* too long there */
    assert_int_equal(pd_link_flush(&a, NULL), HD_OK);
    b.channel.have = 0;
    assert_int_equal(pd_link_read(&b, 4, NULL), HD_EFORMAT);
    pd_link_close(&a);
    pd_link_close(&b);
    assert_null(pd_out_new((size_t)UINT32_MAX + 1));
}

int test_pd(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greetings_are_checked),
        cmocka_unit_test(differences_have_names),
        cmocka_unit_test(messages_stand_in_their_frames),
        cmocka_unit_test(prompts_are_checked),
        cmocka_unit_test(lists_are_checked),
        cmocka_unit_test(options_are_checked),
        cmocka_unit_test(links_carry_frames),
    };
    return cmocka_run_group_tests_name("pd", tests, NULL, NULL);
}
