/* fuzz_pd.c - any bytes as greetings, messages and prompts of another server, and as the list of
 * servers. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pd/pd_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_prompt(const uint8_t *data, size_t n) {
    pd_prompt p;
    const int32_t *tokens;
    hd_kv_group group;
    if (pd_prompt_read(&p, &tokens, data, n, 4, 100, NULL) != HD_OK) return;
    if (tokens[0] < 0 || tokens[p.n_tokens - 1] >= 100) abort();
    for (uint32_t i = 0; i < hd_page_range_size(&p.pages); i++) {
        const int32_t page = hd_page_range_at(&p.pages, i, &group);
        if (page < 0 || (page + 1) * 4 >= p.n_tokens) abort();
    }
}

static void check_list(const char *list) {
    static pd p;
    p = (pd){
        .o = {.role = PD_ROLE_DECODE, .peers = list}
    };
    (void)pd_peers_open(&p, NULL);
    if (p.n_sources > HD_NAMES_MAX) abort();
    for (int32_t i = 0; i < PD_MAX_PEERS; i++) {
        if (!memchr(p.peers[i].address, 0, sizeof p.peers[i].address)) abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    hd_lease_message m;
    pd_hello hello;
    char *copy = malloc(n + 1); /* aligned, and with an end */
    if (!copy) abort();
    memcpy(copy, data, n);
    copy[n] = 0;
    if (pd_hello_read(&hello, copy, 0, n, NULL) == HD_OK && !hello.name[0]) abort();
    for (int kind = PD_FRAME_LEASE; kind < PD_N_FRAMES; kind++) {
        (void)pd_lease_read(&m, (pd_frame_kind)kind, copy, n, NULL);
    }
    check_prompt((const uint8_t *)copy, n);
    check_list(copy);
    free(copy);
    return 0;
}
