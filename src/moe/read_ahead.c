/* read_ahead.c - see read_ahead.h. */
#include "moe/read_ahead.h"

static const double KEPT = 0.98; /* of what was learned, at the next layer */
static const double MOST = 1e6;

void hd_read_ahead_learn(hd_read_ahead *r, int32_t predicted, int32_t right, int64_t lead_ns) {
    r->predicted = KEPT * r->predicted + predicted;
    r->right = KEPT * r->right + right;
    r->lead_ns = KEPT * r->lead_ns + (double)lead_ns;
    r->leads = KEPT * r->leads + 1;
}

int32_t hd_read_ahead_most(const hd_read_ahead *r, double read_ns) {
    if (!(r->predicted > 0 && r->leads > 0)) return 0;
    const double wrong = 1 - r->right / r->predicted, lead = r->lead_ns / r->leads;
    if (wrong >= 0.5 || lead <= wrong * read_ns) return 0;
    return lead < MOST * read_ns ? 1 + (int32_t)(lead / read_ns) : (int32_t)MOST;
}
