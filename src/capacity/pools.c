/* pools.c - predictions of a pool, the best ones, and both pools together. */
#include "capacity/pools.h"

#include "base/checked.h"

/* ---- one pool ---- */

/* A prefill server has so many prompts at a time as a step holds, and gives one token of each. */
static hd_load load_of(const hd_load *all, hd_server_pool_role role,
                       const hd_parallel_config *l, int32_t servers) {
    hd_load of = *all;
    if (role == HD_POOL_DECODE) {
        of.users = (int32_t)hd_ceil_div(all->users, servers);
    } else {
        of.users = l->dp * (all->prompt > 0 ? hd_max_i32(1, all->chunk / all->prompt) : 1);
        of.output = 1;
        of.drafts = 0;
        of.accepted = 0;
    }
    return of;
}

hd_status hd_server_pool_predict(hd_server_pool *out, const hd_capacity_args *a,
                                 hd_server_pool_role role, const hd_parallel_config *parallel,
                                 int32_t servers, hd_err *err) {
    hd_capacity_args of_server = *a;
    *out = (hd_server_pool){.servers = servers};
    of_server.load = load_of(&a->load, role, parallel, servers);
    HD_TRY(hd_capacity_predict(&out->each, &of_server, parallel, err));
    const hd_capacity *c = &out->each;
    out->requests_s = role == HD_POOL_PREFILL
                          ? (double)servers * parallel->dp / c->prefill_s
                          : a->load.users * c->user_tokens_s / a->load.output;
    return HD_OK;
}

void hd_server_pool_close(hd_server_pool *p) {
    hd_capacity_close(&p->each);
    *p = (hd_server_pool){0};
}

/* Of a role's other figure, more is better. */
static double other_figure(const hd_server_pool *p, hd_server_pool_role role) {
    return role == HD_POOL_PREFILL ? -p->each.ttft_s : p->each.user_tokens_s;
}

static bool exceeds(const hd_server_pool *a, const hd_server_pool *b,
                    hd_server_pool_role role) {
    const double x = other_figure(a, role), y = other_figure(b, role);
    return a->each.free >= 0 && a->requests_s >= b->requests_s && x >= y &&
           (a->requests_s > b->requests_s || x > y);
}

int32_t hd_server_pool_front(const hd_server_pool *all, int32_t n, hd_server_pool_role role,
                             bool *best) {
    int32_t found = 0;
    for (int32_t i = 0; i < n; i++) {
        best[i] = all[i].each.free >= 0;
        for (int32_t j = 0; best[i] && j < n; j++) best[i] = !exceeds(&all[j], &all[i], role);
        found += best[i];
    }
    return found;
}

/* ---- both ---- */

/* Pages of one prompt, which every rank of a server has: all of it, and its end in window pages. */
static double prompt_kv_bytes(const hd_capacity_args *a) {
    const hd_kv_shape shape = hd_kv_shape_of(a->spec);
    const hd_dtype type = hd_capacity_kv_type(a);
    const int32_t layers = a->spec->n_layers + a->spec->n_mtp, prompt = a->load.prompt;
    const int32_t tokens[HD_N_KV_GROUPS] = {
        [HD_KV_FULL] = prompt, [HD_KV_WINDOW] = hd_min_i32(prompt, shape.lookback)};
    double bytes = 0;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        bytes +=
            (double)hd_ceil_div(tokens[g], shape.page_tokens) *
            (double)hd_kv_page_bytes(a->spec, layers, (hd_kv_group)g, type, a->load.drafts);
    }
    return bytes;
}

static double gpus_of(const hd_server_pool *p) {
    return (double)p->servers * hd_parallel_world(&p->each.parallel);
}

hd_server_pool_pair hd_server_pool_join(const hd_server_pool *prefill,
                                        const hd_server_pool *decode,
                                        const hd_capacity_args *a) {
    const hd_gpu *m = a->gpu;
    const double a_rate = prefill->requests_s / gpus_of(prefill);
    const double b_rate = decode->requests_s / gpus_of(decode);
    hd_server_pool_pair p = {.requests_s = prefill->requests_s < decode->requests_s
                                               ? prefill->requests_s
                                               : decode->requests_s,
                             .kv_bytes = prompt_kv_bytes(a),
                             .user_tokens_s = decode->each.user_tokens_s,
                             .even_share = b_rate / (a_rate + b_rate)};
    p.output_tokens_s = p.requests_s * a->load.output;
    p.input_tokens_s = p.requests_s * a->load.prompt;
    p.transfer_s = hd_gpu_exchange_seconds(m, 1, 0, p.kv_bytes);
    p.ttft_s = prefill->each.ttft_s + p.transfer_s;
    return p;
}
