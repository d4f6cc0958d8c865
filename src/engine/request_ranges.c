/* request_ranges.c - see request_ranges.h. */
#include "engine/request_ranges.h"

#include <stdint.h>
#include <string.h>

#include "chat/chat.h"

/* Every field has 32 bits. */
#define FIELD(field)                             \
#field, offsetof(hd_request, field),         \
        _Generic(((hd_request *)0)->field, float \
                 : true, default                 \
                 : false)

/* clang-format off */
static const hd_request_range ranges[] = {
    {FIELD(temperature),          0,              100,                 0,    2},
    {FIELD(top_p),                0,              1,                   1e-6, 1},
    {FIELD(min_p),                0,              1,                   0,    0},
    {FIELD(repetition_penalty),   0,              100,                 0.1,  10},
    {FIELD(presence_penalty),     -100,           100,                 -2,   2},
    {FIELD(frequency_penalty),    -100,           100,                 -2,   2},
    {FIELD(relaxed_delta),        0,              1,                   0,    0},
    {FIELD(n),                    0,              HD_MAX_CHOICES,      1,    HD_MAX_CHOICES},
    {FIELD(top_k),                0,              INT32_MAX,           -1,   INT32_MAX},
    {FIELD(max_tokens),           0,              INT32_MAX,           1,    INT32_MAX},
    {FIELD(min_tokens),           0,              INT32_MAX,           0,    0},
    {FIELD(draft_tokens),         HD_DRAFTS_AUTO, HD_MAX_DRAFTS,       0,    0},
    {FIELD(max_reasoning),        0,              INT32_MAX,           1,    INT32_MAX},
    {FIELD(relaxed_top),          0,              HD_MAX_RELAXED_TOP,  0,    0},
    {FIELD(top_logprobs),         0,              HD_MAX_ALTERNATIVES, 0,    0},
    {FIELD(logprob_mode),         0,              HD_LOGPROB_SAMPLED,  0,    0},
    {FIELD(prompt_logprobs_from), 0,              INT32_MAX,           -1,   INT32_MAX},
    {FIELD(response_format),      0,              HD_FORMAT_CHOICE,    0,    0},
    {FIELD(thinking),             -1,             1,                   0,    0},
    {FIELD(effort),               0,              HD_EFFORT_MAX,       0,    0},
    {FIELD(effort_number),        0,              HD_MAX_EFFORT,       0,    0},
};
/* clang-format on */

const hd_request_range *hd_request_range_of(size_t at) {
    for (size_t i = 0; i < HD_LEN(ranges); i++) {
        if (ranges[i].at == at) return &ranges[i];
    }
    return NULL;
}

static double value_of(const hd_request *g, const hd_request_range *r) {
    const char *at = (const char *)g + r->at;
    float real;
    int32_t count;
    memcpy(&real, at, sizeof real);
    memcpy(&count, at, sizeof count);
    return r->real ? (double)real : count;
}

hd_status hd_request_check_ranges(const hd_request *g, hd_err *err) {
    for (size_t i = 0; i < HD_LEN(ranges); i++) {
        const hd_request_range *r = &ranges[i];
        const double v = value_of(g, r);
        if (v >= r->low && v <= r->high) continue;
        return HD_REFUSE(err, HD_EINVAL, NULL, r->name, "%s is %.*g; must be %.*g to %.*g",
                         r->name, r->real ? 6 : 10, v, r->real ? 6 : 10, r->low,
                         r->real ? 6 : 10, r->high);
    }
    return HD_OK;
}
