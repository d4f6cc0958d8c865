/* fuzz_http_url.c - any bytes as a request target, a Host and an Origin. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "http/url.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    enum { ARGS = 16 };
    http_query_arg args[ARGS];
    http_target target;
    char host[32];
    char *text = malloc(n + 1), *copy = malloc(n + 1);
    if (!text || !copy) abort();
    memcpy(text, data, n);
    text[n] = '\0';
    memcpy(copy, text, n + 1);
    if (http_host_parse(copy, host, sizeof host) && strlen(host) >= sizeof host) abort();
    if (http_host_parse(copy, host, sizeof host) && http_host_is_loopback(host) &&
        strpbrk(host, "ghijklmnopqrstuvwxyz_-") && strcmp(host, "localhost") != 0) {
        abort(); /* a name */
    }
    long number = -1;
    if (http_number_parse(copy, 0, 99, &number) != (number >= 0)) abort();
    http_origin_is_own(copy, "localhost:1", n & 1);
    http_origin_is_valid(copy);
    if (http_target_parse(&target, text, args, ARGS) == HTTP_TARGET_GOOD) {
        for (size_t i = 0; i < target.n_args; i++) {
            if (strlen(target.args[i].name) + strlen(target.args[i].value) > n) abort();
        }
        if (!http_url_decode(target.path, false) && !strchr(copy, '%')) abort();
    }
    free(text);
    free(copy);
    return 0;
}
