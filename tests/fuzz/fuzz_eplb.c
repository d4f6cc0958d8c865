/* fuzz_eplb.c - any bytes as loads and as a map for `hadal eplb`: refused with a sentence, or small
 * ones are planned and repaired. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe/eplb.h"

enum { MOST = 64 }; /* experts, slots and layers of what is planned */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

static void check(hd_eplb_args a, const int32_t *previous) {
    a.previous = previous;
    a.max_moves = previous ? 3 : -1;
    hd_eplb_map m;
    hd_err err = {0};
    if (hd_eplb_plan(&m, &a, &err) != HD_OK) {
        must(err.msg[0] != '\0', "a silent refusal");
        return;
    }
    for (int32_t l = 0; l < m.layers; l++) {
        must(m.balancedness[l] > 0, "balancedness");
        must(m.balancedness[l] <= m.bound[l] * (1 + 1e-9), "balancedness above the bound");
    }
    for (int32_t i = 0; i < m.layers * m.experts; i++) must(m.n_copies[i] > 0, "no slot");
    json_decref(hd_eplb_map_json(&m));
    char *text = hd_eplb_map_tensorrt(&m);
    int32_t *again = NULL, layers = 0, slots = 0;
    must(text &&
             hd_eplb_map_read(&again, &layers, &slots, text, strlen(text), "it", &err) == HD_OK,
         "a written map is refused");
    must(layers == m.layers && slots == m.slots, "sizes of a map");
    must(memcmp(again, m.slot_expert, (size_t)(layers * slots) * sizeof *again) == 0, "a map");
    free(again);
    free(text);
    hd_eplb_map_close(&m);
}

/* The first line is read as loads, the rest as a map. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    char *text = malloc(n + 1);
    if (!text) return 0;
    if (n) memcpy(text, data, n);
    text[n] = '\0';
    const char *rest = memchr(text, '\n', n);
    const size_t first = rest ? (size_t)(rest - text) : n;
    hd_eplb_loads loads;
    int32_t *map = NULL, layers = 0, slots = 0;
    hd_err err = {0}, err2 = {0};
    const bool planned = hd_eplb_loads_read(&loads, text, first, 1, "it", &err) == HD_OK;
    must(planned || err.msg[0] != '\0', "a silent refusal");
    if (rest) {
        rest++;
        const hd_status st = hd_eplb_map_read(&map, &layers, &slots, rest,
                                              n - (size_t)(rest - text), "it", &err2);
        must(st == HD_OK || err2.msg[0] != '\0', "a silent refusal");
    }
    if (planned && loads.layers <= MOST && loads.experts <= MOST) {
        hd_eplb_args a = {.loads = loads.loads,
                          .layers = loads.layers,
                          .experts = loads.experts,
                          .slots = loads.experts + 3,
                          .ranks = 3};
        check(a, NULL);
        a.algorithm = HD_EPLB_FLOW;
        check(a, NULL);
        a.algorithm = HD_EPLB_HADAL;
        if (map && layers == loads.layers && slots <= MOST) {
            a.slots = slots;
            check(a, map);
        }
    }
    hd_eplb_loads_close(&loads);
    free(map);
    free(text);
    return 0;
}
