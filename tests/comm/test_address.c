/* test_address.c - "HOST:PORT" (comm/address.h): which hosts a text means, and by which interface it is reached. */
#include "check.h"

#include <net/if.h>

#include "base/status.h"
#include "comm/address.h"

static void texts_are_host_and_port(void **state) {
    static const char *const wrong[] = {
        "",       "host",    "host:",      ":70",        "[]:70",    "[::1:70", "host:0",
        "host:x", "host:-1", "host:65536", "host:99999", "host:70x", "host: 70"};
    (void)state;
    for (size_t i = 0; i < HD_LEN(wrong); i++) assert_false(hd_address_is_valid(wrong[i]));
    assert_true(hd_address_is_valid("host:65535") && hd_address_is_valid("[::1]:70"));
}

static void loopback_is_known_by_text_and_by_address(void **state) {
    static const char *const by_text[] = {"127.0.0.1:70", "127.9.9.9:70", "[::1]:70",
                                          "localhost:70"};
    static const char *const by_address[] = {"0x7f.1:70", "2130706433:70", "[::0.0.0.1]:70"};
    (void)state;
    for (size_t i = 0; i < HD_LEN(by_text); i++) {
        assert_true(hd_address_is_loopback(by_text[i]));
        assert_false(hd_address_is_here_alone(by_text[i]));
    }
    for (size_t i = 0; i < HD_LEN(by_address); i++) {
        assert_false(hd_address_is_loopback(by_address[i]));
        if (!hd_address_is_here_alone(by_address[i])) fail_msg("%s", by_address[i]);
    }
    assert_false(hd_address_is_here_alone("192.0.2.7:70"));
    assert_false(hd_address_is_here_alone("0.0.0.0:70"));
}

static void an_interface_is_found_by_its_address(void **state) {
    char name[IF_NAMESIZE] = "";
    (void)state;
    assert_true(hd_address_interface("127.0.0.1:70", name));
    assert_string_equal(name, "lo");
    assert_false(hd_address_interface("no host", name));
}

int test_address(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_are_host_and_port),
        cmocka_unit_test(loopback_is_known_by_text_and_by_address),
        cmocka_unit_test(an_interface_is_found_by_its_address),
    };
    return cmocka_run_group_tests_name("address", tests, NULL, NULL);
}
