/* drive_eplb.c - plans many small cases for tests/e2e/test_eplb.py.
 *
 * Each line of standard input is "published|hadal|flow E P groups nodes ranks w[E]". Each line of
 * standard output is the map [P], then the slots of each expert in the order of its copies, or
 * "error: " and the sentence. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "moe/eplb.h"

enum { MOST = 1024 };

static void print(const hd_eplb_map *m) {
    for (int32_t s = 0; s < m->slots; s++) printf("%d ", m->slot_expert[s]);
    for (int32_t e = 0; e < m->experts; e++) {
        for (int32_t k = 0; k < m->n_copies[e]; k++) {
            printf("%d ", m->expert_slots[e * m->most_copies + k]);
        }
    }
    printf("\n");
}

int main(void) {
    char name[16];
    static double loads[MOST];
    hd_eplb_args a = {.loads = loads, .layers = 1};
    while (scanf("%15s %" SCNd32 " %" SCNd32 " %" SCNd32 " %" SCNd32 " %" SCNd32, name,
                 &a.experts, &a.slots, &a.groups, &a.nodes, &a.ranks) == 6) {
        if (a.experts > MOST) return 2;
        for (int32_t e = 0; e < a.experts; e++) {
            if (scanf("%lf", &loads[e]) != 1) return 2;
        }
        a.algorithm = strcmp(name, "published") == 0 ? HD_EPLB_PUBLISHED
                      : strcmp(name, "flow") == 0    ? HD_EPLB_FLOW
                                                     : HD_EPLB_HADAL;
        hd_eplb_map m;
        hd_err err = {0};
        if (hd_eplb_plan(&m, &a, &err) == HD_OK) {
            print(&m);
            hd_eplb_map_close(&m);
        } else {
            printf("error: %s\n", err.msg);
        }
    }
    return 0;
}
