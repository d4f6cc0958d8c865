/* pools.h - prompts and answers on GPUs of their own: a prefill pool and a decode pool, each of a
 * number of equal servers. A prompt is computed in the prefill pool, its KV pages travel over the
 * network, and its answer is decoded in the other pool. All of it is predicted, as in capacity.h. */
#ifndef HD_CAPACITY_POOLS_H
#define HD_CAPACITY_POOLS_H

#include "capacity/capacity.h"

typedef enum hd_server_pool_role { HD_POOL_PREFILL, HD_POOL_DECODE } hd_server_pool_role;

typedef struct hd_server_pool {
    int32_t servers;   /* of one layout each */
    hd_capacity each;  /* one server; a prefill server has prompts of one step at a time */
    double requests_s; /* of all servers, without the other pool */
} hd_server_pool;

/* Predicts a pool under the load of a, whose users are those of all servers. Errors are those of
 * hd_capacity_predict(); the caller owns *out (hd_server_pool_close). */
hd_status hd_server_pool_predict(hd_server_pool *out, const hd_capacity_args *a,
                                 hd_server_pool_role role, const hd_parallel_config *parallel,
                                 int32_t servers, hd_err *err);
void hd_server_pool_close(hd_server_pool *p); /* an all-zero one is fine */

/* Marks those of n pools that fit, and that no other which fits exceeds both in requests_s and in
 * the other figure of its role: TTFT, or tokens per second of a user. Returns their number. */
int32_t hd_server_pool_front(const hd_server_pool *all, int32_t n, hd_server_pool_role role,
                             bool *best);

/* Both pools together; the slower one sets the rate. */
typedef struct hd_server_pool_pair {
    double requests_s, output_tokens_s, input_tokens_s; /* of all GPUs */
    double kv_bytes, transfer_s;                        /* of one prompt */
    double ttft_s;                                      /* prompt and transfer */
    double user_tokens_s;
    double even_share; /* of the GPUs in prefill, at which both pools are equally fast */
} hd_server_pool_pair;

hd_server_pool_pair hd_server_pool_join(const hd_server_pool *prefill,
                                        const hd_server_pool *decode,
                                        const hd_capacity_args *a);

#endif
