/* fuzz_router.c - any bytes as a load report of a server, a request body, and a list of servers. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    router_load load;
    static router_news news;
    json_t *detail;
    static const uint64_t key[2];
    router_prefix prefix;
    static router_picture picture;
    char *text = malloc(n + 1);
    if (!text) abort();
    memcpy(text, data, n);
    text[n] = '\0';
    if (router_load_parse(&load, &news, &detail, text, n) &&
        (load.running < 0 || load.pending_tokens < 0 || news.n > ROUTER_NEWS))
        abort();
    json_decref(detail);
    router_prefix_of(&prefix, text, n, 1, key);
    if (router_prefix_end(prefix.n) > prefix.bytes) abort();
    picture.n = 0;
    router_picture_add(&picture, ROUTER_DECODE, "decode", text, &(hd_err){0});
    if (picture.n > ROUTER_MAX_PEERS) abort();
    free(text);
    return 0;
}
