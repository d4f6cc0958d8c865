/* histograms.c - the histograms of /metrics, with the edges that each prefix's dashboards
 * expect. */
#include <stddef.h>

#include "server/metrics/metrics_internal.h"

typedef struct shape { /* a histogram, written under every prefix */
    const char *own, *sglang, *vllm, *help;
    double unit; /* value of 1 at the edges in the histogram's unit */
    size_t offset;
    const double *edges[3]; /* per dialect, terminated by 0 */
} shape;

static const double ttft_ours[] = {.001, .005, .01, .02, .04, .06, .08, .1,  .25, .5,   .75, 1,
                                   2.5,  5,    7.5, 10,  20,  40,  80,  160, 640, 2560, 0};
static const double ttft_sglang[] = {.1, .2, .4, .6, .8, 1,   2,   4,   6, 8,
                                     10, 20, 40, 60, 80, 100, 200, 400, 0};
static const double itl_ours[] = {.0001, .0002, .0005, .001, .002, .004, .006, .008, .01,
                                  .015,  .02,   .025,  .03,  .04,  .06,  .08,  .1,   .2,
                                  .4,    .8,    1,     2,    4,    8,    0};
static const double itl_sglang[] = {.002, .004, .006, .008, .01, .015, .02, .025,
                                    .03,  .035, .04,  .06,  .08, .1,   .2,  .4,
                                    .6,   .8,   1,    2,    4,   6,    8,   0};
static const double itl_vllm[] = {.01, .025, .05, .075, .1,  .15, .2, .3, .4, .5,
                                  .75, 1,    2.5, 5,    7.5, 10,  20, 40, 80, 0};
static const double e2e_sglang[] = {.1, .2, .4, .6,  .8,  1,   2,   4,    6,    8,    10, 20,
                                    40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400, 0};
static const double request_vllm[] = {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,   20,
                                      30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680, 0};
static const double token_edges[] = {1,     2,      5,      10,     20,      50,    100,
                                     200,   500,    1000,   2000,   5000,    10000, 20000,
                                     50000, 100000, 200000, 500000, 1000000, 0};

/* clang-format off */
static const shape shapes[] = {
    {"time_to_first_token_seconds", "time_to_first_token_seconds", "time_to_first_token_seconds",
     "from the request's headers to the first token", 1e9, offsetof(metrics, ttft), {ttft_ours, ttft_sglang, ttft_ours}},
    {"inter_token_latency_seconds", "inter_token_latency_seconds", "inter_token_latency_seconds",
     "between tokens of a choice", 1e9, offsetof(metrics, itl), {itl_ours, itl_sglang, itl_vllm}},
    {"e2e_request_latency_seconds", "e2e_request_latency_seconds", "e2e_request_latency_seconds",
     "from the request's headers to its end", 1e9, offsetof(metrics, e2e), {ttft_ours, e2e_sglang, request_vllm}},
    {"queue_time_seconds", "queue_time_seconds", "request_queue_time_seconds",
     "until the first choice was admitted", 1e9, offsetof(metrics, queue), {ttft_ours, ttft_sglang, request_vllm}},
    {"request_prefill_time_seconds", NULL, "request_prefill_time_seconds",
     "from admission to the first token", 1e9, offsetof(metrics, prefill), {ttft_ours, NULL, request_vllm}},
    {"request_decode_time_seconds", NULL, "request_decode_time_seconds",
     "from the first token to the end", 1e9, offsetof(metrics, decode), {ttft_ours, NULL, request_vllm}},
    {"request_inference_time_seconds", NULL, "request_inference_time_seconds",
     "from admission to the end", 1e9, offsetof(metrics, inference), {ttft_ours, NULL, request_vllm}},
    {"request_time_per_output_token_seconds", NULL, "request_time_per_output_token_seconds",
     "mean time between tokens of a request", 1e9, offsetof(metrics, tpot), {itl_ours, NULL, itl_vllm}},
    {"request_prompt_tokens", "prompt_tokens_histogram", "request_prompt_tokens",
     "prompt tokens of a request", 1, offsetof(metrics, prompt), {token_edges, token_edges, token_edges}},
    {"request_generation_tokens", "generation_tokens_histogram", "request_generation_tokens",
     "tokens generated for a request", 1, offsetof(metrics, generation), {token_edges, token_edges, token_edges}},
};
/* clang-format on */

static void put_one(FILE *out, const metrics_view *v, const metrics_dialect *d,
                    const shape *s) {
    const char *const names[] = {s->own, s->sglang, s->vllm};
    const char *name = names[d->at];
    if (!name) return;
    histogram_copy h;
    histogram_read((const void *)((const char *)v->m + s->offset), &h);
    metrics_put_head(out, d->prefix, name, "histogram", s->help);
    for (const double *edge = s->edges[d->at]; *edge > 0; edge++) {
        fprintf(out, "%s%s_bucket{%s%s,le=\"%g\"} %llu\n", d->prefix, name, v->m->label,
                d->labels, *edge, (unsigned long long)histogram_below(&h, *edge * s->unit));
    }
    fprintf(out, "%s%s_bucket{%s%s,le=\"+Inf\"} %llu\n", d->prefix, name, v->m->label,
            d->labels, (unsigned long long)h.n);
    fprintf(out, "%s%s_sum{%s%s} %.17g\n%s%s_count{%s%s} %llu\n", d->prefix, name, v->m->label,
            d->labels, (double)h.sum / s->unit, d->prefix, name, v->m->label, d->labels,
            (unsigned long long)h.n);
}

void metrics_put_histograms(FILE *out, const metrics_view *v, const metrics_dialect *d) {
    for (size_t i = 0; i < HD_LEN(shapes); i++) put_one(out, v, d, &shapes[i]);
}
